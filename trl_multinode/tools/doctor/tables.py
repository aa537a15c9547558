"""Tables and pictures of a report, and its findings as lines."""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .cluster import ClusterReport
from .facts import Finding, NodeReport
from .links import Link, slow_links, speed, usual_speed

MARKS = {"error": ("error", "bold red"), "warning": ("warn", "yellow"), "": ("ok", "green")}
MOST_COLUMNS = 4  # nodes side by side; of more, equal values share a row
MOST_LINKS = 16
BAR = 30  # characters of the fastest link


def severity_of(name: str, findings: Iterable[Finding]) -> str:
    """Return the gravest severity among the findings about a fact; an empty string without one."""
    found = {finding.severity for finding in findings if finding.about == name}
    return "error" if "error" in found else "warning" if "warning" in found else ""


def node_table(node: NodeReport) -> Table:
    """Return the table of one node, a row per fact."""
    table = _table(f"node {node.rank}: {node.host}", "", "", "found")
    for fact in node.facts:
        mark, style = MARKS[severity_of(fact.name, node.findings)]
        table.add_row(Text(mark, style), fact.name, Text(fact.value))
    return table


def common_table(nodes: list[NodeReport], values: dict[str, dict[int, str]]) -> Table:
    """Return the table of the facts that are equal on all nodes."""
    table = _table(f"equal on all {len(nodes)} nodes", "", "", "found")
    for name, by_node in values.items():
        if len(set(by_node.values())) == 1:
            mark, style = MARKS[severity_of(name, [one for node in nodes for one in node.findings])]
            table.add_row(Text(mark, style), name, Text(next(iter(by_node.values()))))
    return table


def different_table(nodes: list[NodeReport], values: dict[str, dict[int, str]], between: list[Finding]) -> Table:
    """Return the table of the facts that are not equal, with the nodes side by side."""
    beside = len(nodes) <= MOST_COLUMNS
    columns = [f"node {node.rank}\n{node.host}" for node in nodes] if beside else ["found", "nodes"]
    table = _table("not equal", "", "", *columns)
    for name, by_node in values.items():
        if len(set(by_node.values())) == 1:
            continue
        mark, style = MARKS[severity_of(name, [*between, *(one for node in nodes for one in node.findings)])]
        if beside:
            cells = [_cell(node, name, by_node[node.rank]) for node in nodes]
            table.add_row(Text(mark, style), name, *cells)
            continue
        for value, ranks in _by_value(by_node).items():
            table.add_row(Text(mark, style), name, Text(value), _ranks(ranks))
            mark = name = ""
    return table


def values_by_fact(nodes: list[NodeReport]) -> dict[str, dict[int, str]]:
    """Return the value of each fact on each node."""
    names = list(dict.fromkeys(fact.name for node in nodes for fact in node.facts))
    of_node = {node.rank: {fact.name: fact.value for fact in node.facts} for node in nodes}
    return {name: {rank: facts.get(name, "none") for rank, facts in of_node.items()} for name in names}


def _cell(node: NodeReport, name: str, value: str) -> Text:
    severity = severity_of(name, node.findings)
    return Text(f"{value}  <- {MARKS[severity][0]}" if severity else value, MARKS[severity][1] if severity else "")


def _by_value(by_node: dict[int, str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for rank, value in by_node.items():
        found[value].append(rank)
    return dict(sorted(found.items(), key=lambda entry: -len(entry[1])))


def _ranks(ranks: list[int]) -> str:
    """Return ranks as ranges: 0-61, 63."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def links_table(report: ClusterReport, bar: str) -> Table:
    """Return the picture of the ring: a bar per link; of many links the slowest ones."""
    usual, slow = usual_speed(report.links), set(slow_links(report.links))
    shown = sorted(report.links, key=lambda link: link.gbit_per_s)[:MOST_LINKS]
    if len(shown) == len(report.links):
        shown = sorted(shown, key=lambda link: (link.sender, link.device))
    title = f"ring of {len(report.nodes)} nodes over {report.backend}, each link measured alone"
    table = _table(title, "", "link", "speed", "round trip", "")
    for column in table.columns:  # long names of hosts fold, and leave the figures their width
        column.no_wrap = column.header != "link"
    for link in shown:
        mark, style = MARKS["error" if link in slow else ""]
        length = max(1, round(BAR * min(1.0, link.gbit_per_s / usual))) if usual else 1
        cells = (_ends(link, report.nodes), speed(link.gbit_per_s), f"{link.round_trip_ms:.3g} ms")
        table.add_row(Text(mark, style), *cells, Text(bar * length, style))
    if more := len(report.links) - len(shown):
        table.add_row("", f"{more} faster ones", f"up to {speed(max(one.gbit_per_s for one in report.links))}")
    return table


def _ends(link: Link, nodes: list[NodeReport]) -> str:
    gpu = "" if link.device == "cpu" else f", GPU {link.device}"
    return f"{nodes[link.sender].name} -> {nodes[link.receiver].name}{gpu}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=any(columns[2:]), header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=index < 2)
    return table


def finding_lines(findings: Iterable[tuple[str, Finding]]) -> Iterator[tuple[str, str]]:
    """Yield lines and their style for findings with the node of each; equal ones of many nodes are one.

    Args:
        findings (`Iterable[tuple[str, Finding]]`):
            Node ("node 0", or an empty string for all) and finding.
    """
    where: dict[Finding, list[str]] = defaultdict(list)
    for node, finding in findings:
        where[finding].append(node)
    for finding, nodes in sorted(where.items(), key=lambda entry: entry[0].severity != "error"):
        ranks = [int(node.removeprefix("node ")) for node in nodes if node]
        place = f"{_many(len(ranks), 'node', numbered=False)} {_ranks(ranks)}: " if ranks else ""
        yield f"{finding.severity}: {place}{finding.what}", MARKS[finding.severity][1]
        yield f"{'cure':>{len(finding.severity)}}: {finding.cure}", ""


def print_findings(console: Console, findings: Iterable[tuple[str, Finding]]) -> None:
    """Print findings, one sentence on a line, and their number."""
    found = list(findings)
    for line, style in finding_lines(found):
        console.print(line, style=style, soft_wrap=True, markup=False, highlight=False)
    unique = {finding for _, finding in found}
    errors = sum(finding.severity == "error" for finding in unique)
    counts = f"{_many(errors, 'error')}, {_many(len(unique) - errors, 'warning')}"
    style = "bold red" if errors else "green"
    console.print(f"{'not ready' if errors else 'ok'}: {counts}", style=style, soft_wrap=True, highlight=False)


def _many(count: int, noun: str, numbered: bool = True) -> str:
    return f"{count} " * numbered + noun + "s" * (count != 1)
