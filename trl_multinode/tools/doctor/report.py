"""Report of the doctor: text in sections, one JSON document, or a block for an issue."""

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any, TextIO

import msgspec
from rich.console import Console

from ..check.command_line import parse
from ..check.launch import Launch, Problem
from ..check.report import check, notes, table
from ..check.waiting import INTERRUPTED
from .case import Case
from .cluster import ClusterReport, examine_cluster
from .facts import Finding, NodeReport
from .gpu_list import NoTool, list_gpus
from .node import examine
from .redaction import hide_names, hide_secrets, hide_secrets_in
from .tables import common_table, different_table, links_table, node_table, print_findings, values_by_fact

WIDTH = 120  # of a log; a terminal has its own
PASTED_WIDTH = 1000  # of a block for an issue: a name that is folded over two lines would not be found and hidden


class Buffer(io.StringIO):
    """Text in memory for a stream whose encoding decides on the characters of rich's tables.

    Args:
        stream (`TextIO`):
            Stream on which the text will be printed.
    """

    def __init__(self, stream: TextIO):
        super().__init__()
        self._encoding = stream.encoding or "utf-8"

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding


class Report:
    """Report that grows level by level, printed at once unless it is one document.

    Args:
        options (`argparse.Namespace`):
            Command line.
    """

    def __init__(self, options: argparse.Namespace):
        self._options, self._streams = options, not (options.json or options.paste)
        self._stdout = sys.stdout
        self._kept: list[str] = []
        self.bar = "█" if "utf" in Buffer(sys.stdout).encoding.lower() else "#"
        self.document: dict[str, Any] = {"level": options.level, "file": options.file}
        self.findings: list[tuple[str, Finding]] = []
        self.hosts: list[str] = []  # names and addresses that a block for an issue does not show

    def section(self, *parts: Any, findings: list[tuple[str, Finding]] | None = None) -> None:
        """Add tables, lines and findings."""
        is_terminal = self._streams and self._stdout.isatty()
        text = Buffer(self._stdout)
        width = None if is_terminal else PASTED_WIDTH if self._options.paste else WIDTH
        console = Console(file=text, force_terminal=is_terminal, width=width, highlight=False)
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str), markup=False)
        if findings is not None:
            print_findings(console, findings)
            self.findings = findings
        self._kept.append(text.getvalue())
        if self._streams:
            print(hide_secrets(text.getvalue(), os.environ), file=self._stdout, flush=True)

    def finish(self) -> int:
        """Print what was kept, and return the exit status."""
        errors = any(finding.severity == "error" for _, finding in self.findings)
        if self._options.json:
            document = hide_secrets_in({"ok": not errors, **self.document}, os.environ)
            print(json.dumps(document, indent=2), file=self._stdout, flush=True)
        elif self._options.paste:
            print(self._block(), file=self._stdout, flush=True)
        return 1 if errors else 0

    def _block(self) -> str:
        text = hide_names(hide_secrets("\n".join(self._kept), os.environ), self.hosts).strip()
        title = f"trl-multinode doctor --level {self._options.level}"
        return f"<details><summary>{title}</summary>\n\n```text\n{text}\n```\n\n</details>"


def main(argv: list[str]) -> int:
    """Examine the launch, this node and all nodes, as far as the level says.

    Returns:
        `int`: 0 without errors, 1 with errors.

    Raises:
        `SystemExit`: with status 2, for an invalid command line.
    """
    options = parse(argv, doctor=True)
    report = Report(options)
    try:
        with redirect_stdout(sys.stderr):  # lines of the roll-call; a JSON document must be alone
            _levels(options, report)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return report.finish()


def _levels(options: argparse.Namespace, report: Report) -> None:
    launch = _static(options, report)
    if launch is None or options.level == "static":
        return
    case = Case(launch)
    node = _node(case, report)
    if options.level == "cluster" and case.many_nodes:
        _cluster(case, node, options.timeout, report)
    elif options.level == "cluster":
        report.section("This launch has one node, which has no neighbours to measure.")


def _static(options: argparse.Namespace, report: Report) -> Launch | None:
    gpus = options.gpus_per_node or (options.level != "static" and _gpus_here()) or 8
    launch, problems = check(options.file, options.flags, options.batch, gpus, options.engines)
    lines = [table(launch), *(f"note: {note}" for note in notes(launch))] if launch else []
    found = [("", _as_finding(problem)) for problem in problems]
    report.section(*lines, findings=found)
    report.document["problems"] = [{"what": problem.what, "cure": problem.cure} for problem in problems]
    return launch


def _gpus_here() -> int:
    try:
        return len(list_gpus())
    except NoTool:
        return 0


def _as_finding(problem: Problem) -> Finding:
    return Finding("error", "launch", problem.what, problem.cure)


def _node(case: Case, report: Report) -> NodeReport:
    node = examine(case)
    report.hosts = [node.host, *_private(case.address), *_private(node.address)]
    own = [(f"node {node.rank}", finding) for finding in node.findings]
    report.section(node_table(node), findings=[*report.findings, *own])
    report.document["nodes"] = [msgspec.to_builtins(node)]
    return node


def _cluster(case: Case, node: NodeReport, timeout_s: float, report: Report) -> None:
    found = examine_cluster(case, node, timeout_s)
    report.hosts += [name for each in found.nodes for name in (each.host, *_private(each.address))]
    report.document |= msgspec.to_builtins(found)
    all_findings = [*(pair for pair in report.findings if not pair[0]), *_findings(found)]
    if case.rank != 0 and len(found.nodes) > 1:
        report.section(
            f"The report of all nodes is in the output of node {found.nodes[0].name}.", findings=all_findings
        )
        return
    report.section(*_tables(found, report.bar), findings=all_findings)


def _private(address: str) -> list[str]:
    """Return the address if it is a name or of IPv6; other addresses are found by their form."""
    return [address] if address and not re.fullmatch(r"[\d.]+|::1|localhost", address) else []


def _findings(found: ClusterReport) -> Iterator[tuple[str, Finding]]:
    yield from (("", finding) for finding in found.findings)
    for node in found.nodes:
        yield from ((f"node {node.rank}", finding) for finding in node.findings)


def _tables(found: ClusterReport, bar: str) -> Iterator[Any]:
    if len(found.nodes) > 1:
        values = values_by_fact(found.nodes)
        yield common_table(found.nodes, values)
        yield different_table(found.nodes, values, found.findings)
    if found.links:
        yield links_table(found, bar)
