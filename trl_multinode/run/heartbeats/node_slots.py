"""Shared memory of a node's ranks, in which each rank writes its state and reads that of the others."""

import json
import mmap
import os
import struct
import weakref
import zlib
from typing import Any

from torch.distributed import Store

from ..topology import Topology

NAME = "trl_multinode_beats"
SLOT_BYTES = 2048
# last sign of life; bytes of the text, its checksum
TIME, HEADER = (
    struct.Struct("<d"),
    struct.Struct("<8xII"),
)


class NodeSlots:
    """A slot per rank of the node, in anonymous memory of the local main process; no file, no socket, no lock.

    The other ranks open it through /proc, with the pid and the descriptor that they find in the run's store. So
    nothing is left behind, however the ranks end.

    Args:
        topology (`Topology`):
            Topology of the calling rank.
    """

    def __init__(self, topology: Topology):
        self._topology = topology
        self._memory: mmap.mmap | None = None
        self._last: dict[int, tuple[int, Any]] = {}  # rank -> checksum, value

    @property
    def is_open(self) -> bool:
        return self._memory is not None

    def open(self, store: Store) -> bool:
        """Make or find the memory; return whether it is open. A call never waits.

        Raises:
            `OSError`: if the kernel does not let this rank open it, or if the store names something else.
        """
        key, size = f"slots/{self._topology.node}", SLOT_BYTES * self._topology.ranks_per_node
        if self._memory is not None:
            return True
        if self._topology.is_local_main:
            handle = os.memfd_create(NAME, os.MFD_CLOEXEC)
            os.ftruncate(handle, size)  # stays open, because the others open it by its number
            store.set(key, f"{os.getpid()} {handle}")
        elif not store.check([key]):
            return False
        else:
            handle = open_shared(store.get(key).decode(), size)
        self._memory = mmap.mmap(handle, size)
        if self._topology.is_local_main:
            weakref.finalize(self, os.close, handle)
        else:
            os.close(handle)
        return True

    def write(self, value: dict[str, Any]) -> None:
        """Write the calling rank's slot. The text in `frames` is cut if it does not fit."""
        text = json.dumps(value).encode()
        if len(text) > SLOT_BYTES - HEADER.size:
            text = json.dumps(
                value | {"frames": value["frames"][:200], "left": value["left"][:200]}
            ).encode()
        start = SLOT_BYTES * self._topology.local_rank
        assert self._memory is not None
        lengths = slice(start + TIME.size, start + HEADER.size)
        # a reader skips it until it is whole
        self._memory[lengths] = HEADER.pack(0, 0)[TIME.size :]
        self._memory[start + HEADER.size : start + HEADER.size + len(text)] = text
        self._memory[lengths] = HEADER.pack(len(text), zlib.crc32(text))[TIME.size :]

    def touch(self, now: float) -> None:
        """Write the time of the calling rank's last sign of life, which is all that changes in most calls."""
        assert self._memory is not None
        TIME.pack_into(self._memory, SLOT_BYTES * self._topology.local_rank, now)

    def times(self) -> dict[int, float]:
        """Return rank -> time of its last sign of life; without the ranks that have not written yet."""
        assert self._memory is not None
        found = (
            TIME.unpack_from(self._memory, SLOT_BYTES * i)[0]
            for i in range(self._topology.ranks_per_node)
        )
        return {rank: at for rank, at in zip(self._topology.local_ranks, found, strict=True) if at}

    def read(self) -> dict[int, Any]:
        """Return rank -> value that it wrote last; without the ranks that have not written yet."""
        assert self._memory is not None
        for local, rank in enumerate(self._topology.local_ranks):
            start = SLOT_BYTES * local
            length, check = HEADER.unpack_from(self._memory, start)
            if not length or (rank in self._last and self._last[rank][0] == check):
                continue
            text = self._memory[start + HEADER.size : start + HEADER.size + min(length, SLOT_BYTES)]
            # otherwise its rank is just writing: the last value holds
            if zlib.crc32(text) == check:
                self._last[rank] = check, json.loads(text)
        return {rank: value for rank, (_, value) in self._last.items()}


def open_shared(place: str, size: int) -> int:
    """
    Open the memory of another process. Whoever reaches the store can write there, so nothing else is opened.

    Args:
        place (`str`):
            Pid and descriptor, from the store.
        size (`int`):
            Bytes that it must have.

    Returns:
        `int`: a descriptor.

    Raises:
        `OSError`: if it is no such memory, or the kernel does not let this process open it.
    """
    pid, _, number = place.partition(" ")
    if not (pid.isdecimal() and number.isdecimal() and pid.isascii() and number.isascii()):
        raise OSError(f"the store names no descriptor: {place[:80]!r}")
    path = f"/proc/{pid}/fd/{number}"
    if (target := os.readlink(path)) != f"/memfd:{NAME} (deleted)":
        raise OSError(f"{path} is not the memory of a local main process, but {target[:80]!r}")
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    # a page that is missing would end this process by SIGBUS
    if (found := os.fstat(handle).st_size) != size:
        os.close(handle)
        raise OSError(f"{path} has {found} bytes, expected {size}")
    return handle
