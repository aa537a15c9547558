"""Thread of a rank that copies gathered buckets into slots, which the engines' workers follow."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import connection

import torch

from ..engine.client import EngineClient
from ..engine.group import EngineGroup, Posted, answers
from ..errors import WeightSyncError
from ..transports.base import Slots
from ..transports.host_memory import HostSlots
from ..transports.pieces import Pieces
from ..transports.signals import WorkerStream
from ..wire.messages import Done, UpdateWeights
from .timings import SyncTimings

LOOK_S = 1.0  # between two looks whether an engine has stalled


class BucketSender:
    """One update of the engines: a thread copies buckets into slots, which workers follow.

    The local main process has one for every bucket; if each has a slot of its own, every rank has one for those whose
    turn it is. While it runs, no other thread uses these connections to the engines. `NodeEngines` limits each wait
    for a message or a signal.

    Args:
        engines (`EngineGroup`), slots ([`Slots`]), layouts (`Sequence`):
            Engines of this node on its local main process, else none; the slots that they have opened, and the layout
            of each bucket in its slot.
        timings ([`SyncTimings`]):
            Gets the seconds of the copies.
        update ([`UpdateWeights`]):
            Request to the engines.
        staged (`bool`):
            Whether every bucket has a slot of its own. The engines then get the request after the last one is in its
            slot, so that they generate until then and need no signals in between. Marks show the buckets to agents.

    Attributes:
        done (`list`):
            Each engine and its reply, after `wait_for_commit`.
    """

    def __init__(
        self,
        engines: EngineGroup,
        slots: Slots,
        layouts: Sequence,
        timings: SyncTimings,
        update: UpdateWeights,
        staged: bool,
    ):
        self.done: list[tuple[EngineClient, Done]] = []
        self._engines = engines
        self._slots = slots
        self._layouts = layouts
        self.update = update
        self._staged = staged
        self._marked = slots if staged and isinstance(slots, HostSlots) else None
        self.timings = timings
        self._posted: Posted = []
        self._last: Future[None] | None = None  # copy of the bucket before
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight sync")
        self._stream: torch.cuda.Stream | None = None  # of this thread; `None` changes nothing

    def __enter__(self) -> "BucketSender":
        if not self._staged:
            self._posted = self._engines.post_all(self.update)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._thread.shutdown()
        if kind is not None:
            self._slots.signals.end()
        elif self._staged:
            if self._marked is not None:
                self._marked.publish(self.update.version)
            self._slots.signals.send(len(self._layouts) - 1)
            self._posted = self._engines.post_all(self.update)

    def send(self, index: int, pieces: Sequence[Pieces]) -> "Future[None]":
        """Send bucket `index` to the engines. The future is done once the bucket is copied and may be released."""
        on_gpu = next((piece.data.device for piece in pieces if piece.data.is_cuda), None)
        ready = None
        if on_gpu is not None:
            # on the stream that gathered the bucket
            ready = torch.cuda.current_stream(on_gpu).record_event()
        self._last = self._thread.submit(self._send, self._last, index, pieces, on_gpu, ready)
        return self._last

    def _send(
        self,
        before: "Future[None] | None",
        index: int,
        pieces: Sequence[Pieces],
        on_gpu: torch.device | None,
        ready: torch.cuda.Event | None,
    ) -> None:
        if before is not None:
            # raises the error of an earlier bucket again: the engine that it names answers no more
            before.result()
        slot = index % len(self._slots.memory)
        if not self._staged:
            self._wait_until_taken(index - len(self._slots.memory))
        if self._marked is not None:
            self._marked.mark(slot, 0)
        if on_gpu is not None and self._stream is None:
            # on the rank's device, because a new thread starts with GPU 0 as its device
            self._stream = torch.cuda.Stream(on_gpu)
        with torch.cuda.stream(self._stream):
            if ready is not None:
                torch.cuda.current_stream(on_gpu).wait_event(ready)
            with self.timings.stage("copy_s", pieces[0].data.device):
                self._slots.write(slot, self._layouts[index], pieces)
        if self._marked is not None:
            self._marked.mark(slot, self.update.version.update)
        if self._staged:
            return
        self._slots.signals.send(index)
        try:
            self._slots.transmit(slot, self._layouts[index][-1].end)
        except WeightSyncError:
            self._slots.signals.end()
            answers(self._posted)  # raises the error of a failed engine, which names the cause
            raise

    def _wait_until_taken(self, bucket: int) -> None:
        """Wait until all workers of the engines that are left have taken a bucket."""
        signals = self._slots.signals
        for client, request in self._posted:
            if bucket < self.update.first_bucket or client.lost is not None:
                continue
            # the time until now was that of the other stages
            client.last_work = time.monotonic()
            with client.loss_accepted():
                while signals.taken(client.index) < bucket:
                    self._wait_for_news(client, request)

    def _wait_for_news(self, client: EngineClient, request: int) -> None:
        """Wait for a signal of an engine's workers or a message of the engine, and look whether it has stalled."""
        workers = self._slots.signals.streams(client.index)
        ready = connection.wait([client.fileno(), *map(WorkerStream.fileno, workers)], LOOK_S)
        spoken = [worker for worker in workers if worker.fileno() in ready]
        for worker in spoken:
            worker.read()
        if any(worker.ended for worker in spoken):
            client.wait(request)  # raises the reason
        if spoken:
            client.last_work = time.monotonic()
        elif ready:
            self._hear(client, request)
        client.check_stall()

    @staticmethod
    def _hear(client: EngineClient, request: int) -> None:
        """Read a message of an engine; raise its error if the update has failed."""
        reply = client.receive()
        if reply is None:
            return
        if reply.request_id != request:
            client.keep(reply)
            return
        client.checked(reply)
        raise WeightSyncError(f"{client.name} ended an update before it had taken every bucket.")

    def wait_for_commit(self) -> None:
        """Wait until the engines have committed the update; from now on others may use their connections.

        Raises:
            `WeightVersionError`: if an engine's workers committed another version.
            `EngineError`: if an engine failed.
        """
        try:
            if not self._staged:
                self._wait_until_taken(len(self._layouts) - 1)
            for client, done in answers(self._posted):
                assert isinstance(done, Done)
                client.check_version(done.version, self.update.version)
                self.done.append((client, done))
        except BaseException:
            self._slots.signals.end()
            raise
