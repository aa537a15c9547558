"""Transport through host shared memory: works on every machine."""

import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import torch

from ..errors import WeightSyncError
from ..wire.messages import TensorSpec, WeightVersion
from .base import OpenedSlots, Slots, SlotSettings
from .page_lock import PageLock

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
PAGE = 4096  # bytes; a slot begins at a multiple of it


@contextmanager
def explained(sizes: Sequence[int], largest: TensorSpec | None) -> Iterator[None]:
    """Raise the error of a full shared memory with what was needed and the cure.

    Args:
        sizes (`Sequence[int]`):
            Size of each slot, in bytes.
        largest (`TensorSpec`, *optional*):
            Largest tensor of the model.
    """
    usage = shutil.disk_usage(SHARED_MEMORY)
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG):
            raise
        raise WeightSyncError(
            f"{SHARED_MEMORY} has {_mib(usage.free)} free of {_mib(usage.total)}, {len(sizes)} slots of "
            f"{_mib(max(sizes))} for the weight sync need {_mib(sum(sizes))}, and vLLM's own segments come on top. "
            f"{_cure(max(sizes), largest)}"
        ) from error


def _cure(slot_bytes: int, largest: TensorSpec | None) -> str:
    enlarge = "ive the container more shared memory (docker: --shm-size)."
    if largest is None or largest.range is not None or 2 * largest.num_bytes < slot_bytes:
        return f"Lower `sync_bucket_mb`, or g{enlarge}"
    size = f"{largest.name} alone has {_mib(largest.num_bytes)}"
    return f"{size}: lower `sync_bucket_mb` (no help if an adapter is merged into that tensor), or g{enlarge}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.4g} MiB"


class HostMemory(msgspec.Struct, frozen=True):
    """Slots in a file of shared memory without a name, which the workers map through the sender's descriptor."""

    path: str
    ends: tuple[int, ...]  # first byte after each slot


def path_of(process: int, descriptor: int) -> str:
    """Return the path of a file that a process has open."""
    return f"/proc/{process}/fd/{descriptor}"


def open_same(process: int, descriptor: int, device: int, inode: int) -> IO[bytes]:
    """Open a file of another process. In another container its number may be that of a stranger's process.

    Raises:
        `OSError`: if this process may not open it, or finds another file there.
    """
    path = path_of(process, descriptor)
    found = os.stat(path)
    if (found.st_dev, found.st_ino) != (device, inode):
        raise FileNotFoundError(f"{path} is another file")
    return open(path, "r+b", buffering=0)


def slots_in(path: str, ends: Sequence[int]) -> list[torch.Tensor]:
    """Map a file, and return its slots."""
    whole = torch.from_file(path, shared=True, size=ends[-1], dtype=torch.uint8)
    return [whole[first:end] for first, end in pairwise((0, *ends))]


class OpenedHostSlots(OpenedSlots):
    """Slots in host memory, mapped by this worker and page-locked if its device is a GPU."""

    def __init__(self, memory: HostMemory, sizes: Sequence[int], device: torch.device, worker: int):
        slots = slots_in(memory.path, memory.ends)
        super().__init__(slots, device)
        self._page_lock = PageLock(slots) if device.type == "cuda" else None
        if self._page_lock is not None and self._page_lock.failure:
            logger.warning(
                "The weight slots are not page-locked, so loads are slower: %s.",
                self._page_lock.failure,
            )

    def close(self) -> None:
        """Unregister and drop the slots. Tensors that `take` returned stay valid."""
        if self._page_lock is not None:
            self._page_lock.release()
        super().close()


class HostSlots(Slots):
    """Slots in host shared memory, on any machine. With a GPU they are page-locked, so that copies run at bus speed.

    The file has no name, so nothing is left if the process is killed; only this user can open its descriptor.

    Behind the slots the file has marks, which show agents what they can pull while ranks write.
    A slot's mark is 0 from before its first byte is written until after its last one; the copy in between releases and
    takes the interpreter's lock, which keeps this order on every processor.

    Args:
        sizes (`Sequence[int]`), settings ([`SlotSettings`]):
            Arguments of [`Slots`].
        place (`Sequence[int]`, *optional*):
            `place` of the local main process's slots, on another rank of its node that writes into the same ones.

    Attributes:
        marks (`np.ndarray` of shape `(num_slots + 2,)`):
            Update of the bytes in each slot, 0 while they are written; then update and step of the last update whose
            buckets are all in their slots. int64, zeros after `close`.

    Raises:
        `OSError`: if this process cannot open that file, or finds another one at its place.
        `WeightSyncError`: if the node has too little shared memory; the message names the cure.
    """

    kind = "host"
    memory_type = HostMemory
    opened_as = OpenedHostSlots

    def __init__(self, sizes: Sequence[int], settings: SlotSettings, place: Sequence[int] = ()):
        super().__init__(sizes, settings)
        self.page_lock: PageLock | None = None
        self._ends = tuple(accumulate(-(-size // PAGE) * PAGE for size in sizes))
        self.marks = np.zeros(len(sizes) + 2, np.int64)
        file_end = self._ends[-1] + self.marks.nbytes
        self._file = (
            open_same(*place) if place else tempfile.TemporaryFile(dir=SHARED_MEMORY, buffering=0)
        )
        try:
            with explained(sizes, settings.largest):
                # after `ftruncate`, a write to a full memory would be a SIGBUS
                os.posix_fallocate(self._file.fileno(), 0, file_end)
            path = f"/proc/self/fd/{self._file.fileno()}"
            *self.memory, marks = slots_in(path, (*self._ends, file_end))
            self.marks = marks.view(torch.int64).numpy()
            if settings.pin:
                self.page_lock = PageLock(self.memory)
        except BaseException:
            self.close()
            raise
        if self.page_lock is not None and self.page_lock.failure:
            self.warning = (
                f"the weight sync's slots could not be page-locked ({self.page_lock.failure}): it is slower. "
                "Raise the limit (`ulimit -l unlimited`; docker: --ulimit memlock=-1), or lower `sync_bucket_mb`."
            )

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Process and descriptor with which another process of this user opens the file; its device and inode."""
        found = os.fstat(self._file.fileno())
        return os.getpid(), self._file.fileno(), found.st_dev, found.st_ino

    def open_for(self, engine: int) -> HostMemory:
        return HostMemory(path_of(os.getpid(), self._file.fileno()), self._ends)

    def view(self, slot: int) -> memoryview:
        """Return the bytes of a slot."""
        return memoryview(self.memory[slot][: self.sizes[slot]].numpy())

    def mark(self, slot: int, update: int) -> None:
        """Record the update of the bytes in a slot; 0: they are being written."""
        self.marks[slot] = update

    def publish(self, version: WeightVersion) -> None:
        """Record that every bucket of an update is in its slot."""
        self.marks[-2:] = 0, version.step
        self.marks[-2] = version.update

    def close(self) -> None:
        super().close()
        if self.page_lock is not None:
            self.page_lock.release()
        self.memory = []
        # a view would keep the whole file mapped
        self.marks = np.zeros_like(self.marks)
        self._file.close()
