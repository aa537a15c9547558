"""Transport through CUDA IPC: the workers read the slots in the memory of the local main process's GPU."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import torch

from .base import Machine, OpenedSlots, Slots, SlotSettings, new_slots


class DeviceMemory(msgspec.Struct, frozen=True):
    """Slots in the memory of the sender's GPU, which the workers open through CUDA IPC."""

    # per slot: arguments of `torch.UntypedStorage._new_shared_cuda` after the device
    handles: tuple[tuple, ...]
    device: int  # index of the sender's GPU among those that the engine sees


class OpenedDeviceSlots(OpenedSlots):
    """Slots in the memory of the sender's GPU, opened by this worker."""

    def __init__(
        self, memory: DeviceMemory, sizes: Sequence[int], device: torch.device, worker: int
    ):
        storages = [
            torch.UntypedStorage._new_shared_cuda(memory.device, *handle)
            for handle in memory.handles
        ]
        slots = [
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[:size]
            for storage, size in zip(storages, sizes, strict=True)
        ]
        super().__init__(slots, device)


class DeviceSlots(Slots):
    """Slots on the local main process's GPU. The workers open them through CUDA IPC, so no bytes pass the host.

    The engines run on the same GPU or on others of the node with peer access to it. docs/evidence/gpu.md lists
    where this ran.
    """

    kind = "ipc"
    memory_type = DeviceMemory
    opened_as = OpenedDeviceSlots
    engines_see_sender = True

    def __init__(self, sizes: Sequence[int], settings: SlotSettings):
        super().__init__(sizes, settings)
        with without_expandable_segments():
            self.memory = new_slots(sizes, settings.device)
        self._seen_as = settings.seen_as

    @staticmethod
    def refusal(machine: Machine) -> str | None:
        if machine.gpu is None:
            return (
                "`weight_transport='ipc'` needs GPUs, and the engines run on the CPU. Use 'host'."
            )
        if not machine.peer_access:
            return (
                "`weight_transport='ipc'` needs the engines on the local main process's GPU, or GPUs with peer access "
                "to it; these have none (`nvidia-smi topo -p2p r`). Use 'host'."
            )
        return None

    def open_for(self, engine: int) -> DeviceMemory:
        handles = tuple(
            tuple(memory.untyped_storage()._share_cuda_()[1:]) for memory in self.memory
        )
        return DeviceMemory(handles, self._seen_as[engine])


@contextmanager
def without_expandable_segments() -> Iterator[None]:
    """
    Turn expandable segments off, so that another process can open the GPU memory allocated inside the context.

    torch shares an expandable segment through `pidfd_getfd`, which requires permission to trace the owner; an engine
    has none for its parent. While the setting is off, torch's allocator uses no block of an expandable segment. A
    no-op unless expandable segments are configured.
    """
    settings = os.getenv("PYTORCH_ALLOC_CONF") or os.getenv("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "expandable_segments:True" not in settings:
        yield
        return
    torch._C._accelerator_setAllocatorSettings(
        settings.replace("expandable_segments:True", "expandable_segments:False")
    )
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)
