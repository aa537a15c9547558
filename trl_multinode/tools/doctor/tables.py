"""Tables and pictures of a report, and its findings as lines."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..text import count, rich_table
from .cluster import ClusterReport
from .facts import Finding, NodeReport
from .links import slow_links, speed, usual_speed

MARKS = {"error": ("error", "bold red"), "warning": ("warn", "yellow"), "": ("ok", "green")}
MOST_COLUMNS = 4  # nodes side by side; of more, equal values share a row
MOST_LINKS = 16
BAR = 30  # characters of the fastest link

Where = tuple[str, Finding]  # node ("node 0", or an empty string for all) and finding


def mark(name: str, findings: Iterable[Finding]) -> Text:
    """Return the gravest severity among the findings about a fact."""
    found = {finding.severity for finding in findings if finding.about == name}
    return Text(*MARKS[next((each for each in ("error", "warning") if each in found), "")])


def node_table(node: NodeReport) -> Table:
    """Return the table of one node, a row per fact."""
    rows = ((mark(fact.name, node.findings), fact.name, fact.value) for fact in node.facts)
    return rich_table(f"node {node.rank}: {node.host}", ("", "", "found"), rows)


def cluster_tables(report: ClusterReport) -> Iterator[Table]:
    """Yield the table of the facts that are equal on all nodes, and that of the others with the nodes side by side."""
    nodes = report.nodes
    findings = [*report.findings, *(one for node in nodes for one in node.findings)]
    facts = [{fact.name: fact.value for fact in node.facts} for node in nodes]
    beside = len(nodes) <= MOST_COLUMNS
    columns = [f"node {node.rank}\n{node.host}" for node in nodes] if beside else ["found", "nodes"]
    equal: list[tuple] = []
    different: list[tuple] = []
    for name in dict.fromkeys(name for found in facts for name in found):
        values = [found.get(name, "none") for found in facts]
        first = mark(name, findings), name
        if len(set(values)) == 1:
            equal.append((*first, values[0]))
        elif beside:
            different.append((*first, *map(_cell, nodes, [name] * len(nodes), values)))
        else:
            different += _by_value(first, values)
    yield rich_table(f"equal on all {len(nodes)} nodes", ("", "", "found"), equal)
    yield rich_table("not equal", ("", "", *columns), different)


def _by_value(first: tuple, values: list[str]) -> Iterator[tuple]:
    for value in sorted(set(values), key=values.count, reverse=True):
        yield *first, value, _ranks([rank for rank, each in enumerate(values) if each == value])
        first = ("", "")


def _cell(node: NodeReport, name: str, value: str) -> Text:
    found = mark(name, node.findings)
    return Text(value) if found.plain == "ok" else Text(f"{value}  <- {found.plain}", found.style)


def _ranks(ranks: list[int]) -> str:
    """Return ranks as ranges: 0-61, 63."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    return ", ".join(str(one[0]) if len(one) == 1 else f"{one[0]}-{one[-1]}" for one in ranges)


def links_table(report: ClusterReport, bar: str) -> Table:
    """Return the picture of the ring: a bar per link; of many links the slowest ones."""
    usual, slow = usual_speed(report.links), slow_links(report.links)
    shown = sorted(report.links, key=lambda link: link.gbit_per_s)[:MOST_LINKS]
    more = len(report.links) - len(shown)
    if not more:
        shown.sort(key=lambda link: (link.sender, link.device))
    names = [node.name for node in report.nodes]
    rows: list[tuple] = []
    for link in shown:
        found = Text(*MARKS["error" if link in slow else ""])
        gpu = "" if link.device == "cpu" else f", GPU {link.device}"
        length = max(1, round(BAR * min(1.0, link.gbit_per_s / usual))) if usual else 1
        cells = (
            speed(link.gbit_per_s),
            f"{link.round_trip_ms:.3g} ms",
            Text(bar * length, found.style),
        )
        rows.append((found, f"{names[link.sender]} -> {names[link.receiver]}{gpu}", *cells))
    if more:
        rows.append(
            (
                "",
                f"{more} faster ones",
                f"up to {speed(max(one.gbit_per_s for one in report.links))}",
            )
        )
    title = f"ring of {len(names)} nodes over {report.backend}, each link measured alone"
    return rich_table(title, ("", "link", "speed", "round trip", ""), rows)


def print_findings(console: Console, findings: list[Where]) -> None:
    """Print findings, one sentence on a line and equal ones of many nodes once, and their number."""
    ranks: dict[Finding, list[int]] = defaultdict(list)
    for node, finding in findings:
        ranks[finding] += [int(node.removeprefix("node "))] if node else []
    for finding in sorted(ranks, key=lambda finding: finding.severity != "error"):
        found = ranks[finding]
        place = f"node{'s' * (len(found) > 1)} {_ranks(found)}: " if found else ""
        line = f"{finding.severity}: {place}{finding.what}"
        console.print(line, style=MARKS[finding.severity][1], soft_wrap=True)
        console.print(f"{'cure':>{len(finding.severity)}}: {finding.cure}", soft_wrap=True)
    errors = sum(finding.severity == "error" for finding in ranks)
    counts = f"{count(errors, 'error')}, {count(len(ranks) - errors, 'warning')}"
    verdict, style = ("not ready", "bold red") if errors else ("ok", "green")
    console.print(f"{verdict}: {counts}", style=style, soft_wrap=True)
