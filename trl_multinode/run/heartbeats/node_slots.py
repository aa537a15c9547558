"""Shared memory of a node's ranks, in which each rank writes its state and reads that of the others."""

import json
import struct
import zlib
from typing import Any

from ..node_memory import NodeMemory
from ..topology import Topology

NAME = "trl_multinode_beats"
SLOT_BYTES = 2048
# last sign of life; bytes of the text, its checksum
TIME, HEADER = (
    struct.Struct("<d"),
    struct.Struct("<8xII"),
)


class NodeSlots(NodeMemory):
    """A slot per rank of the node.

    Args:
        topology (`Topology`):
            Topology of the calling rank.
    """

    def __init__(self, topology: Topology):
        super().__init__(topology, NAME, SLOT_BYTES * topology.local_world_size)
        self._last: dict[int, tuple[int, Any]] = {}  # rank -> checksum, value

    def write(self, value: dict[str, Any]) -> None:
        """Write the calling rank's slot. The text in `frames` is cut if it does not fit."""
        text = json.dumps(value).encode()
        if len(text) > SLOT_BYTES - HEADER.size:
            text = json.dumps(
                value | {"frames": value["frames"][:200], "left": value["left"][:200]}
            ).encode()
        start = SLOT_BYTES * self._topology.local_rank
        lengths = slice(start + TIME.size, start + HEADER.size)
        # a reader skips it until it is whole
        self.memory[lengths] = HEADER.pack(0, 0)[TIME.size :]
        self.memory[start + HEADER.size : start + HEADER.size + len(text)] = text
        self.memory[lengths] = HEADER.pack(len(text), zlib.crc32(text))[TIME.size :]

    def touch(self, now: float) -> None:
        """Write the time of the calling rank's last sign of life, which is all that changes in most calls."""
        TIME.pack_into(self.memory, SLOT_BYTES * self._topology.local_rank, now)

    def times(self) -> dict[int, float]:
        """Return rank -> time of its last sign of life; without the ranks that have not written yet."""
        found = (
            TIME.unpack_from(self.memory, SLOT_BYTES * i)[0]
            for i in range(self._topology.local_world_size)
        )
        return {rank: at for rank, at in zip(self._topology.local_ranks, found, strict=True) if at}

    def read(self) -> dict[int, Any]:
        """Return rank -> value that it wrote last; without the ranks that have not written yet."""
        for local, rank in enumerate(self._topology.local_ranks):
            start = SLOT_BYTES * local
            length, check = HEADER.unpack_from(self.memory, start)
            if not length or (rank in self._last and self._last[rank][0] == check):
                continue
            text = self.memory[start + HEADER.size : start + HEADER.size + min(length, SLOT_BYTES)]
            # otherwise its rank is just writing: the last value holds
            if zlib.crc32(text) == check:
                self._last[rank] = check, json.loads(text)
        return {rank: value for rank, (_, value) in self._last.items()}
