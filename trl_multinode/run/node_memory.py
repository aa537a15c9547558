"""Memory that the ranks of a node share."""

import mmap
import os
import re
import weakref

from torch.distributed import Store

from .topology import Topology


class NodeMemory:
    """Anonymous memory of the local main process for the ranks of its node; no file, no socket, no lock.

    The other ranks open it through /proc, with the pid and the descriptor that they find in the run's store. So
    nothing is left behind, however the ranks end.

    Args:
        topology (`Topology`):
            Topology of the calling rank.
        name (`str`), size (`int`):
            Name of the memory, which all ranks give alike, and its bytes.
    """

    def __init__(self, topology: Topology, name: str, size: int):
        self._topology = topology
        self._name = name
        self._size = size
        self._memory: mmap.mmap | None = None

    @property
    def is_open(self) -> bool:
        return self._memory is not None

    @property
    def memory(self) -> mmap.mmap:
        """The bytes, once they are open."""
        assert self._memory is not None
        return self._memory

    def open(self, store: Store) -> bool:
        """Make or find the memory; return whether it is open. A call never waits.

        Raises:
            `OSError`: if the kernel does not let this rank open it, or if the store names something else.
        """
        key = f"{self._name}/{self._topology.node}"
        if self._memory is not None:
            return True
        if self._topology.is_local_main:
            handle = os.memfd_create(self._name, os.MFD_CLOEXEC)
            os.ftruncate(handle, self._size)  # stays open, because the others open it by its number
            store.set(key, f"{os.getpid()} {handle}")
        elif not store.check([key]):
            return False
        else:
            handle = open_shared(store.get(key).decode(), self._name, self._size)
        self._memory = mmap.mmap(handle, self._size)
        if self._topology.is_local_main:
            weakref.finalize(self, os.close, handle)
        else:
            os.close(handle)
        return True


def open_shared(place: str, name: str, size: int) -> int:
    """
    Open the memory of another process. Whoever reaches the store can write there, so nothing else is opened.

    Args:
        place (`str`):
            Pid and descriptor, from the store.
        name (`str`), size (`int`):
            Name and bytes that it must have.

    Returns:
        `int`: a descriptor.

    Raises:
        `OSError`: if it is no such memory, or the kernel does not let this process open it.
    """
    if (found := re.fullmatch("([0-9]+) ([0-9]+)", place)) is None:
        raise OSError(f"the store names no descriptor: {place[:80]!r}")
    path = f"/proc/{found[1]}/fd/{found[2]}"
    if (target := os.readlink(path)) != f"/memfd:{name} (deleted)":
        raise OSError(f"{path} is not the memory of a local main process, but {target[:80]!r}")
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    # a page that is missing would end this process by SIGBUS
    if (num_bytes := os.fstat(handle).st_size) != size:
        os.close(handle)
        raise OSError(f"{path} has {num_bytes} bytes, expected {size}")
    return handle
