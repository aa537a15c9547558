"""Staging slots in an engine's worker, which reads what `weights/slots.py` writes."""

import logging
import zlib
from collections.abc import Callable, Sequence

import torch

from .page_lock import PageLock
from .process_group import pair_group
from .protocol import NUM_SLOTS, Broadcast, DeviceMemory, HostMemory, SlotMemory, TensorSpec

logger = logging.getLogger(__name__)

Taken = list[tuple[str, torch.Tensor]]


class OpenedSlots:
    """Slots that this worker may read.

    Args:
        memory (`SlotMemory`):
            Description of the slots' memory, from the sender.
        slot_bytes (`int`):
            Size of a slot, in bytes.
        device (`torch.device`):
            Device of the worker.
        worker (`int`):
            Index of the worker in its engine.
    """

    def __init__(self, memory: SlotMemory, slot_bytes: int, device: torch.device, worker: int = 0):
        self._device = device
        self._arrive: Callable[[torch.Tensor], object] = lambda data: None
        self._page_lock: PageLock | None = None
        if isinstance(memory, HostMemory):
            self._slots = [
                torch.from_file(path, shared=True, size=slot_bytes, dtype=torch.uint8) for path in memory.paths
            ]
            if device.type == "cuda":
                self._lock_pages()
        elif isinstance(memory, DeviceMemory):
            storages = [torch.UntypedStorage._new_shared_cuda(memory.device, *handle) for handle in memory.handles]
            self._slots = [
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:slot_bytes]
                for storage in storages
            ]
        else:
            self._slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]
            self._join(memory, worker)

    def _lock_pages(self) -> None:
        self._page_lock = PageLock(self._slots)
        if self._page_lock.failure:
            logger.warning("The weight slots are not page-locked, so loads are slower: %s.", self._page_lock.failure)

    def _join(self, memory: Broadcast, worker: int) -> None:
        group = None

        def arrive(data: torch.Tensor) -> None:
            nonlocal group
            if group is None:  # join at the first bucket: opening the slots must not wait for the sender
                rank = memory.first_rank + worker
                group = pair_group(memory.backend, memory.store, rank, memory.size, memory.timeout_s)
            group.broadcast(data, 0).wait()

        self._arrive = arrive

    def take(self, slot: int, specs: Sequence[TensorSpec]) -> Taken:
        """
        Copy a bucket out of its slot and return its tensors, as views of that one copy on the worker's device.

        A copy is necessary: vLLM's loaders keep references until a module is full, and a padded vocabulary is full
        only at the end, so a later bucket would overwrite a view of the slot (log-prob error 7.2 measured). One copy
        of the bucket instead of one per tensor keeps the bus busy: a 0.5B model has 290 tensors, half of them below
        10 KB. The price is memory: a bucket stays allocated as long as a loader holds any of its tensors.
        """
        data = self._slots[slot][: specs[-1].offset + specs[-1].num_bytes]
        self._arrive(data)
        bucket = data.to(self._device, copy=True)
        if bucket.is_cuda:  # the sender may write the slot again as soon as this returns
            torch.cuda.current_stream(bucket.device).synchronize()
        return [
            (spec.name, bucket[spec.offset : spec.offset + spec.num_bytes].view(getattr(torch, spec.dtype))
             .view(spec.shape))
            for spec in specs
        ]  # fmt: skip

    def crc(self, slot: int, num_bytes: int) -> int:
        """Return zlib's CRC-32 of a slot's first bytes, once they have arrived."""
        data = self._slots[slot][:num_bytes]
        self._arrive(data)
        return zlib.crc32(data.cpu().numpy())

    def close(self) -> None:
        """Unregister and drop the slots. Tensors that `take` returned stay valid."""
        if self._page_lock is not None:
            self._page_lock.release()
        self._slots = []
