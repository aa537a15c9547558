"""Transport through host shared memory: works on every machine."""

import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Self

import msgspec
import torch

from ..errors import WeightSyncError
from ..wire.messages import NUM_SLOTS, TensorSpec
from .base import OpenedSlots, Slots, SlotSettings
from .page_lock import PageLock

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")


@contextmanager
def explained(slot_bytes: int, largest: TensorSpec | None) -> Iterator[None]:
    """Raise the error of a full shared memory with what was needed and the cure.

    Args:
        slot_bytes (`int`):
            Size of one slot, in bytes.
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
            f"{SHARED_MEMORY} has {_mib(usage.free)} free of {_mib(usage.total)}, two slots of {_mib(slot_bytes)} for "
            f"the weight sync need {_mib(NUM_SLOTS * slot_bytes)}, and vLLM's own segments come on top. "
            f"{_cure(slot_bytes, largest)}"
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
    """Slots in shared-memory files, which the sender unlinks once the workers have mapped them."""

    paths: tuple[str, ...]  # one per slot


class OpenedHostSlots(OpenedSlots):
    """Slots in host memory, mapped by this worker and page-locked if its device is a GPU."""

    memory_type = HostMemory

    def __init__(self, slots: list[torch.Tensor], device: torch.device):
        super().__init__(slots, device)
        self._page_lock = PageLock(slots) if device.type == "cuda" else None
        if self._page_lock is not None and self._page_lock.failure:
            logger.warning(
                "The weight slots are not page-locked, so loads are slower: %s.",
                self._page_lock.failure,
            )

    @classmethod
    def open(cls, memory: HostMemory, slot_bytes: int, device: torch.device, worker: int) -> Self:
        slots = [
            torch.from_file(path, shared=True, size=slot_bytes, dtype=torch.uint8)
            for path in memory.paths
        ]
        return cls(slots, device)

    def close(self) -> None:
        """Unregister and drop the slots. Tensors that `take` returned stay valid."""
        if self._page_lock is not None:
            self._page_lock.release()
        super().close()


class HostSlots(Slots):
    """Slots in host shared memory, on any machine. With a GPU they are page-locked, so that copies run at bus speed.

    The files have mode 0600 and are unlinked as soon as the workers have mapped them.
    A file of the run's folder lists them until then, so that they can be removed if the process is killed.

    Raises:
        `WeightSyncError`: if the node has too little shared memory; the message names the cure.
    """

    kind = "host"
    opened_as = OpenedHostSlots

    def __init__(self, num_bytes: int, settings: SlotSettings):
        super().__init__(num_bytes, settings)
        self.paths: list[str] = []
        self._folder = settings.folder
        self.page_lock: PageLock | None = None
        try:
            with explained(num_bytes, settings.largest):
                for _ in range(NUM_SLOTS):
                    self._create(num_bytes)
            self.memory = [
                torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
                for path in self.paths
            ]
            if settings.pin:
                self._lock_pages()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def reserve(num_bytes: int, settings: SlotSettings) -> IO[bytes]:
        """Set shared memory aside, in a file without a name, so that nothing is left if the process is killed."""
        file = tempfile.TemporaryFile(prefix="trl_multinode_", dir=SHARED_MEMORY, buffering=0)
        try:
            with explained(num_bytes, settings.largest):
                os.posix_fallocate(file.fileno(), 0, NUM_SLOTS * num_bytes)
        except BaseException:
            file.close()
            raise
        return file

    def _lock_pages(self) -> None:
        self.page_lock = PageLock(self.memory)
        if self.page_lock.failure:
            self.warning = (
                f"the weight sync's slots could not be page-locked ({self.page_lock.failure}): it is slower. "
                "Raise the limit (`ulimit -l unlimited`; docker: --ulimit memlock=-1), or lower `sync_bucket_mb`."
            )

    def _create(self, num_bytes: int) -> None:
        handle, path = tempfile.mkstemp(prefix="trl_multinode_", dir=SHARED_MEMORY)
        self.paths.append(path)
        if self._folder != Path():
            (self._folder / "slots.shm").write_text("\n".join(self.paths))
        try:
            # after `ftruncate`, a write to a full memory would be a SIGBUS
            os.posix_fallocate(handle, 0, num_bytes)
        finally:
            os.close(handle)

    def open_for(self, engine: int) -> HostMemory:
        return HostMemory(tuple(self.paths))

    def opened(self) -> None:
        super().opened()
        for path in self.paths:
            Path(path).unlink(missing_ok=True)

    def close(self) -> None:
        self.opened()
        super().close()
        if self.page_lock is not None:
            self.page_lock.release()
