"""Transport through host shared memory: works on every machine."""

import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Self

import msgspec
import torch

from ..errors import WeightSyncError
from ..wire.messages import NUM_SLOTS
from .base import OpenedSlots, Slots, SlotSettings
from .page_lock import PageLock

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")


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
            logger.warning("The weight slots are not page-locked, so loads are slower: %s.", self._page_lock.failure)

    @classmethod
    def open(cls, memory: HostMemory, slot_bytes: int, device: torch.device, worker: int) -> Self:
        slots = [torch.from_file(path, shared=True, size=slot_bytes, dtype=torch.uint8) for path in memory.paths]
        return cls(slots, device)

    def close(self) -> None:
        """Unregister and drop the slots. Tensors that `take` returned stay valid."""
        if self._page_lock is not None:
            self._page_lock.release()
        super().close()


class HostSlots(Slots):
    """Slots in host shared memory, on any machine. With a GPU they are page-locked, so that copies run at bus speed.

    The files have mode 0600 and are unlinked as soon as the workers have mapped them.

    Args:
        num_bytes (`int`):
            Size of a slot, in bytes.
        pin (`bool`):
            Page-lock the slots. If that fails, `self.page_lock.failure` holds the reason.

    Raises:
        `WeightSyncError`: if the machine has too little free shared memory; the message names the cure.
    """

    kind = "host"
    opened_as = OpenedHostSlots

    def __init__(self, num_bytes: int, pin: bool):
        free = shutil.disk_usage(SHARED_MEMORY).free
        if free < NUM_SLOTS * num_bytes:
            raise WeightSyncError(
                f"{SHARED_MEMORY} has {free / 2**20:.0f} MiB free, the weight sync needs {NUM_SLOTS} x "
                f"{num_bytes / 2**20:.0f} MiB. Lower `sync_bucket_mb`, or give the container more shared memory "
                "(docker: --shm-size)."
            )
        self.paths: list[str] = []
        self.page_lock: PageLock | None = None
        try:
            for _ in range(NUM_SLOTS):
                self._create(num_bytes)
            super().__init__([torch.from_file(p, shared=True, size=num_bytes, dtype=torch.uint8) for p in self.paths])
            if pin:
                self._lock_pages()
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, num_bytes: int, settings: SlotSettings) -> Self:
        return cls(num_bytes, settings.pin)

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
        try:
            os.ftruncate(handle, num_bytes)
        finally:
            os.close(handle)

    def open_for(self, engine: int) -> HostMemory:
        return HostMemory(tuple(self.paths))

    def opened(self) -> None:
        for path in self.paths:
            Path(path).unlink(missing_ok=True)

    def close(self) -> None:
        self.opened()
        if self.page_lock is not None:
            self.page_lock.release()
