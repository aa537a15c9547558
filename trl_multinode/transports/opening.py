"""All transports by name, and a worker's opening of the slots that its sender describes."""

import msgspec
import torch

from ..wire.messages import OpenSlots
from .base import OpenedSlots, Slots
from .broadcast import BroadcastSlots
from .cuda_ipc import DeviceSlots
from .host_memory import HostSlots
from .signals import FollowedSignals

TRANSPORTS: dict[str, type[Slots]] = {
    slots.kind: slots for slots in (HostSlots, DeviceSlots, BroadcastSlots)
}


def open_slots(
    request: OpenSlots, device: torch.device, worker: int = 0, num_workers: int = 1
) -> OpenedSlots:
    """Open the sender's slots in a worker, and connect it to the sender's signals.

    Args:
        request (`OpenSlots`):
            Request of the sender.
        device (`torch.device`):
            Device of the worker.
        worker (`int`, *optional*, defaults to 0), num_workers (`int`, *optional*, defaults to 1):
            Index of the worker in its engine, and their number.
    """
    transport = TRANSPORTS[request.transport]
    memory = msgspec.msgpack.decode(request.memory, type=transport.memory_type)
    opened = transport.opened_as(memory, request.sizes, device, worker)
    opened.connect(FollowedSignals(request.signals, request.engine, num_workers), request.buckets)
    return opened
