"""Transport by broadcast over NCCL, or over gloo without GPUs.

The sender and the workers of its node are a process group of their own, separate from the training ranks' groups.
"""

import secrets
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ..errors import WeightSyncError
from .base import Machine, OpenedSlots, Slots, SlotSettings, call_with_timeout, new_slots

LEAVE_S = 5.0


class Broadcast(msgspec.Struct, frozen=True):
    """Slots on each worker's own device; a bucket arrives as a broadcast from rank 0 of a process group."""

    # file through which the group's processes find each other, in the run's private folder
    store: str
    size: int  # number of processes: the sender and all workers of the node's engines
    first_rank: int  # lowest rank among this engine's workers
    timeout_s: float  # limit for every broadcast


class BroadcastGroup:
    """Process group of a sender and its node's workers, which the first broadcast joins.

    Data on GPUs go through NCCL, which connects in the first collective; others go through gloo on the loopback
    interface, whose join blocks until all processes have joined. It is not made by `init_process_group`, because the
    caller has, or is about to get, a default group of its own, to which this group must not belong.

    Args:
        memory ([`Broadcast`]):
            Description of the group. Its limit holds for joining, too.
        rank (`int`):
            Rank of this process in the group. Rank 0 is the sender.
    """

    def __init__(self, memory: Broadcast, rank: int):
        self._memory = memory
        self._rank = rank
        self._group: Any = None

    def broadcast(self, data: torch.Tensor) -> None:
        """Send the bytes of rank 0 to all others, and wait for them.

        Raises:
            `RuntimeError`: torch's error if a process does not take part in time.
        """
        if self._group is None:
            self._group = self._joined(data.is_cuda)
        self._group.broadcast(data, 0).wait()

    def _joined(self, on_gpu: bool) -> Any:
        memory = self._memory
        timeout = timedelta(seconds=memory.timeout_s)
        store = dist.FileStore(memory.store, memory.size)
        store.set_timeout(timeout)
        if on_gpu:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(store, self._rank, memory.size, options)
        options = dist.ProcessGroupGloo._Options()
        # no port is open beyond the node
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = timeout
        return dist.ProcessGroupGloo(store, self._rank, memory.size, options)

    def leave(self) -> None:
        """End the group on this side only. Otherwise torch warns at exit that it was never destroyed."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(Exception):  # a group with a dead peer; the process ends anyway
                call_with_timeout(LEAVE_S, group.abort)


class OpenedBroadcastSlots(OpenedSlots):
    """Slots on this worker's own device, which receive the sender's broadcasts."""

    def __init__(self, memory: Broadcast, sizes: Sequence[int], device: torch.device, worker: int):
        super().__init__(new_slots(sizes, device), device)
        self._group = BroadcastGroup(memory, memory.first_rank + worker)

    def arrive(self, data: torch.Tensor) -> None:
        # joins at the first bucket: opening the slots must not wait for the sender
        self._group.broadcast(data)

    def close(self) -> None:
        super().close()
        self._group.leave()


class BroadcastSlots(Slots):
    """Slots on this rank's device, broadcast to slots on the workers' own devices by NCCL, or by gloo without a GPU.

    The sender and the node's workers form a process group of their own, separate from the training ranks' groups. Its
    rendezvous is a file in the run's private folder, so this library opens no port for it.
    """

    kind = "nccl"
    memory_type = Broadcast
    opened_as = OpenedBroadcastSlots
    needs_all_engines = True

    def __init__(self, sizes: Sequence[int], settings: SlotSettings):
        super().__init__(sizes, settings)
        self.memory = new_slots(sizes, settings.device)
        self._workers = settings.workers
        # Another name for every group: the file of a group stays if one of its processes was killed
        store = str(settings.folder / f"weights-{secrets.token_hex(4)}.store")
        size = 1 + sum(settings.workers)
        self.message = Broadcast(store, size, 1, settings.timeout_s)
        self._group = BroadcastGroup(self.message, 0)

    @staticmethod
    def refusal(machine: Machine) -> str | None:
        if machine.gpu and machine.shared:
            return (
                "`weight_transport='nccl'`: an engine is on the local main process's GPU, and NCCL refuses two "
                "processes on one GPU. Use 'ipc' or 'host'."
            )
        return None

    def open_for(self, engine: int) -> Broadcast:
        first_rank = 1 + sum(self._workers[:engine])
        return msgspec.structs.replace(self.message, first_rank=first_rank)

    def transmit(self, slot: int, num_bytes: int) -> None:
        try:
            self._group.broadcast(self.memory[slot][:num_bytes])
        except RuntimeError as error:
            raise WeightSyncError(
                f"A bucket of weights did not reach the engines' workers within {self.message.timeout_s:.0f} s "
                f"({error}). See the engines' logs, or set `weight_transport='host'`."
            ) from error
        if self.memory[slot].is_cuda:
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Leave the group, without the workers, which have ended or are ending."""
        super().close()
        self._group.leave()
