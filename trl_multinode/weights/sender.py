"""Thread of the local main process that copies gathered buckets into slots and makes the engines load them."""

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ..engine.group import EngineGroup, Posted, answers
from ..errors import WeightSyncError
from ..transports.base import Slots
from ..transports.pieces import Pieces
from ..wire.messages import NUM_SLOTS, Done, LoadBucket
from .host_copy import HostCopy
from .timings import SyncTimings


class BucketSender:
    """Thread of the local main process that copies buckets into slots and makes the engines load them.

    While it runs, no other thread uses these connections to the engines. `NodeEngines` limits each wait for a reply.
    """

    def __init__(
        self,
        engines: EngineGroup,
        slots: Slots,
        layouts: list,
        timings: SyncTimings,
        copy: HostCopy | None = None,
    ):
        self._engines = engines
        self._slots = slots
        self._layouts = layouts
        self._timings = timings
        self._copy = copy
        self._in_flight: deque[Posted] = deque()  # one per bucket in flight
        self._load_s = {engine.index: 0.0 for engine in engines}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight sync")
        self._stream: torch.cuda.Stream | None = None

    def __enter__(self) -> "BucketSender":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Wait until the engines have loaded every bucket, unless the sync has failed already."""
        try:
            if kind is None:
                self._thread.submit(self._wait_for_all).result()
                self._timings.load_s = max(self._load_s.values())
        finally:
            self._thread.shutdown()

    def send(self, index: int, pieces: Sequence[Pieces]) -> "Future[None]":
        """Send bucket `index` to the engines. The future is done once the bucket is copied and may be released."""
        on_gpu = next((piece.data.device for piece in pieces if piece.data.is_cuda), None)
        ready = None
        if on_gpu is not None:
            # on the stream that gathered the bucket
            ready = torch.cuda.current_stream(on_gpu).record_event()
        return self._thread.submit(self._send, index, pieces, on_gpu, ready)

    def _send(
        self,
        index: int,
        pieces: Sequence[Pieces],
        on_gpu: torch.device | None,
        ready: torch.cuda.Event | None,
    ) -> None:
        if len(self._in_flight) == NUM_SLOTS:
            self._wait_for_oldest()
        start = time.perf_counter()
        if on_gpu is None:
            self._slots.write(index % NUM_SLOTS, self._layouts[index], pieces)
        else:
            with torch.cuda.stream(self._stream_on(on_gpu)):
                torch.cuda.current_stream(on_gpu).wait_event(ready)
                self._slots.write(index % NUM_SLOTS, self._layouts[index], pieces)
        if self._copy is not None:
            self._copy.keep(
                index, self._slots.memory[index % NUM_SLOTS][: self._layouts[index][-1].end]
            )
        self._timings.copy_s += time.perf_counter() - start
        self._hand_over(index)

    def _hand_over(self, index: int) -> None:
        self._in_flight.append(
            self._engines.post_all(LoadBucket(bucket=index, slot=index % NUM_SLOTS))
        )
        try:
            self._slots.transmit(index % NUM_SLOTS, self._layouts[index][-1].end)
        except WeightSyncError:
            self._wait_for_all()  # raises the error of a failed engine, which names the cause
            raise

    def _stream_on(self, device: torch.device) -> "torch.cuda.Stream":
        """Return this thread's own stream, on the rank's device: a new thread starts with GPU 0 as its device."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def _wait_for_oldest(self) -> None:
        for engine, done in answers(self._in_flight.popleft()):
            assert isinstance(done, Done)
            self._load_s[engine.index] += done.seconds

    def _wait_for_all(self) -> None:
        while self._in_flight:
            self._wait_for_oldest()
