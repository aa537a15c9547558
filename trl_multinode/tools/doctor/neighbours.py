"""Connection from each node to the next one: a firewall may let all nodes reach node 0 and not each other."""

import socket
from collections.abc import Callable
from contextlib import suppress

from .facts import Finding, NodeReport

CONNECT_S = 5.0


class Listener:
    """Port of this node that its neighbour tries.

    Args:
        address (`str`):
            Address of this node in the network of the nodes; an empty string for all addresses.
    """

    def __init__(self, address: str):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family)
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


def cannot_reach(address: str, port: int) -> str:
    """Connect to a port, and return the reason why that failed; an empty string if it worked."""
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S):
            return ""
    except TimeoutError:
        return f"no answer within {CONNECT_S:.0f} s"
    except OSError as error:
        return error.strerror or str(error)


def reach_findings(nodes: list[NodeReport], reasons: dict[int, str], port_of: Callable[[int], int]) -> list[Finding]:
    """Return an error for each node that cannot reach the next one.

    Args:
        nodes (`list[NodeReport]`):
            All nodes.
        reasons (`dict[int, str]`):
            Result of [`cannot_reach`] by the rank of the node that tried.
        port_of (`Callable`):
            Function that returns the port on which a node listened.
    """
    found = []
    for rank, reason in sorted(reasons.items()):
        after = nodes[(rank + 1) % len(nodes)]
        if reason:
            what = f"node {nodes[rank].name} cannot reach node {after.name} at {after.address}:{port_of(after.rank)}"
            cure = "open all ports between the nodes, because NCCL and gloo choose free ones; if the address is wrong,"
            cure += " set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
            found.append(Finding("error", "neighbours", f"{what} ({reason})", cure))
    return found


def open_listener(address: str) -> Listener | None:
    """Return a listener, or `None` if this node cannot listen at its address."""
    with suppress(OSError):
        return Listener(address)
    return None
