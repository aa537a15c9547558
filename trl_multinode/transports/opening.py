"""All transports by name, and a worker's opening of the slots that its sender describes."""

import msgspec
import torch

from ..wire.messages import OpenSlots
from .base import OpenedSlots, Slots
from .broadcast import BroadcastSlots
from .cuda_ipc import DeviceSlots
from .host_memory import HostSlots

TRANSPORTS: dict[str, type[Slots]] = {
    slots.kind: slots for slots in (HostSlots, DeviceSlots, BroadcastSlots)
}


def open_slots(request: OpenSlots, device: torch.device, worker: int = 0) -> OpenedSlots:
    """Open the sender's slots in a worker.

    Args:
        request (`OpenSlots`):
            Request of the sender.
        device (`torch.device`):
            Device of the worker.
        worker (`int`, *optional*, defaults to 0):
            Index of the worker in its engine.
    """
    opened_as = TRANSPORTS[request.transport].opened_as
    memory = msgspec.msgpack.decode(request.memory, type=opened_as.memory_type)
    return opened_as.open(memory, request.slot_bytes, device, worker)
