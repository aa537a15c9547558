"""Staging slots on the local main process, which writes a bucket into a slot; the node's engines copy it out.

Three kinds of memory share one contract. `engine/receiving.py` is the workers' end of each.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from ..engine.page_lock import PageLock
from ..engine.process_group import pair_group
from ..engine.protocol import NUM_SLOTS, Broadcast, DeviceMemory, HostMemory, SlotMemory, TensorSpec
from ..errors import WeightSyncError
from .shards import Pieces

SHARED_MEMORY = Path("/dev/shm")


class Slots:
    """Slots of one node, on its local main process only. One thread at a time calls the methods.

    ```python
    slots.open_for(engine)                # memory for this engine's `OpenSlots`; `opened()` after all replies
    slots.write(k % 2, specs, tensors)    # blocks until the bytes are in the slot
    connection.send(LoadBucket(...))
    slots.announce(k % 2, num_bytes)      # `BroadcastSlots` only: blocks until the workers have the bytes
    ```
    """

    kind: str  # name in `weight_transport`

    def __init__(self, memory: list[torch.Tensor]):
        self.memory = memory
        self.num_bytes = memory[0].numel()

    def open_for(self, engine: int) -> SlotMemory:
        raise NotImplementedError

    def opened(self) -> None:
        """Remove what the workers needed only to open the slots, after all replies or a failure."""

    def write(self, slot: int, specs: Sequence[TensorSpec], tensors: Sequence[Pieces]) -> None:
        """Copy the tensors into the slot, cast to the dtypes of their specs. On return all bytes are in the slot.

        Raises:
            `WeightSyncError`: if a tensor has another shape than its spec.
        """
        for spec, pieces in zip(specs, tensors, strict=True):
            if pieces.shape != spec.shape:
                raise WeightSyncError(
                    f"{spec.name} was gathered with shape {pieces.shape}, expected {spec.shape}: the model changed "
                    "after the trainer was built. Resize or replace its layers before."
                )
            target = self.memory[slot][spec.offset : spec.offset + spec.num_bytes]
            pieces.copy_to(target.view(getattr(torch, spec.dtype)))
        if self.memory[slot].is_cuda or any(pieces.data.is_cuda for pieces in tensors):
            torch.cuda.current_stream().synchronize()

    def announce(self, slot: int, num_bytes: int) -> None:
        """Send the slot's first bytes to the workers, after `LoadBucket`; a no-op if they can read the slot itself."""

    def close(self) -> None:
        """Release the memory that other processes could still see. No `write` may follow."""


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
                self.page_lock = PageLock(self.memory)
        except BaseException:
            self.close()
            raise

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


class DeviceSlots(Slots):
    """Slots on the local main process's GPU. The workers open them through CUDA IPC, so no bytes pass the host.

    The engines run on the same GPU or on others of the node with peer access to it. docs/gpu.md lists where this ran.

    Args:
        num_bytes (`int`):
            Size of a slot, in bytes.
        device (`torch.device`):
            GPU of this rank.
        seen_as (`Sequence[int]`):
            Index of that GPU among the GPUs that each engine sees.
    """

    kind = "ipc"

    def __init__(self, num_bytes: int, device: torch.device, seen_as: Sequence[int]):
        with without_expandable_segments():
            super().__init__([torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)])
        self._seen_as = seen_as

    def open_for(self, engine: int) -> DeviceMemory:
        handles = tuple(tuple(memory.untyped_storage()._share_cuda_()[1:]) for memory in self.memory)
        return DeviceMemory(handles, self._seen_as[engine])


@contextmanager
def without_expandable_segments(environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """
    Turn expandable segments off, so that another process can open the GPU memory allocated inside the context.

    torch shares an expandable segment through `pidfd_getfd`, which requires permission to trace the owner; an engine
    has none for its parent. While the setting is off, torch's allocator uses no block of an expandable segment. A
    no-op unless expandable segments are configured.
    """
    settings = environ.get("PYTORCH_ALLOC_CONF") or environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
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


class BroadcastSlots(Slots):
    """Slots on this rank's device, broadcast to slots on the workers' own devices by NCCL, or by gloo without a GPU.

    The sender and the node's workers form a process group of their own, separate from the training ranks' groups. Its
    rendezvous is a file in the run's private folder, so this library opens no port for it.

    Args:
        num_bytes (`int`):
            Size of a slot, in bytes.
        device (`torch.device`):
            Device of this rank.
        store (`Path`):
            Path of the rendezvous file, which must not exist yet.
        workers (`Sequence[int]`):
            Number of workers of each engine.
        timeout_s (`float`):
            Time limit of the rendezvous and of every broadcast, in seconds.
    """

    kind = "nccl"

    def __init__(self, num_bytes: int, device: torch.device, store: Path, workers: Sequence[int], timeout_s: float):
        super().__init__([torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)])
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._store, self._timeout_s, self._workers = store, timeout_s, workers
        self._group = None

    def open_for(self, engine: int) -> Broadcast:
        first = 1 + sum(self._workers[:engine])
        return Broadcast(self._backend, str(self._store), 1 + sum(self._workers), first, self._timeout_s)

    def _join(self):
        if self._group is None:
            self._group = pair_group(self._backend, str(self._store), 0, 1 + sum(self._workers), self._timeout_s)
        return self._group

    def announce(self, slot: int, num_bytes: int) -> None:
        try:
            self._join().broadcast(self.memory[slot][:num_bytes], 0).wait()
        except RuntimeError as error:
            raise WeightSyncError(
                f"A bucket of weights did not reach the engines' workers within {self._timeout_s:.0f} s ({error}). "
                "See the engines' logs, or set `weight_transport='host'`."
            ) from error
        if self.memory[slot].is_cuda:
            torch.cuda.current_stream().synchronize()
