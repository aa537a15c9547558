"""Attendance of a roll-call: the messages of the nodes, and the conclusion from them. It opens no connection."""

import os
import re
import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from ...run.endings.exit_codes import CONFIGURATION
from ...run.versions import MISSING, differences

NAMED_NODES = 16  # a line of progress names no more nodes
LONGEST_LINE = 64 * 1024  # bytes of a message; a `Hello` has about 400


class Banner(msgspec.Struct, frozen=True, tag=True):
    """First message of the node that holds a roll-call, by which the others tell it from another program."""

    rollcall: str = "trl_multinode"


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Message with which a node joins."""

    rank: int  # `machine_rank`
    host: str
    host_id: str  # equal for the processes of one host, or of one network namespace of it
    pid: int
    nodes: int  # `num_machines`
    processes: int  # that the launcher will start on this node
    gpus: int
    versions: dict[str, str]
    problems: list[str] = []  # that the check of this node's launch has found

    @property
    def name(self) -> str:
        return f"{self.rank} ({printable(self.host)})"


class State(msgspec.Struct, frozen=True, tag=True):
    """Line of progress, for all nodes that have joined."""

    text: str


class Verdict(msgspec.Struct, frozen=True, tag=True):
    """End of a roll-call: exit code 0 if the nodes may launch, and the lines that give the reason."""

    code: int
    lines: list[str]


Message = Banner | Hello | State | Verdict


def encode(message: Message) -> bytes:
    """Return a message as a line of JSON."""
    return msgspec.json.encode(message) + b"\n"


def decode(line: bytes) -> Message | None:
    """Return the message of a line; `None` if it has none, because another program has sent it."""
    try:
        return msgspec.json.decode(line, type=Message)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def printable(text: str) -> str:
    """Return text of another host without characters that could control a terminal."""
    return re.sub(r"[^\x20-\x7e]", "?", text)[:4000]


def host_id() -> str:
    """Return an id of this host. Containers of a host share its boot, but each has a network namespace of its own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


class Attendance:
    """
    Nodes that have joined a roll-call.

    Args:
        nodes (`int`):
            Number of nodes that are expected.
        address (`str`):
            `main_process_ip`, the address of node 0.
        host_id (`str`):
            [`host_id`] of the host that has this address.
    """

    def __init__(self, nodes: int, address: str, host_id: str):
        self.nodes, self.address, self.host_id = nodes, address, host_id
        self._here: list[Hello] = []

    @property
    def here(self) -> list[Hello]:
        """Return the nodes in the order of their ranks."""
        return sorted(self._here, key=lambda hello: (hello.rank, hello.host))

    def join(self, hello: Hello) -> None:
        self._here.append(hello)

    def leave(self, hello: Hello) -> None:
        self._here.remove(hello)

    @property
    def missing(self) -> list[int]:
        """Return the ranks that no node has."""
        return sorted(set(range(self.nodes)) - {hello.rank for hello in self.here})

    def state(self, seconds: float) -> str:
        """Return the line of progress after so many seconds."""
        found = self.here
        names = ", ".join(f"{hello.name} {_count(hello.gpus, 'GPU')}" for hello in found[:NAMED_NODES])
        more = f" and {len(found) - NAMED_NODES} more" if len(found) > NAMED_NODES else ""
        text = f"{len(found)} of {_count(self.nodes, 'node')} here after {seconds:.0f} s: {names or 'none'}{more}"
        return f"{text}; nobody has machine_rank {_listed(self.missing)}" if self.missing else text

    def errors(self) -> list[str]:
        """Return the reasons why these nodes cannot launch together, also before all have joined."""
        return [*self._wrong_ranks(), *self._unequal(), *self._problems(), *self._versions(errors=True)]

    def warnings(self) -> list[str]:
        """Return the differences between nodes with which a launch may still succeed."""
        gpus = _by_value((hello.gpus, hello.name) for hello in self.here)
        lines = [f"GPUs differ: {_values(gpus)}"] if len(gpus) > 1 else []
        return [*lines, *self._versions(errors=False)]

    def versions(self) -> str:
        """Return the versions of the libraries that do not differ."""
        first, others = self.here[0].versions, [hello.versions for hello in self.here[1:]]
        equal = [(name, text) for name, text in first.items() if all(one.get(name) == text for one in others)]
        return printable(", ".join(f"{name} {text}" for name, text in equal if text != MISSING))

    def _wrong_ranks(self) -> Iterator[str]:
        by_rank = defaultdict(list)
        for hello in self.here:
            by_rank[hello.rank].append(hello)
        for rank, hellos in sorted(by_rank.items()):
            where = " and ".join(f"{printable(hello.host)} (pid {hello.pid})" for hello in hellos)
            if len(hellos) > 1:
                nobody = f"; nobody has {_listed(self.missing)}" if self.missing else ""
                yield f"machine_rank {rank} is doubled: it is that of {where}{nobody}. Give each node its own"
            if not 0 <= rank < self.nodes:
                yield f"machine_rank {rank} of {where} is out of range, expected 0 to {self.nodes - 1}"
        yield from self._swapped(by_rank[0])

    def _swapped(self, first: list[Hello]) -> Iterator[str]:
        owner = next((hello for hello in self.here if hello.host_id == self.host_id), None)
        if len(first) == 1 and owner is not None and first[0].host_id != self.host_id:
            what = f"machine_rank 0 is that of {printable(first[0].host)}, but main_process_ip {self.address} is"
            what += f" {printable(owner.host)}, which has machine_rank {owner.rank}"
            yield f"{what}. Swap the two ranks, or pass the address of {printable(first[0].host)}"

    def _unequal(self) -> Iterator[str]:
        for what, name in (("num_machines", "nodes"), ("processes per node", "processes")):
            found = _by_value((getattr(hello, name), hello.name) for hello in self.here)
            if len(found) > 1:
                yield f"{what} differ: {_values(found)}. Use one config file and the same flags on all nodes"

    def _problems(self) -> Iterator[str]:
        for hello in self.here:
            if hello.problems:
                more = f" (and {len(hello.problems) - 1} more)" if len(hello.problems) > 1 else ""
                yield f"node {hello.name} cannot launch: {printable(hello.problems[0])}{more}"

    def _versions(self, errors: bool) -> Iterator[str]:
        cure = ". Install the same version on all nodes" if errors else ""
        found = differences([hello.versions for hello in self.here], [hello.name for hello in self.here])
        yield from (f"{printable(str(one))}{cure}" for one in found if one.is_error == errors)


def conclusion(attendance: Attendance, seconds: float) -> Verdict | None:
    """Return the verdict on the nodes that are here: an error at once, success when all are here, else `None`."""
    if errors := attendance.errors():
        return Verdict(CONFIGURATION, [f"error: {text}" for text in errors])
    if attendance.missing:
        return None
    lines = [attendance.state(seconds)]
    lines += [f"versions on all nodes: {found}"] if (found := attendance.versions()) else []
    return Verdict(0, [*lines, *(f"warning: {text}" for text in attendance.warnings())])


def _by_value(pairs: Iterable[tuple[int, str]]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = defaultdict(list)
    for value, name in pairs:
        found[value].append(name)
    return found


def _values(found: dict[int, list[str]]) -> str:
    return ", ".join(f"{value} on node {', '.join(names[:NAMED_NODES])}" for value, names in found.items())


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")


def _listed(ranks: list[int]) -> str:
    more = f" and {len(ranks) - NAMED_NODES} more" if len(ranks) > NAMED_NODES else ""
    return ", ".join(map(str, ranks[:NAMED_NODES])) + more
