"""Network of this node: the address of node 0, the interface towards it, and the variables of NCCL and gloo."""

import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from ...run.addresses import route_to
from .case import Case
from .facts import Fact, Finding, Results

PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "FI_", "UCX_")
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")  # NCCL takes its own only
SLOW_MBIT = 1000  # a NIC of an office
SLOW_NAMES_S = 2.0  # a name server takes milliseconds; glibc asks again after 5 s, or 1 s
LOOKUPS = 3  # a server that loses some questions answers others
INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Nic:
    """Network interface of this node, with one of its addresses."""

    name: str
    address: str
    mbit_per_s: int = 0  # 0: unknown
    mtu: int = 0

    @property
    def network(self) -> str:
        """Return the speed, if it is known, and the MTU. Nodes with another MTU than the others lose long packets."""
        return (
            f"{self.mbit_per_s / 1000:g} Gbit/s, MTU {self.mtu}"
            if self.mbit_per_s
            else f"MTU {self.mtu}"
        )


def nics() -> list[Nic]:
    """Return the interfaces of this node that are up, one entry per address, IPv4 first."""
    found, states = [], psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        state = states.get(name)
        if state is None or not state.isup:
            continue
        speed = state.speed if 0 < state.speed < 10_000_000 else 0  # virtual ones report nonsense
        for one in addresses:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                found.append(Nic(name, one.address.split("%")[0], speed, state.mtu))
    return sorted(found, key=lambda nic: ":" in nic.address)


def chosen_interfaces(value: str, names: Sequence[str]) -> list[str]:
    """Return the interfaces that a value of NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME chooses.

    NCCL takes prefixes, exact names after `=`, and the exclusion of both after `^`.
    """
    excluded, exact = value.startswith("^"), value.startswith(("=", "^="))
    words = [word.strip() for word in value.lstrip("^=").split(",") if word.strip()]
    hit = [
        name
        for name in names
        if any(name == word if exact else name.startswith(word) for word in words)
    ]
    return [name for name in names if name not in hit and name != "lo"] if excluded else hit


def nic_towards(case: Case) -> Nic | None:
    """Return the interface for traffic between nodes: the one that a variable chooses, or the one of the route."""
    found = nics()
    for variable in INTERFACES if case.on_gpus else INTERFACES[1:]:
        value = case.environ.get(variable, "")
        if value and (names := chosen_interfaces(value, [nic.name for nic in found])):
            return next(nic for nic in found if nic.name == names[0])
    own = route_to(case.address) if case.address else None
    return next((nic for nic in found if nic.address == own), None)


def examine_address(case: Case) -> Results:
    """Yield the address of node 0 and this node's interface towards it, and errors if there is no way."""
    name = "address of node 0"
    if not case.many_nodes or not case.address:
        yield Fact(name, case.address or "none")
        return
    found = _resolved(case.address)
    if found is None:
        yield Fact(name, f"{case.address}: unknown")
        yield Finding(
            "error",
            name,
            f"this node cannot resolve `main_process_ip` {case.address}",
            "pass an address, or a name that all nodes know",
        )
        return
    yield Fact(name, found if found == case.address else f"{case.address} = {found}")
    yield from _misplaced(case, found)
    nic = nic_towards(case)
    if nic is None:
        yield Fact("NIC", "none")
        yield Finding(
            "error",
            "NIC",
            f"no interface of this node leads to `main_process_ip` {case.address}",
            "look at `ip route`; the nodes need a network in common",
        )
        return
    yield Fact("NIC", f"{nic.name} {nic.address}")
    yield Fact("network", nic.network, same=True)
    if 0 < nic.mbit_per_s <= SLOW_MBIT:
        yield Finding(
            "warning",
            "NIC",
            f"{nic.name} has {nic.mbit_per_s / 1000:g} Gbit/s (expected 10 or more): weights are gathered through it",
            "pass the address of node 0 in the fast network as `--main_process_ip`, and set NCCL_SOCKET_IFNAME",
        )


def examine_names(case: Case) -> Results:
    """Yield how long it takes to look up the name of this node's address, and a warning if that is long.

    torch's TCPStore, client and server, asks for the name of each address as `::ffff:10.0.0.1`, which a line with
    10.0.0.1 in `/etc/hosts` does not answer. Its server has one thread, so no rank gets an answer meanwhile.
    """
    own = route_to(case.address) if case.many_nodes and case.address else None
    if own is None:
        return
    seconds = max(_lookup_s(own) for _ in range(LOOKUPS))
    yield Fact(
        "name of this address", f"{seconds:.1f} s" if seconds > SLOW_NAMES_S else "quick or unknown"
    )
    if seconds > SLOW_NAMES_S:
        yield Finding(
            "warning",
            "name of this address",
            f"the name server takes up to {seconds:.0f} s for the name of {own} (expected below {SLOW_NAMES_S:g} s): "
            "torch asks it at every connection to the store, and no rank is served meanwhile",
            "mend the reverse zone of the name server, or export RES_OPTIONS='timeout:1 attempts:1' on all nodes",
        )


def _lookup_s(address: str) -> float:
    start = time.monotonic()
    with suppress(OSError):
        socket.getnameinfo(
            (address if ":" in address else f"::ffff:{address}", 0, 0, 0), socket.NI_NUMERICSERV
        )
    return time.monotonic() - start


def _misplaced(case: Case, address: str) -> Iterator[Finding]:
    """Yield a finding if the address of node 0 belongs to another rank. A service of Kubernetes belongs to none."""
    if address.startswith("127."):  # all nodes are this machine
        return
    own = address in {nic.address for nic in nics()}
    if own and case.rank != 0:
        yield Finding(
            "error",
            "address of node 0",
            f"`main_process_ip` {address} is an address of this node, which has machine_rank {case.rank}, not 0",
            "give this node rank 0, or pass the address of node 0",
        )
    elif not own and case.rank == 0:
        yield Finding(
            "warning",
            "address of node 0",
            f"`main_process_ip` {address} is not an address of this node, which has machine_rank 0",
            "pass an address of this node; one of a service that leads here, as in Kubernetes, is right too",
        )


def _resolved(address: str) -> str | None:
    try:
        return str(socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def examine_variables(case: Case) -> Results:
    """Yield the variables of NCCL and gloo, and errors for interfaces that do not exist."""
    given = {
        name: value for name, value in sorted(case.environ.items()) if name.startswith(PREFIXES)
    }
    text = " ".join(f"{name}={value}" for name, value in given.items())
    yield Fact("NCCL and gloo", text or "no variables", same=True)
    names = sorted({nic.name for nic in nics()})
    for variable in INTERFACES:
        value = given.get(variable)
        if value and not chosen_interfaces(value, names):
            yield Finding(
                "error",
                "NCCL and gloo",
                f"{variable}={value} chooses no interface of this node (expected one of {', '.join(names)})",
                f"set {variable} on this node to one of them, or unset it",
            )
    yield from _loopback(case, given)
    if devices := infiniband():
        yield Fact("InfiniBand", devices, same=True)
        if given.get("NCCL_IB_DISABLE") == "1":
            yield Finding(
                "warning",
                "InfiniBand",
                "NCCL_IB_DISABLE=1 keeps NCCL from this node's InfiniBand, so it uses the slower sockets",
                "unset NCCL_IB_DISABLE",
            )


def _loopback(case: Case, given: dict[str, str]) -> Iterator[Finding]:
    """Yield a finding if gloo would listen where other nodes cannot reach it: it takes the host name's address."""
    route = route_to(case.address) if case.many_nodes and case.address else None
    if route is None or route.startswith("127.") or "GLOO_SOCKET_IFNAME" in given:
        return
    with suppress(OSError):
        own = socket.gethostbyname(socket.gethostname())
        if not own.startswith("127.") and own in {nic.address for nic in nics()}:
            return
    nic = nic_towards(case)
    yield Finding(
        "warning" if case.on_gpus else "error",
        "NCCL and gloo",
        f"the name of this host, {socket.gethostname()}, leads to loopback or nowhere, and gloo listens there"
        f", where no other node can connect",
        f"export GLOO_SOCKET_IFNAME={nic.name if nic else 'eth0'} on this node, or mend /etc/hosts",
    )


def infiniband() -> str:
    """Return the InfiniBand and RoCE devices of this node, counted by state and rate."""
    ports: Counter[str] = Counter()
    for port in sorted(INFINIBAND.glob("*/ports/*")):
        with suppress(OSError):
            state = (port / "state").read_text().partition(":")[2].strip()
            ports[f"{(port / 'rate').read_text().strip()} {state}"] += 1
    return ", ".join(f"{count} x {text}" for text, count in ports.items())
