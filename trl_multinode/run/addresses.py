"""Nodes in the place of addresses: gloo and NCCL name a lost peer by an address, which tells a reader nothing."""

import fcntl
import json
import re
import socket
import struct
from contextlib import suppress

from .store import RunStore
from .topology import Topology

# as gloo and NCCL write it, before the port
ADDRESS = re.compile(r"\[?\b((?:\d{1,3}\.){3}\d{1,3})\]?(?=[:<]\d)")
SIOCGIFADDR = 0x8915  # Linux: address of an interface


def register(store: RunStore, topology: Topology) -> None:
    """Write this node's addresses for the other nodes. Local main processes call it."""
    if not store.alone and topology.is_local_main and topology.num_nodes > 1:
        store.lend(
            lambda client: client.set(f"address/{topology.node}", json.dumps(own_addresses()))
        )


def with_nodes(text: str, store: RunStore, topology: Topology) -> str:
    """Return a text with the node of each address in it, if only one node has this address."""
    if store.alone or topology.num_nodes == 1 or not ADDRESS.search(text):
        return text
    nodes: dict[str, set[int]] = {}
    for node in range(topology.num_nodes):
        for address in _addresses_of(node, store):
            nodes.setdefault(address, set()).add(node)

    def named(found: re.Match[str]) -> str:
        where = nodes.get(found[1], set())
        return f"node {min(where)} {found[0]}" if len(where) == 1 else found[0]

    return ADDRESS.sub(named, text)


def _addresses_of(node: int, store: RunStore) -> list[str]:
    found: list[str] = []
    key = f"address/{node}"
    store.lend(
        lambda client: found.extend(json.loads(client.get(key))) if client.check([key]) else None
    )
    return found


def own_addresses() -> list[str]:
    """Return the IPv4 addresses of this computer's interfaces, without the loopback."""
    found = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
                found.add(socket.inet_ntoa(answer[20:24]))
    return sorted(address for address in found if not address.startswith("127."))
