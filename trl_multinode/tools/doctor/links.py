"""Links between neighbours in the ring of nodes, and which of them is slow."""

from collections import defaultdict

import msgspec

from .facts import Finding, NodeReport

SLOW_SHARE = 0.5  # of the speed that the best quarter of the links reaches
LOW_GBIT_PER_S = 10.0  # between GPU nodes


class Link(msgspec.Struct, frozen=True):
    """Measured speed from one node to the next one."""

    sender: int
    receiver: int
    gbit_per_s: float
    round_trip_ms: float
    device: str = "cpu"  # "cpu" or the index of the GPU at both ends

    def __str__(self) -> str:
        gpu = "" if self.device == "cpu" else f" (GPU {self.device})"
        return f"{self.sender} -> {self.receiver}{gpu}"


def rounds_of_ring(nodes: int) -> list[list[int]]:
    """Return the senders of each round: in a round no node takes part in two transfers."""
    last = nodes - 1
    odd = [[last]] if nodes % 2 else []  # the link that closes an odd ring
    even = [rank for rank in range(0, nodes, 2) if not (odd and rank == last)]
    return [even, list(range(1, nodes, 2)), *odd]


def usual_speed(links: list[Link]) -> float:
    """Return the speed that the best quarter of the links reaches, in Gbit/s.

    A median would not do: in a ring of three nodes, a slow node has two of the three links.
    """
    speeds = sorted((link.gbit_per_s for link in links), reverse=True)
    return speeds[len(speeds) // 4] if speeds else 0.0


def slow_links(links: list[Link]) -> list[Link]:
    """Return the links with less than half of the usual speed, the slowest first."""
    limit = SLOW_SHARE * usual_speed(links)
    return sorted(
        (link for link in links if link.gbit_per_s < limit), key=lambda link: link.gbit_per_s
    )


def link_findings(links: list[Link], nodes: list[NodeReport], on_gpus: bool) -> list[Finding]:
    """Return a finding for each slow link, or one for a node whose links are both slow."""
    usual, slow = usual_speed(links), slow_links(links)
    findings, explained = [], set[Link]()
    for rank, both in _slow_at_both_ends(slow, len(nodes)).items():
        explained.update(both)
        speeds = " and ".join(f"{link}: {speed(link.gbit_per_s)}" for link in both)
        findings.append(
            Finding(
                "error",
                "links",
                f"both links of node {_end(nodes[rank])} are slow: {speeds} (the others reach {speed(usual)})",
                f"{_look(nodes[rank])}, its cable and its port of the switch",
            )
        )
    for link in slow:
        if link not in explained:
            what = f"the link {link} is slow: {speed(link.gbit_per_s)} (the others reach {speed(usual)})"
            ends = f"from node {_end(nodes[link.sender])} to node {_end(nodes[link.receiver])}"
            findings.append(
                Finding(
                    "error",
                    "links",
                    f"{what}, {ends}",
                    f"{_look(nodes[link.sender])} and on node {link.receiver}, and the switches between them",
                )
            )
    if on_gpus and links and usual < LOW_GBIT_PER_S:
        findings.append(
            Finding(
                "warning",
                "links",
                f"the links reach {speed(usual)} (expected {LOW_GBIT_PER_S:g} Gbit/s or more): NCCL may use a slow "
                "network",
                "look at NCCL_SOCKET_IFNAME and NCCL_IB_HCA; NCCL_DEBUG=INFO prints the network that NCCL takes",
            )
        )
    return findings


def _slow_at_both_ends(slow: list[Link], nodes: int) -> dict[int, list[Link]]:
    """Return the nodes that send and receive slowly, with these links; of two nodes none, because they share both."""
    at: dict[tuple[int, str], list[Link]] = defaultdict(list)
    for link in slow:
        at[link.sender, link.device].append(link)
        at[link.receiver, link.device].append(link)
    both: dict[int, list[Link]] = defaultdict(list)
    for (rank, _), links in at.items():
        if len(links) == 2 and nodes > 2:
            both[rank] += sorted(links, key=lambda one: one.sender)
    return both


def speed(gbit_per_s: float) -> str:
    """Return a speed for a reader."""
    return f"{gbit_per_s * 1000:.3g} Mbit/s" if gbit_per_s < 1 else f"{gbit_per_s:.3g} Gbit/s"


def _end(node: NodeReport) -> str:
    return f"{node.rank} ({', '.join(filter(None, (node.host, node.nic)))})"


def _look(node: NodeReport) -> str:
    return f"look at {node.nic or 'the NIC'} of node {node.rank} (`ethtool {node.nic or 'NIC'}`, `ibstat`)"
