"""Service of a training node's port from which agents pull the weights: the buckets in the node's slots.

    agent -> port   AskNews, or AskBucket
    port -> agent   News, or Part, the bytes of the slot, Part

Ranks take no part and never wait: the service reads the slots and their marks while ranks write. A bucket that a rank
has overwritten meanwhile has no checksum at its end.
"""

import asyncio
import socket
import struct
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np

from ..transports.host_memory import HostSlots
from ..wire.connection import MAX_HELLO_BYTES, frame, receive_body
from ..wire.messages import TensorSpec, WeightVersion
from ..wire.port import PEER_S
from .slot_updates import SlotUpdates

WEIGHTS = "weights"  # role in a handshake
POLL_S = 0.03  # between two looks at the marks, which take microseconds

Found = TypeVar("Found")


class AskNews(msgspec.Struct, frozen=True, tag=True):
    """Request for [`News`] of an update after `update`."""

    update: int
    wait_s: float


class AskBucket(msgspec.Struct, frozen=True, tag=True):
    """Request for a bucket of an update, which the node may still be writing."""

    bucket: int
    update: int


class News(msgspec.Struct, frozen=True):
    """Last update whose buckets are all in the node's slots; without fields if there is no news in time."""

    version: WeightVersion = WeightVersion()
    updates: tuple[int, ...] = ()  # of each bucket: an earlier one if `version` did not send it
    # of each bucket in its slot, the same on all nodes; only for an agent that has no update yet
    layouts: tuple[tuple[TensorSpec, ...], ...] = ()
    in_flight: bool = False  # as in `UpdateWeights`
    recompute_kv: bool = False


class Part(msgspec.Struct, frozen=True):
    """Begin and end of a bucket."""

    update: int  # of the bytes; they follow the begin only if it is the one that was asked for
    # zlib.crc32 at the end; `None`: a rank began to write the slot meanwhile
    crc: int | None = None


_decoder = msgspec.msgpack.Decoder(AskNews | AskBucket)


class WeightService:
    """Weights of a node for the agents that connect to its port. Local main process only.

    `serve` is the service `WEIGHTS` of a [`Port`].

    Args:
        current (`Callable[[], SlotUpdates | None]`):
            Function that returns the weight sync of this rank, or `None` while there is none. Each bucket must have a
            slot of its own in host memory.
    """

    def __init__(self, current: Callable[[], SlotUpdates | None]):
        self._current = current
        # of each bucket: update, and CRC-32 that a thread computes once for all agents
        self._crcs: dict[int, tuple[int, asyncio.Future[int]]] = {}

    async def serve(self, stream: socket.socket) -> None:
        """Answer an agent until it leaves.

        Raises:
            `EOFError`, `OSError`: if the agent has left.
            `msgspec.MsgspecError`: if it sends something else than a request.
        """
        # of a send that makes no progress
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(PEER_S), 0))
        while True:
            request = _decoder.decode(await receive_body(stream, MAX_HELLO_BYTES))
            if isinstance(request, AskBucket):
                await self._send_bucket(stream, request)
            else:
                news = await _until(stream, partial(self._news, request.update), request.wait_s)
                await _answer(stream, news or News())

    def _slots(self) -> HostSlots | None:
        sync = self._current()
        slots = None if sync is None else sync.slots
        return slots if isinstance(slots, HostSlots) else None

    def _news(self, after: int) -> News | None:
        """Return the last whole update if it is after `after` and no rank overwrites it."""
        sync, slots = self._current(), self._slots()
        if sync is None or slots is None:
            return None
        marks = slots.marks
        *updates, update, step = marks.tolist()
        # read twice, because a rank may publish an update between the reads of its two numbers
        settled = marks[-2:].tolist() == [update, step] and all(
            0 < one <= update for one in updates
        )
        if update <= after or not settled:
            return None
        layouts = () if after else tuple(sync.layouts)
        version = WeightVersion(update, step)
        return News(version, tuple(updates), layouts, sync.in_flight, sync.recompute_kv)

    def _filled(self, request: AskBucket) -> tuple[np.ndarray, int, memoryview] | None:
        """Return the marks of all slots, and update and bytes of a slot that has the wanted update or a later one.

        They stay mapped after their rank has closed the slots.
        """
        slots = self._slots()
        if slots is None:
            return None
        marks, update = slots.marks, int(slots.marks[request.bucket])
        return None if update < request.update else (marks, update, slots.view(request.bucket))

    async def _send_bucket(self, stream: socket.socket, request: AskBucket) -> None:
        found = await _until(stream, partial(self._filled, request))
        assert found is not None
        marks, update, data = found
        await _answer(stream, Part(update))
        if update > request.update:
            return
        crc = self._crc(request, data)
        await _send_in_thread(stream, data)
        found_crc = await crc
        is_whole = marks[request.bucket] == update
        await _answer(stream, Part(update, found_crc if is_whole else None))

    def _crc(self, request: AskBucket, data: memoryview) -> "asyncio.Future[int]":
        """Return the CRC-32 of a bucket, which a thread computes beside the first send."""
        update, crc = self._crcs.get(request.bucket, (0, None))
        if crc is None or update != request.update:
            crc = asyncio.get_running_loop().run_in_executor(None, partial(zlib.crc32, data))
            self._crcs[request.bucket] = request.update, crc
        return crc


async def _until(
    stream: socket.socket, look: Callable[[], Found | None], wait_s: float = float("inf")
) -> Found | None:
    """Look until there is something, the time is over, or the agent has left."""
    end = time.monotonic() + wait_s
    while (found := look()) is None:
        if time.monotonic() >= end:
            return None
        with suppress(BlockingIOError):
            if not stream.recv(1, socket.MSG_PEEK):
                raise EOFError("the stream has ended")
        await asyncio.sleep(POLL_S)
    return found


async def _answer(stream: socket.socket, answer: News | Part) -> None:
    await asyncio.get_running_loop().sock_sendall(stream, frame(answer))


async def _send_in_thread(stream: socket.socket, data: memoryview) -> None:
    """Send bytes in one call of the kernel, because training holds the interpreter for milliseconds at a time."""
    stream.setblocking(True)
    try:
        await asyncio.to_thread(stream.sendall, data)
    except asyncio.CancelledError:
        with suppress(OSError):  # the agent has left, too
            stream.shutdown(socket.SHUT_RDWR)  # ends the call in the thread
        raise
    stream.setblocking(False)
