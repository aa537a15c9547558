"""Attendance of a roll-call: the messages of the nodes, and the conclusion from them. It opens no connection."""

import os
import re
from collections import defaultdict
from collections.abc import Iterator

import msgspec

from ...run.endings.exit_codes import CONFIGURATION
from ...run.values import listed
from ...run.versions import MISSING
from ...wire.locks import machine
from ..differences import differences
from ..text import count, joined

NAMED_NODES = 16  # a line of progress names no more nodes
LONGEST_LINE = 64 * 1024  # bytes of a message; a `Hello` has about 400
SAME_VERSION = "Install the same version on all nodes"
SAME_FLAGS = "Use one config file and the same flags on all nodes"
# Numbers that must be equal, beside the versions
NODES, PROCESSES = "num_machines differ", "processes per node differ"


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Message with which a node joins."""

    rank: int  # `machine_rank`
    host: str
    host_id: str  # equal for the processes of one host, or of one network namespace of it
    pid: int
    nodes: int  # `num_machines`
    # number that the launcher will start on this node, or `--ranks`, those of all nodes
    processes: list[int]
    gpus: int
    versions: dict[str, str]
    problems: list[str] = []  # that the check of this node's launch has found

    @property
    def name(self) -> str:
        return f"{self.rank} ({printable(self.host)})"

    @property
    def facts(self) -> dict[str, str]:
        """Return what should be equal on all nodes."""
        counts = {NODES: str(self.nodes), PROCESSES: joined(self.processes)}
        return {**counts, "GPUs differ": str(self.gpus), **self.versions}


class State(msgspec.Struct, frozen=True, tag=True):
    """Line of progress. The first one is empty; by it the nodes tell a roll-call from another program."""

    text: str = ""


class Verdict(msgspec.Struct, frozen=True, tag=True):
    """End of a roll-call: exit code 0 if the nodes may launch, and the lines that give the reason."""

    code: int
    lines: list[str]


Message = Hello | State | Verdict


def encode(message: Message) -> bytes:
    """Return a message as a line of JSON."""
    return msgspec.json.encode(message) + b"\n"


def printable(text: str) -> str:
    """Return text of another host without characters that could control a terminal."""
    return re.sub(r"[^\x20-\x7e]", "?", text)[:4000]


def host_id() -> str:
    """Return an id of this host. Containers of a host share its boot, but each has a network namespace of its own."""
    return f"{machine()} {os.stat('/proc/self/ns/net').st_ino}"


class Attendance:
    """
    Nodes that have joined a roll-call.

    Args:
        host ([`Hello`]):
            Node that holds it.
        address (`str`):
            `main_process_ip`, the address of node 0.
    """

    def __init__(self, host: Hello, address: str):
        self.host, self.address = host, address
        self.joined: list[Hello] = []

    @property
    def here(self) -> list[Hello]:
        """Return the nodes in the order of their ranks."""
        return sorted(self.joined, key=lambda hello: (hello.rank, hello.host))

    @property
    def missing(self) -> list[int]:
        """Return the ranks that no node has."""
        return sorted(set(range(self.host.nodes)) - {hello.rank for hello in self.joined})

    def state(self, seconds: float) -> str:
        """Return the line of progress after so many seconds."""
        names = listed(
            [f"{hello.name} {count(hello.gpus, 'GPU')}" for hello in self.here], NAMED_NODES
        )
        here = f"{len(self.joined)} of {count(self.host.nodes, 'node')} here after {seconds:.0f} s"
        nobody = (
            f"; nobody has machine_rank {listed(self.missing, NAMED_NODES)}" if self.missing else ""
        )
        return f"{here}: {names or 'none'}{nobody}"

    def verdict(self, seconds: float) -> Verdict | None:
        """Return an error at once, also before all nodes have joined, success when all are here, else `None`."""
        if errors := [*self._wrong_ranks(), *self._problems(), *self._differences(errors=True)]:
            return Verdict(CONFIGURATION, [f"error: {text}" for text in errors])
        if self.missing:
            return None
        lines = [self.state(seconds)]
        if equal := self._equal_versions():
            lines.append(f"versions on all nodes: {equal}")
        return Verdict(
            0, [*lines, *(f"warning: {text}" for text in self._differences(errors=False))]
        )

    def _wrong_ranks(self) -> Iterator[str]:
        by_rank = defaultdict(list)
        for hello in self.here:
            by_rank[hello.rank].append(hello)
        last = self.host.nodes - 1
        for rank, hellos in by_rank.items():
            where = " and ".join(f"{printable(hello.host)} (pid {hello.pid})" for hello in hellos)
            if len(hellos) > 1:
                nobody = f"; nobody has {listed(self.missing, NAMED_NODES)}" if self.missing else ""
                yield f"machine_rank {rank} is doubled: it is that of {where}{nobody}. Give each node its own"
            if not 0 <= rank <= last:
                yield f"machine_rank {rank} of {where} is out of range, expected 0 to {last}"
        owner = next((hello for hello in self.here if hello.host_id == self.host.host_id), None)
        if len(by_rank[0]) == 1 and owner is not None and by_rank[0][0].host_id != owner.host_id:
            first, other = printable(by_rank[0][0].host), printable(owner.host)
            yield (
                f"machine_rank 0 is that of {first}, but main_process_ip {self.address} is {other}, which has"
                f" machine_rank {owner.rank}. Swap the two ranks, or pass the address of {first}"
            )

    def _problems(self) -> Iterator[str]:
        for hello in self.here:
            if hello.problems:
                more = f" (and {len(hello.problems) - 1} more)" if len(hello.problems) > 1 else ""
                yield f"node {hello.name} cannot launch: {printable(hello.problems[0])}{more}"

    def _differences(self, errors: bool) -> Iterator[str]:
        for one in differences(
            [hello.facts for hello in self.here], [hello.name for hello in self.here]
        ):
            cures = {NODES: SAME_FLAGS, PROCESSES: SAME_FLAGS + self._meant_to_differ()}
            cure = cures.get(one.library, SAME_VERSION if one.is_error else "")
            if errors == bool(cure):
                yield f"{printable(str(one))}. {cure}" if cure else printable(str(one))

    def _meant_to_differ(self) -> str:
        """Return the flag with which the numbers of processes may differ, unless a node has it."""
        if any(len(hello.processes) != 1 for hello in self.here):
            return ""
        found = {hello.rank: hello.processes[0] for hello in self.here}
        ranks = joined(found.get(rank, "?") for rank in range(self.host.nodes))
        return f", or pass --ranks {ranks} on each if they are meant to differ"

    def _equal_versions(self) -> str:
        versions = [hello.versions.items() for hello in self.here]
        equal = set(versions[0]).intersection(*versions)
        names = [
            f"{name} {text}"
            for name, text in versions[0]
            if (name, text) in equal and text != MISSING
        ]
        return printable(", ".join(names))
