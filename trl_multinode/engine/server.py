"""The engine's end of the protocol: connections, the order of updates and generation, progress.

This module does not import vLLM. The same server runs on the fake backend of `trl_multinode.testing`, so that the fake
engine behaves like the real one.
"""

import asyncio
import os
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from .protocol import (
    Await,
    BeginUpdate,
    CheckSlot,
    CommitUpdate,
    Completions,
    Digest,
    Digests,
    Done,
    Failure,
    Generate,
    Hello,
    LoadBucket,
    Message,
    OpenSlots,
    Progress,
    Ready,
    Request,
    Score,
    Shutdown,
    WeightVersion,
    frame,
    pack_ids,
    read_request,
    unpack_ids,
)


class EngineSpec(msgspec.Struct, frozen=True):
    """Settings of an engine process, which the local main process writes to a JSON file."""

    index: int  # number of the engine on its node
    socket_path: str
    report_folder: str  # vLLM's processes report their pids here
    failure_path: str  # the engine writes the reason of its end here, for the node's ranks
    shared_memory_record: str  # list of the segments that vLLM may leave behind
    owner_pid: int
    engine_args: dict  # keywords of vLLM's EngineArgs
    delay_s: float = 0.0  # test-only: delay of every request


class Generated:
    """One completion, packed as it grows: packing all of it after its last token made ranks wait 5 times as long.

    Args:
        tokens (`Sequence[int]`), logprobs (`Sequence[float]`):
            Ids and log-probs of the sampled tokens, each `(T,)`.
    """

    def __init__(self, tokens: Sequence[int] = (), logprobs: Sequence[float] = ()):
        self.tokens = array("i", tokens)
        self.logprobs = array("f", logprobs)

    def grow(self, tokens: list[int], logprobs: list[float]) -> int:
        """Append the new end of the lists, which hold the whole row; return how many tokens are new."""
        start = len(self.tokens)
        self.tokens.fromlist(tokens[start:])
        self.logprobs.fromlist(logprobs[start : len(tokens)])
        return len(tokens) - start


class Refused(Exception):
    """Refusal of one request by a backend that can serve others.

    Args:
        error (`str`):
            Name of a class in `errors`.
        message (`str`):
            Cause and cure.
    """

    def __init__(self, error: str, message: str):
        super().__init__(message)
        self.error = error


class Backend(ABC):
    """Model behind the server. All methods run on the event loop of the engine process; none may block it.

    The server starts no `generate` or `score` between `begin_update` and `commit_update`, and unless `drains` is
    `False` none is running then.
    """

    drains = True  # an update waits until no request is running; if `False`, the backend freezes running requests

    @abstractmethod
    async def start(self) -> None:
        """Start the engine; on return it can serve."""

    @abstractmethod
    def ready(self) -> Ready: ...

    @abstractmethod
    def tokens_done(self) -> int:
        """Return the completion tokens since the start; the number grows while the engine works."""

    @abstractmethod
    async def generate(self, prompt: list[int], num: int, max_tokens: int, sampling: dict, seed, images):
        """Return `num` completions as `list[Generated]`; raise `Refused` if the request cannot be served."""

    @abstractmethod
    async def score(self, prompt: list[int]):
        """Return `[Generated]` with the log-probs of `prompt[1:]`."""

    @abstractmethod
    async def open_slots(self, request: OpenSlots) -> None:
        """Open the slots; on return every worker has opened them."""

    @abstractmethod
    async def check_slot(self, slot: int, num_bytes: int) -> list[int]:
        """Return each worker's CRC-32 of the slot's first bytes."""

    @abstractmethod
    async def begin_update(self, version: WeightVersion, first_bucket: int) -> None:
        """Prepare for the buckets from `first_bucket` on; weights of earlier buckets stay as they are."""

    @abstractmethod
    async def load_bucket(self, bucket: int, slot: int) -> None:
        """Load a bucket; on return every worker has copied all tensors out of the slot."""

    @abstractmethod
    async def commit_update(self) -> list[WeightVersion]:
        """Put the new weights into service, adapters included; return the version that each worker has committed."""

    @abstractmethod
    async def digests(self) -> list[str]:
        """Return each worker's SHA-256 of its weights, adapters left out."""

    @abstractmethod
    async def stop(self) -> None: ...


class WeightGate:
    """Gate between weight updates and the requests that use the weights; it holds the weights' version.

    Args:
        drains (`bool`, *optional*, defaults to `True`):
            Make an update wait for running requests.
    """

    def __init__(self, drains: bool = True):
        self._drains = drains
        self.version = WeightVersion()
        self.attempted = 0  # number of the last update that ended, committed or failed
        self.broken: str | None = None  # reason why the weights are mixed, if they are
        self._running = 0  # number of requests that use the weights now
        self._updating = False
        self._changed = asyncio.Condition()

    async def acquire(self, min_update: int) -> None:
        """Wait until update `min_update` was attempted and no update is running.

        The wait itself has no limit: the local main process, which sends the update, enforces the deadline.

        Raises:
            `Refused`: if the weights are mixed, or still dummy weights.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self.attempted >= min_update and not self._updating)
            if self.broken:
                raise Refused("WeightSyncError", self.broken)
            if self.version.update == 0:
                raise Refused("WeightSyncError", "the engine has dummy weights: no weight update reached it yet")
            self._running += 1

    async def attempt(self, update: int) -> None:
        """Wait until an update was attempted; the next request reports whether it failed."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.attempted >= update)

    async def release(self) -> None:
        async with self._changed:
            self._running -= 1
            self._changed.notify_all()

    async def begin(self, first_bucket: int) -> None:
        async with self._changed:
            if first_bucket and (self.broken or self.version.update == 0):
                raise Refused(
                    "WeightSyncError", "an update without frozen weights came before a whole one, or a failed one"
                )
            await self._changed.wait_for(lambda: not (self._updating or (self._drains and self._running)))
            self._updating = True
            self.broken = "the last weight update did not finish: the engine holds mixed weights"

    async def end(self, attempted: int, version: WeightVersion | None) -> None:
        async with self._changed:
            if version is not None:
                self.version, self.broken = version, None
            self.attempted, self._updating = attempted, False
            self._changed.notify_all()


class BusyClock:
    """Clock of the time with at least one request running, measured in the engine."""

    def __init__(self):
        self._start = self._since = time.perf_counter()
        self._running = 0
        self._busy_s = 0.0

    @contextmanager
    def request(self) -> Iterator[None]:
        if self._running == 0:
            self._since = time.perf_counter()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self._busy_s += time.perf_counter() - self._since

    def read(self) -> tuple[float, float]:
        """Return busy seconds and all seconds since the start."""
        now = time.perf_counter()
        return self._busy_s + (now - self._since if self._running else 0.0), now - self._start


class EngineServer:
    """Server for the ranks of one node, until one of them sends `Shutdown`."""

    def __init__(self, spec: EngineSpec, backend: Backend):
        self._spec = spec
        self._backend = backend
        self._weights = WeightGate(backend.drains)
        self._update: WeightVersion | None = None
        self._closing = asyncio.Event()
        self._clock = BusyClock()

    async def serve(self) -> None:
        old_mask = os.umask(0o177)  # only this user may use the socket; its folder is private too
        server = await asyncio.start_unix_server(self._connection, self._spec.socket_path)
        os.umask(old_mask)
        await self._closing.wait()
        server.close()  # not `async with`: from Python 3.12 on that waits until the ranks have disconnected
        await self._backend.stop()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one rank: its generation requests concurrently, messages of an update in order."""
        tasks: set[asyncio.Task] = set()
        progress = asyncio.create_task(self._report_progress(writer, tasks))
        try:
            while (request := await read_request(reader)) is not None:
                if isinstance(request, Generate | Score | Await):
                    task = asyncio.create_task(self._answer(request, writer))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                else:
                    await self._answer(request, writer)
        except asyncio.CancelledError:
            pass  # the server is closing; asyncio would log the cancellation as an error
        finally:
            for task in (progress, *tasks):
                task.cancel()
            writer.close()

    async def _report_progress(self, writer: asyncio.StreamWriter, tasks: set) -> None:
        seen = -1
        while True:
            await asyncio.sleep(1.0)
            tokens = self._backend.tokens_done()
            if tasks and tokens != seen:
                seen = tokens
                writer.write(frame(Progress(tokens=tokens)))

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        start = time.perf_counter()
        try:
            reply = await self._serve_one(request, start)
        except Refused as refused:
            reply = Failure(request_id=request.request_id, error=refused.error, message=str(refused))
        except Exception as error:  # vLLM's own errors must reach the ranks before this process ends
            text = f"{type(error).__name__}: {error}".strip()
            kind = "EngineDiedError" if type(error).__name__ == "EngineDeadError" else "EngineError"
            reply = Failure(request_id=request.request_id, error=kind, message=text)
        if isinstance(request, CommitUpdate | LoadBucket | BeginUpdate) and isinstance(reply, Failure):
            # a waiting request may be answered before the sender's, so both carry the reason
            self._weights.broken = f"the engine holds mixed weights, because an update failed: {reply.message}"
            await self._weights.end(self._update.update if self._update else 0, None)
        writer.write(frame(reply))
        await writer.drain()
        if isinstance(request, Shutdown):
            self._closing.set()

    async def _serve_one(self, request: Request, start: float) -> Message:
        match request:
            case Hello():
                ready = self._backend.ready()
                return msgspec.structs.replace(ready, request_id=request.request_id)
            case Generate() | Score():
                return await self._rows(request, start)
            case Await():
                await self._weights.attempt(request.min_update)
            case OpenSlots():
                await self._backend.open_slots(request)
            case CheckSlot():
                if set(found := await self._backend.check_slot(request.slot, request.num_bytes)) != {request.crc}:
                    raise Refused("WeightSyncError", f"a slot arrived with checksums {found}, sent {request.crc}")
            case BeginUpdate():
                self._update = request.version  # set first: a refusal ends this update, and waiting requests report it
                await self._weights.begin(request.first_bucket)
                await self._backend.begin_update(request.version, request.first_bucket)
            case LoadBucket():
                await self._backend.load_bucket(request.bucket, request.slot)
            case CommitUpdate():
                await self._commit()
            case Digest():
                return Digests(request_id=request.request_id, workers=tuple(await self._backend.digests()))
        seconds, (busy_s, clock_s) = time.perf_counter() - start, self._clock.read()
        return Done(
            request_id=request.request_id,
            version=self._weights.version,
            seconds=seconds,
            busy_s=busy_s,
            clock_s=clock_s,
        )

    async def _commit(self) -> None:
        assert self._update is not None
        committed = await self._backend.commit_update()
        if len(set(committed)) != 1:
            raise RuntimeError(f"vLLM's workers committed different weight versions: {committed}")
        await self._weights.end(self._update.update, committed[0])

    async def _rows(self, request: Generate | Score, start: float) -> Completions:
        await self._weights.acquire(request.min_update if isinstance(request, Generate) else 0)
        try:
            version = self._weights.version
            with self._clock.request():
                rows = await self._made(request)
        finally:
            await self._weights.release()
        return Completions(
            request_id=request.request_id,
            lengths=pack_ids([len(row.tokens) for row in rows]),
            tokens=b"".join(row.tokens for row in rows),
            logprobs=b"".join(row.logprobs for row in rows),
            version=version,
            seconds=time.perf_counter() - start,
        )

    async def _made(self, request: Generate | Score) -> list[Generated]:
        prompt = unpack_ids(request.prompt).tolist()
        if isinstance(request, Score):
            return await self._backend.score(prompt)
        await asyncio.sleep(self._spec.delay_s)
        return await self._backend.generate(
            prompt, request.num_completions, request.max_tokens, request.sampling, request.seed, request.images
        )
