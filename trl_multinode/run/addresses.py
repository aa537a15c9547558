"""Nodes in the place of addresses: gloo and NCCL name a lost peer by an address, which tells a reader nothing."""

import json
import re
import socket
from contextlib import suppress

import psutil

from .store import RunStore

# as gloo and NCCL write it, before the port
ADDRESS = re.compile(r"\[?\b((?:\d{1,3}\.){3}\d{1,3})\]?(?=[:<]\d)")


def register(store: RunStore) -> None:
    """Write this node's addresses for the other nodes. Local main processes call it."""
    topology = store.topology
    if topology.is_local_main and topology.num_nodes > 1:
        store.lend(
            lambda client: client.set(f"address/{topology.node}", json.dumps(own_addresses()))
        )


def with_nodes(text: str, store: RunStore) -> str:
    """Return a text with the node of each address in it, if only one node has this address."""
    num_nodes = store.topology.num_nodes
    if num_nodes == 1 or not ADDRESS.search(text):
        return text
    nodes: dict[str, set[int]] = {}
    for node in range(num_nodes):
        for address in _addresses_of(node, store):
            nodes.setdefault(address, set()).add(node)

    def named(found: re.Match[str]) -> str:
        where = nodes.get(found[1], set())
        return f"node {min(where)} {found[0]}" if len(where) == 1 else found[0]

    return ADDRESS.sub(named, text)


def _addresses_of(node: int, store: RunStore) -> list[str]:
    key = f"address/{node}"
    found = store.lend(lambda client: client.get(key) if client.check([key]) else None)
    return json.loads(found or "[]")


def own_addresses() -> list[str]:
    """Return the IPv4 addresses of this computer's interfaces, without the loopback."""
    every = [one for of_interface in psutil.net_if_addrs().values() for one in of_interface]
    found = {one.address for one in every if one.family == socket.AF_INET}
    return sorted(address for address in found if not address.startswith("127."))


def route_to(address: str) -> str | None:
    """Return this computer's address on the interface that leads to another one, `None` without a way.

    Nothing is sent. The way to a loopback address is the loopback interface.
    """
    with suppress(OSError):
        for family, kind, _, _, target in socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe, suppress(OSError):
                probe.connect(target)
                return probe.getsockname()[0]
    return None
