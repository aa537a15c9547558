"""All nodes together: they meet by a roll-call, exchange their reports, try each other, and measure their links."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import msgspec

from ...run.versions import MISSING
from ..differences import differences
from ..launch.joining import NO_PLACE, hello_of, place_of
from ..launch.meeting import Place
from ..launch.rollcall import call
from .case import Case
from .exchange import Exchange, NodeLost
from .facts import Finding, NodeReport
from .links import Link, link_findings
from .ring import RingPlan

RING_START_S = (
    120.0  # for the import of torch on a slow file system, and for NCCL's first connections
)
CONNECT_S = 5.0  # between neighbours
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

    def alone(about: str, cure: str, *errors: str) -> ClusterReport:
        return ClusterReport(
            [report], findings=[Finding("error", about, error, cure) for error in errors]
        )

    place = place_of(case.launch, timeout_s)
    if place is None:
        return alone("roll-call", "see the errors above", NO_PLACE)
    # Versions and numbers are compared in the report, where all are shown
    hello = hello_of(case.launch, report.gpus, processes=[], versions={}, problems=[])
    verdict = asyncio.run(call(place, hello))
    if verdict.code:
        cure = "docs/operate/errors.md explains the lines of the roll-call"
        return alone("roll-call", cure, *(line.removeprefix("error: ") for line in verdict.lines))
    try:
        with Exchange(place.address, place.port, case.rank, case.launch.num_nodes) as exchange:
            return _together(case, report, exchange, place)
    except NodeLost as error:
        cure = "look at the output of that node, and start all nodes again"
        return alone("nodes", cure, str(error))


def _together(case: Case, report: NodeReport, exchange: Exchange, place: Place) -> ClusterReport:
    nodes = exchange.gather("report", report)
    found = ClusterReport(nodes, findings=list(differing(nodes)))
    unreachable = list(_unreachable(report, nodes, exchange))
    found.findings += unreachable
    if unreachable:
        return found  # to measure the ring would take minutes, and end in an error without a name
    on_gpus = all(node.gpus and node.versions.get("cuda") != MISSING for node in nodes)
    found.backend = "nccl" if on_gpus else "gloo"
    gpus = min(node.gpus for node in nodes) if on_gpus else 0
    plan = RingPlan(case.rank, len(nodes), place.address, place.port, found.backend, gpus)
    limit_s = RING_START_S + ROUND_S * 3 * max(1, gpus)
    results = exchange.gather("ring", measure_links(plan, report.nic, limit_s), limit_s + 30.0)
    found.links = [link for result in results for link in result.links]
    for node, result in zip(nodes, results, strict=True):
        if result.error:
            found.findings.append(
                Finding(
                    "error",
                    "links",
                    f"the links of node {node.name} were not measured ({result.error})",
                    "a run would fail in the same way; NCCL_DEBUG=INFO or TORCH_DISTRIBUTED_DEBUG=DETAIL shows more",
                )
            )
    found.findings += link_findings(found.links, nodes, case.on_gpus)
    return found


def differing(nodes: list[NodeReport]) -> Iterator[Finding]:
    """Yield a finding for each fact that should be equal on all nodes and is not."""
    names = [node.name for node in nodes]
    for one in differences([node.versions for node in nodes], names):
        severity = "error" if one.is_error else "warning"
        yield Finding(severity, "versions", f"{one}", "install the same version on all nodes")
    severities = {fact.name: fact.nodes for node in nodes for fact in node.facts if fact.same}
    facts = [dict.fromkeys(severities, MISSING) | _compared(node) for node in nodes]
    for one in differences(facts, names):
        what = str(one).replace(":", " differ:", 1)
        yield Finding(
            severities[one.library],
            one.library,
            what,
            "make the nodes equal: every step waits for the slowest, and ranks must compute the same",
        )


def _compared(node: NodeReport) -> dict[str, str]:
    return {fact.name: fact.value for fact in node.facts if fact.same}


def _unreachable(
    report: NodeReport, nodes: list[NodeReport], exchange: Exchange
) -> Iterator[Finding]:
    """Let each node connect to the next one, and yield an error for each that cannot.

    A firewall may let all nodes reach node 0 and not each other.
    """
    family = socket.AF_INET6 if ":" in report.address else socket.AF_INET
    with ExitStack() as stack:
        port = 0
        with suppress(OSError):
            listener = stack.enter_context(socket.create_server((report.address, 0), family=family))
            port = listener.getsockname()[1]
        ports = exchange.gather("port", port)
        after = (report.rank + 1) % len(nodes)
        reasons = exchange.gather("reach", _cannot_reach(nodes[after].address, ports[after]))
    for rank, reason in enumerate(reasons):
        after = (rank + 1) % len(nodes)
        if reason:
            yield Finding(
                "error",
                "neighbours",
                f"node {nodes[rank].name} cannot reach node {nodes[after].name} at {nodes[after].address}"
                f":{ports[after]} ({reason})",
                "open all ports between the nodes, because NCCL and gloo choose free ones; if the address is wrong,"
                " set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME",
            )


def _cannot_reach(address: str, port: int) -> str:
    """Connect to a port, and return the reason why that failed; an empty string if it worked."""
    if not port:
        return "it cannot listen at its address"
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S):
            return ""
    except TimeoutError:
        return f"no answer within {CONNECT_S:.0f} s"
    except OSError as error:
        return error.strerror or str(error)


def measure_links(plan: RingPlan, nic: str, limit_s: float) -> RingResult:
    """Run the process that measures the links of this node, and return its result or the reason why it has none."""
    command = [
        sys.executable,
        "-m",
        "trl_multinode.tools.doctor.ring",
        msgspec.json.encode(plan).decode(),
    ]
    interface = (
        {} if os.environ.get("GLOO_SOCKET_IFNAME") or not nic else {"GLOO_SOCKET_IFNAME": nic}
    )
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **interface}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return RingResult(error=f"the transfers did not end within {limit_s:.0f} s")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return RingResult(error=f"exit code {done.returncode}: {last[:300]}")
    return RingResult(
        links=msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=list[Link])
    )
