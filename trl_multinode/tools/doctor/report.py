"""Report of the doctor: text in sections, one JSON document, or a block for an issue."""

import argparse
import json
import os
import re
import sys
from contextlib import redirect_stdout
from typing import Any

import msgspec
from rich.console import Console

from ..check.command_line import parse
from ..check.launch import Launch
from ..check.report import check, notes, table
from ..launch.joining import INTERRUPTED
from .case import Case
from .cluster import examine_cluster
from .facts import Finding, NodeReport
from .gpus import known_gpus
from .node import examine
from .redaction import hide_names, hide_secrets, hide_secrets_in
from .tables import Where, cluster_tables, links_table, node_table, print_findings

WIDTH = 120  # of a log; a terminal has its own
PASTED_WIDTH = 1000  # of a block for an issue: a name that is folded over two lines would not be found and hidden


class Report:
    """Report that grows level by level, printed at once unless it is one document.

    Args:
        options (`argparse.Namespace`):
            Command line.
    """

    def __init__(self, options: argparse.Namespace):
        self._options = options
        self._stdout = sys.stdout
        self._streams = not (options.json or options.paste)
        is_terminal = self._streams and sys.stdout.isatty()
        width = PASTED_WIDTH if options.paste else WIDTH
        self._console = Console(
            force_terminal=is_terminal,
            width=None if is_terminal else width,
            highlight=False,
            markup=False,
        )
        self._kept: list[str] = []
        self.document: dict[str, Any] = {"level": options.level, "file": options.file}
        self.findings: list[Where] = []
        self.hosts: list[str] = []  # names and addresses that a block for an issue does not show

    @property
    def bar(self) -> str:
        """Character of a bar that this stream can show."""
        return "█" if "utf" in self._console.encoding else "#"

    def section(self, *parts: Any, findings: list[Where] | None = None) -> None:
        """Add tables, lines and findings."""
        with self._console.capture() as captured:
            for part in parts:
                self._console.print(part, soft_wrap=isinstance(part, str))
            if findings is not None:
                print_findings(self._console, findings)
                self.findings = findings
        text = hide_secrets(captured.get(), os.environ)
        self._kept.append(text)
        if self._streams:
            print(text, file=self._stdout, flush=True)

    def finish(self) -> int:
        """Print what was kept, and return the exit status."""
        errors = any(finding.severity == "error" for _, finding in self.findings)
        if self._options.json:
            document = hide_secrets_in({"ok": not errors, **self.document}, os.environ)
            print(json.dumps(document, indent=2), flush=True)
        elif self._options.paste:
            text = hide_names("\n".join(self._kept), self.hosts).strip()
            title = f"trl-multinode doctor --level {self._options.level}"
            print(
                f"<details><summary>{title}</summary>\n\n```text\n{text}\n```\n\n</details>",
                flush=True,
            )
        return 1 if errors else 0


def main(argv: list[str]) -> int:
    """Examine the launch, this node and all nodes, as far as the level says.

    Returns:
        `int`: 0 without errors, 1 with errors.

    Raises:
        `SystemExit`: with status 2, for an invalid command line.
    """
    options = parse(argv, "doctor")
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
    node = examine(case)
    report.hosts = [node.host, *_private(case.address), *_private(node.address)]
    report.document["nodes"] = [msgspec.to_builtins(node)]
    report.section(node_table(node), findings=[*report.findings, *_findings(node)])
    if options.level == "cluster" and case.many_nodes:
        _cluster(case, node, options.timeout, report)
    elif options.level == "cluster":
        report.section("This launch has one node, which has no neighbours to measure.")


def _static(options: argparse.Namespace, report: Report) -> Launch | None:
    gpus = options.gpus_per_node or (options.level != "static" and len(known_gpus())) or 8
    launch, problems = check(
        options.file,
        [*options.flags, *options.script],
        options.batch,
        gpus,
        options.engines,
        table=options.ranks,
    )
    lines = [table(launch), *(f"note: {note}" for note in notes(launch))] if launch else []
    found = [("", Finding("error", "launch", problem.what, problem.cure)) for problem in problems]
    report.section(*lines, findings=found)
    report.document["problems"] = [vars(problem) for problem in problems]
    return launch


def _cluster(case: Case, node: NodeReport, timeout_s: float, report: Report) -> None:
    found = examine_cluster(case, node, timeout_s)
    report.hosts += [name for each in found.nodes for name in (each.host, *_private(each.address))]
    report.document |= msgspec.to_builtins(found)
    findings = [pair for pair in report.findings if not pair[0]]
    findings += [("", finding) for finding in found.findings]
    findings += [pair for each in found.nodes for pair in _findings(each)]
    parts: list[Any] = []
    if case.rank != 0 and len(found.nodes) > 1:
        parts.append(f"The report of all nodes is in the output of node {found.nodes[0].name}.")
    elif len(found.nodes) > 1:
        parts += cluster_tables(found)
        if found.links:
            parts.append(links_table(found, report.bar))
    report.section(*parts, findings=findings)


def _findings(node: NodeReport) -> list[Where]:
    return [(f"node {node.rank}", finding) for finding in node.findings]


def _private(address: str) -> list[str]:
    """Return the address if it is a name or of IPv6; other addresses are found by their form."""
    return [address] if address and not re.fullmatch(r"[\d.]+|::1|localhost", address) else []
