"""Transport by broadcast over NCCL, or over gloo without GPUs.

The sender and the workers of its node are a process group of their own, separate from the training ranks' groups.
"""

import secrets
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Self

import msgspec
import torch
import torch.distributed as dist

from ..errors import WeightSyncError
from .base import Machine, OpenedSlots, Slots, SlotSettings, call_with_timeout, new_slots

LEAVE_S = 5.0


class Broadcast(msgspec.Struct, frozen=True):
    """Slots on each worker's own device; a bucket arrives as a broadcast from rank 0 of a process group."""

    backend: str  # "nccl" or "gloo"
    store: (
        str  # file through which the group's processes find each other, in the run's private folder
    )
    size: int  # number of processes: the sender and all workers of the node's engines
    first_rank: int  # lowest rank among this engine's workers
    timeout_s: float  # limit for every broadcast


class OpenedBroadcastSlots(OpenedSlots):
    """Slots on this worker's own device, which receive the sender's broadcasts."""

    memory_type = Broadcast

    def __init__(
        self, slots: list[torch.Tensor], device: torch.device, memory: Broadcast, worker: int
    ):
        super().__init__(slots, device)
        self._memory = memory
        self._rank = memory.first_rank + worker
        self._group: Any = None

    @classmethod
    def open(
        cls, memory: Broadcast, sizes: Sequence[int], device: torch.device, worker: int
    ) -> Self:
        return cls(new_slots(sizes, device), device, memory, worker)

    def arrive(self, data: torch.Tensor) -> None:
        # join at the first bucket: opening the slots must not wait for the sender
        if self._group is None:
            memory = self._memory
            self._group = pair_group(
                memory.backend, memory.store, self._rank, memory.size, memory.timeout_s
            )
        self._group.broadcast(data, 0).wait()

    def close(self) -> None:
        super().close()
        group = self._group
        self._group = None
        if group is not None:
            leave(group)


class BroadcastSlots(Slots):
    """Slots on this rank's device, broadcast to slots on the workers' own devices by NCCL, or by gloo without a GPU.

    The sender and the node's workers form a process group of their own, separate from the training ranks' groups. Its
    rendezvous is a file in the run's private folder, so this library opens no port for it.
    """

    kind = "nccl"
    opened_as = OpenedBroadcastSlots
    needs_all_engines = True

    def __init__(self, sizes: Sequence[int], settings: SlotSettings):
        super().__init__(sizes, settings)
        self.memory = new_slots(sizes, settings.device)
        self._backend = "nccl" if settings.device.type == "cuda" else "gloo"
        # Another name for every group: the file of a group stays if one of its processes was killed
        self._store = settings.folder / f"weights-{secrets.token_hex(4)}.store"
        self._timeout_s = settings.timeout_s
        self._workers = settings.workers
        self._group: Any = None

    @staticmethod
    def refusal(machine: Machine) -> str | None:
        if machine.gpu and machine.shared:
            return (
                "`weight_transport='nccl'`: an engine is on the local main process's GPU, and NCCL refuses two "
                "processes on one GPU. Use 'ipc' or 'host'."
            )
        return None

    def open_for(self, engine: int) -> Broadcast:
        first = 1 + sum(self._workers[:engine])
        return Broadcast(
            self._backend, str(self._store), 1 + sum(self._workers), first, self._timeout_s
        )

    def transmit(self, slot: int, num_bytes: int) -> None:
        try:
            if self._group is None:
                size = 1 + sum(self._workers)
                self._group = pair_group(self._backend, str(self._store), 0, size, self._timeout_s)
            self._group.broadcast(self.memory[slot][:num_bytes], 0).wait()
        except RuntimeError as error:
            raise WeightSyncError(
                f"A bucket of weights did not reach the engines' workers within {self._timeout_s:.0f} s ({error}). "
                "See the engines' logs, or set `weight_transport='host'`."
            ) from error
        if self.memory[slot].is_cuda:
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Leave the group, without the workers, which have ended or are ending."""
        super().close()
        group = self._group
        self._group = None
        if group is not None:
            leave(group)


def leave(group: Any) -> None:
    """End a process group on this side only. Otherwise torch warns at exit that it was never destroyed."""
    with suppress(Exception):  # a group with a dead peer; the process ends anyway
        call_with_timeout(LEAVE_S, group.abort)


def pair_group(backend: str, store: str, rank: int, size: int, timeout_s: float) -> Any:
    """Join the group. With gloo this blocks until all processes have joined; NCCL connects in the first collective.

    It avoids `init_process_group`, because the caller has, or is about to get, a default group of its own, to which
    this group must not belong.

    Args:
        backend (`str`):
            `"nccl"`, or `"gloo"` on the loopback interface.
        store (`str`):
            Path of a file in a private folder, through which the processes find each other.
        rank (`int`), size (`int`):
            Rank of this process in the group, and size of the group. Rank 0 is the sender.
        timeout_s (`float`):
            Limit for joining, and for every collective of the group.

    Raises:
        `RuntimeError`: torch's error if a process does not join in time.
    """
    timeout = timedelta(seconds=timeout_s)
    file_store = dist.FileStore(store, size)
    file_store.set_timeout(timeout)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(file_store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()
    # no port is open beyond the node
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    options._timeout = timeout
    return dist.ProcessGroupGloo(file_store, rank, size, options)
