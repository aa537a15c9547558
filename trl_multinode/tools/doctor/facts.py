"""Results of an examination. The process that measures the links imports this module, so it loads nothing heavy."""

from collections.abc import Iterator

import msgspec


class Fact(msgspec.Struct, frozen=True):
    """One property of a node, a row of the table."""

    name: str
    value: str
    same: bool = False  # it should be equal on all nodes
    nodes: str = "warning"  # severity of a difference between nodes


class Finding(msgspec.Struct, frozen=True):
    """Reason why a run would fail or be far too slow ("error"), or may disappoint ("warning"), and the cure."""

    severity: str
    about: str  # name of the fact
    what: str
    cure: str


Results = Iterator[Fact | Finding]


class NodeReport(msgspec.Struct):
    """Results of all examinations of one node."""

    rank: int
    host: str
    facts: list[Fact] = []
    findings: list[Finding] = []
    versions: dict[str, str] = {}
    nic: str = ""  # network interface towards the other nodes
    address: str = ""  # address of that interface
    gpus: int = 0  # that a launch sees

    @property
    def name(self) -> str:
        return f"{self.rank} ({self.host})"


def size(num_bytes: float) -> str:
    """Return a number of bytes for a reader."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"
