"""Staging slots as a worker of an engine sees them: the other end of `weights/slots.py`."""

import zlib
from collections.abc import Callable, Sequence

import torch

from .process_group import pair_group
from .protocol import NUM_SLOTS, Broadcast, DeviceMemory, HostMemory, SlotMemory, TensorSpec

Taken = list[tuple[str, torch.Tensor]]


class OpenedSlots:
    """Slots that this worker may read.

    Args:
        memory (`SlotMemory`):
            What the sender said of them.
        slot_bytes (`int`):
            Size of a slot.
        device (`torch.device`):
            The worker's.
        worker (`int`):
            Index of the worker in its engine.
    """

    def __init__(self, memory: SlotMemory, slot_bytes: int, device: torch.device, worker: int = 0):
        self._device = device
        self._arrive: Callable[[torch.Tensor], object] = lambda data: None
        if isinstance(memory, HostMemory):
            self._slots = [
                torch.from_file(path, shared=True, size=slot_bytes, dtype=torch.uint8) for path in memory.paths
            ]
        elif isinstance(memory, DeviceMemory):
            storages = [torch.UntypedStorage._new_shared_cuda(memory.device, *handle) for handle in memory.handles]
            self._slots = [
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:slot_bytes]
                for storage in storages
            ]
        else:
            self._slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]
            self._join(memory, worker)

    def _join(self, memory: Broadcast, worker: int) -> None:
        group = None

        def arrive(data: torch.Tensor) -> None:
            nonlocal group
            if group is None:  # with the first bucket: opening the slots must not wait for the sender
                rank = memory.first_rank + worker
                group = pair_group(memory.backend, memory.store, rank, memory.size, memory.timeout_s)
            group.broadcast(data, 0).wait()

        self._arrive = arrive

    def take(self, slot: int, specs: Sequence[TensorSpec]) -> Taken:
        """The tensors of a bucket, on the worker's device.

        Always copies: vLLM's loaders keep what they are given until a module is full, and a padded vocabulary never is
        before the end, so a view would be overwritten by a later bucket (log-prob error 7.2 measured).
        """
        data = self._slots[slot][: specs[-1].offset + specs[-1].num_bytes]
        self._arrive(data)
        return [
            (spec.name, data[spec.offset : spec.offset + spec.num_bytes].view(getattr(torch, spec.dtype))
             .view(spec.shape).to(self._device, copy=True))
            for spec in specs
        ]  # fmt: skip

    def crc(self, slot: int, num_bytes: int) -> int:
        """zlib's CRC-32 of a slot's first bytes, once they have arrived."""
        data = self._slots[slot][:num_bytes]
        self._arrive(data)
        return zlib.crc32(data.cpu().numpy())
