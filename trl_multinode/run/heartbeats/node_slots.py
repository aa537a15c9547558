"""Shared memory of a node's ranks, in which each rank writes its state and reads that of the others."""

import json
import zlib
from functools import cached_property
from typing import Any

import numpy as np

from ..node_memory import NodeMemory
from ..topology import Topology

NAME = "trl_multinode_beats"
SLOT_BYTES = 2048
TEXT_BYTES = SLOT_BYTES - 16
# time of the last sign of life; JSON, which has no zero byte, and its checksum
SLOT = np.dtype([("time", "f8"), ("check", "u8"), ("text", f"S{TEXT_BYTES}")])


class NodeSlots(NodeMemory):
    """A slot per rank of the node.

    Args:
        topology (`Topology`):
            Topology of the calling rank.
    """

    def __init__(self, topology: Topology):
        super().__init__(topology, NAME, SLOT_BYTES * topology.local_world_size)
        self._last: dict[int, tuple[int, Any]] = {}  # rank -> checksum, value

    @cached_property
    def _slots(self) -> np.ndarray:
        return np.frombuffer(self.memory, SLOT)

    def write(self, value: dict[str, Any]) -> None:
        """Write the calling rank's slot. The text in `frames` is cut if it does not fit."""
        text = json.dumps(value).encode()
        if len(text) > TEXT_BYTES:
            text = json.dumps(
                value | {"frames": value["frames"][:200], "left": value["left"][:200]}
            ).encode()
        slot = self._slots[self._topology.local_rank]
        slot["text"] = text
        # last: until then the text does not fit the checksum, and readers keep the value before
        slot["check"] = zlib.crc32(text)

    def touch(self, now: float) -> None:
        """Write the time of the calling rank's last sign of life, which is all that changes in most calls."""
        self._slots["time"][self._topology.local_rank] = now

    def read(self) -> dict[int, dict[str, Any]]:
        """Return rank -> value that it wrote last, and in `at` the time of its last sign of life.

        Ranks that have not written both yet are left out.
        """
        found = {}
        for rank, slot in zip(self._topology.local_ranks, self._slots, strict=True):
            at, check = float(slot["time"]), int(slot["check"])
            if check and (rank not in self._last or self._last[rank][0] != check):
                text = slot["text"]
                # otherwise its rank is just writing: the last value holds
                if zlib.crc32(text) == check:
                    self._last[rank] = check, json.loads(text)
            if at and rank in self._last:
                found[rank] = self._last[rank][1] | {"at": at}
        return found
