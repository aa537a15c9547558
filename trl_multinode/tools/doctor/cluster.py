"""All nodes together: they meet by a roll-call, exchange their reports, try each other, and measure their links."""

import asyncio
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator

import msgspec

from ...run.versions import MISSING, Difference, differences
from ..check.meeting import Place
from ..check.rollcall import call
from ..check.waiting import NO_PLACE, hello_of, place_of
from .case import Case
from .exchange import Exchange, NodeLost
from .facts import Finding, NodeReport
from .links import Link, link_findings
from .neighbours import cannot_reach, open_listener, reach_findings
from .ring import RingPlan

RING_START_S = 120.0  # for the import of torch on a slow file system, and for NCCL's first connections
ROUND_S = 10.0  # for one round of the ring, with one GPU; mostly below 1 s


class ClusterReport(msgspec.Struct):
    """Results of all nodes."""

    nodes: list[NodeReport]
    links: list[Link] = []
    findings: list[Finding] = []  # about more than one node
    backend: str = ""  # over which the links were measured


class RingResult(msgspec.Struct):
    """Links that end at one node, or the reason why they were not measured."""

    links: list[Link] = []
    error: str = ""


class Part(msgspec.Struct):
    """Number that a node publishes with a reason or without."""

    number: int = 0
    reason: str = ""


def examine_cluster(case: Case, report: NodeReport, timeout_s: float) -> ClusterReport:
    """Examine all nodes together. Every node calls it, and all get the same report, unless the meeting fails.

    Args:
        case ([`Case`]):
            Launch on this node.
        report ([`NodeReport`]):
            Results of this node.
        timeout_s (`float`):
            Longest wait for the other nodes.
    """
    place = place_of(case.launch, timeout_s)
    if place is None:
        return ClusterReport([report], findings=[Finding("error", "roll-call", NO_PLACE, "see the errors above")])
    # Versions and numbers are compared in the report, where all are shown
    hello = hello_of(case.launch, report.gpus, processes=0, versions={}, problems=[])
    verdict = asyncio.run(call(place, hello))
    if verdict.code:
        cure = "docs/operate/errors.md explains the lines of the roll-call"
        lines = [line.removeprefix("error: ") for line in verdict.lines]
        return ClusterReport([report], findings=[Finding("error", "roll-call", line, cure) for line in lines])
    try:
        with Exchange(place.address, place.port, case.rank, case.launch.num_nodes) as exchange:
            return _together(case, report, exchange, place)
    except NodeLost as error:
        finding = Finding("error", "nodes", str(error), "look at the output of that node, and start all nodes again")
        return ClusterReport([report], findings=[finding])


def _together(case: Case, report: NodeReport, exchange: Exchange, place: Place) -> ClusterReport:
    exchange.publish("report", report)
    found = ClusterReport(exchange.collect("report", NodeReport))
    found.findings += [*differing(found.nodes), *_unreachable(report, found.nodes, exchange)]
    if any(finding.about == "neighbours" for finding in found.findings):
        return found  # to measure the ring would take minutes, and end in an error without a name
    found.backend = (
        "nccl" if all(node.gpus and node.versions.get("cuda") != MISSING for node in found.nodes) else "gloo"
    )
    gpus = min(node.gpus for node in found.nodes) if found.backend == "nccl" else 0
    plan = RingPlan(case.rank, len(found.nodes), place.address, place.port, found.backend, gpus)
    limit_s = RING_START_S + ROUND_S * 3 * max(1, gpus)
    exchange.publish("ring", measure_links(plan, report.nic, limit_s))
    results = exchange.collect("ring", RingResult, limit_s + 30.0)
    found.links = [link for result in results for link in result.links]
    found.findings += _unmeasured(found.nodes, results)
    found.findings += link_findings(found.links, found.nodes, case.on_gpus)
    return found


def differing(nodes: list[NodeReport]) -> Iterator[Finding]:
    """Yield a finding for each fact that should be equal on all nodes and is not."""
    cure = "make the nodes equal: every step waits for the slowest, and ranks must compute the same"
    names = [node.name for node in nodes]
    for one in differences([node.versions for node in nodes], names):
        yield Finding(
            "error" if one.is_error else "warning", "versions", f"{one}", "install the same version on all nodes"
        )
    values: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    severity = {fact.name: fact.nodes for node in nodes for fact in node.facts if fact.same}
    for node in nodes:
        facts = {fact.name: fact.value for fact in node.facts}
        for name in severity:
            values[name][facts.get(name, "none")].append(node.name)
    for name, by_value in values.items():
        if len(by_value) > 1:
            most_first = dict(sorted(by_value.items(), key=lambda entry: -len(entry[1])))
            what = str(Difference(name, most_first, is_error=False)).replace(f"{name}: ", f"{name} differ: ", 1)
            yield Finding(severity[name], name, what, cure)


def _unreachable(report: NodeReport, nodes: list[NodeReport], exchange: Exchange) -> list[Finding]:
    """Let each node connect to the next one, and return an error for each that cannot."""
    listener = open_listener(report.address)
    exchange.publish("port", Part(listener.port if listener else 0))
    ports = [part.number for part in exchange.collect("port", Part)]
    after = nodes[(report.rank + 1) % len(nodes)]
    reason = cannot_reach(after.address, ports[after.rank]) if ports[after.rank] else "it cannot listen at its address"
    exchange.publish("reach", Part(reason=reason))
    reasons = {rank: part.reason for rank, part in enumerate(exchange.collect("reach", Part))}
    if listener is not None:
        listener.close()
    return reach_findings(nodes, reasons, lambda rank: ports[rank])


def measure_links(plan: RingPlan, nic: str, limit_s: float) -> RingResult:
    """Run the process that measures the links of this node, and return its result or the reason why it has none."""
    command = [sys.executable, "-m", "trl_multinode.tools.doctor.ring", msgspec.json.encode(plan).decode()]
    interface = {} if os.environ.get("GLOO_SOCKET_IFNAME") or not nic else {"GLOO_SOCKET_IFNAME": nic}
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **interface}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return RingResult(error=f"the transfers did not end within {limit_s:.0f} s")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return RingResult(error=f"exit code {done.returncode}: {last[:300]}")
    return RingResult(links=msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=list[Link]))


def _unmeasured(nodes: list[NodeReport], results: list[RingResult]) -> Iterator[Finding]:
    for node, result in zip(nodes, results, strict=True):
        if result.error:
            what = f"the links of node {node.name} were not measured ({result.error})"
            cure = "a run would fail in the same way; NCCL_DEBUG=INFO or TORCH_DISTRIBUTED_DEBUG=DETAIL shows more"
            yield Finding("error", "links", what, cure)
