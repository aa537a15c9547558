"""The engine's end of the protocol: connections, the order of updates and generation, progress.

This module does not import vLLM. The same server runs on the fake backend of `multinode_kit`, so that the fake
engine behaves like the real one.
"""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

from msgspec.structs import replace

from ..wire.connection import frame, read_hello, read_request
from ..wire.messages import (
    Await,
    CheckSlot,
    CloseSession,
    Completions,
    Done,
    Drain,
    EngineSpec,
    ErrorName,
    Failure,
    Generate,
    Hello,
    Message,
    OpenSession,
    OpenSlots,
    Peek,
    Progress,
    Request,
    Score,
    Shutdown,
    UpdateWeights,
)
from .agent_calls import AgentEndpoint
from .backend import Backend, CompletionBuffer, Growing, Refused
from .gate import BusyClock, WeightGate
from .sessions import AgentSessions
from .states import EngineStates

HELLO_S = 30.0  # for the first request of a connection
CAUSE_S = 0.1  # an error of vLLM waits so long for the end of the process that may have caused it


class EngineServer:
    """Server for the ranks of one node, until one of them sends `Shutdown`.

    Attributes:
        leaving (`threading.Event`):
            Set by another thread before it ends this process with a reason of its own.
        sessions ([`AgentSessions`]):
            Sessions of agents.
    """

    def __init__(self, spec: EngineSpec, backend: Backend):
        self.leaving = threading.Event()
        self._spec = spec
        self._backend = backend
        self._weights = WeightGate()
        # the update that runs, and the connection of its sender
        self._update: tuple[asyncio.StreamWriter, UpdateWeights] | None = None
        self._generating: set[asyncio.Task] = set()  # those that use the weights
        self._aborted: set[asyncio.Task] = set()  # those of a failed update in flight
        self._closing = asyncio.Event()
        self._drains = False  # it takes no new rows
        self._num_open = (
            0  # `Generate` requests and calls of agents, those that wait for weights too
        )
        self._clock = BusyClock()
        self._states = EngineStates.of(spec)
        self._clock.on_change = self._states.count
        self._kv_use = 0.0  # greatest between the last two updates
        self.sessions = AgentSessions(
            self._rows_unless_it_drains,
            lambda: backend.ready().max_model_len,
            self._stop_if_leaving,
        )
        self._endpoint = AgentEndpoint(self.sessions, backend)

    @property
    def closing(self) -> bool:
        """Return whether a rank has sent `Shutdown`, so that the end of vLLM's processes is no failure."""
        return self._closing.is_set()

    async def serve(self) -> None:
        old_mask = os.umask(0o177)  # only this user may use the socket; its folder is private too
        server = await asyncio.start_unix_server(self._connection, self._spec.socket_path)
        os.umask(old_mask)
        self._clock.slots = self._backend.ready().slots
        self._states.enter("idle")
        await self._closing.wait()
        await self._endpoint.stop()
        server.close()  # not `async with`: from Python 3.12 on that waits until the ranks have disconnected
        await self._backend.stop()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one rank: its generation requests and an update concurrently, other messages in order."""
        growing: dict[int, Growing] = {}  # requests under way, by id
        progress = asyncio.create_task(self._report_progress(writer, growing))
        try:
            async for request in self._requests(reader):
                if isinstance(request, UpdateWeights):
                    self._update = writer, request
                if isinstance(request, Generate | Score | Await | UpdateWeights):
                    number = request.request_id
                    growing[number] = found = Growing()
                    found.task = asyncio.create_task(self._answer(request, writer, found))
                    # `pop` gets the task as its default
                    found.task.add_done_callback(partial(growing.pop, number))
                elif isinstance(request, Peek):
                    writer.write(frame(await completions_so_far(request, growing)))
                else:
                    await self._answer(request, writer)
        except asyncio.CancelledError:
            pass  # the server is closing; asyncio would log the cancellation as an error
        finally:
            for task in (progress, *[found.task for found in growing.values()]):
                task.cancel()
            await self.sessions.close_all(writer)
            writer.close()
            if self._update is not None and self._update[0] is writer and not self.closing:
                reason = "the connection of its sender ended"
                await self._fail_update(self._update[1], reason, "PeerFailureError")

    async def _requests(self, reader: asyncio.StreamReader) -> AsyncIterator[Request]:
        """Yield the requests of a connection until it ends; bytes that are no request end it, with a line of log."""
        try:
            request: Request | None = await read_hello(reader, HELLO_S)
            while request is not None:
                yield request
                request = await read_request(reader)
        except Exception as error:  # whatever a decoder makes of bytes that no rank sent
            what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            print(
                f"engine {self._spec.index}: closed a connection without valid requests: {what}",
                flush=True,
            )

    async def _report_progress(
        self, writer: asyncio.StreamWriter, growing: Mapping[int, Growing]
    ) -> None:
        seen = -1
        while True:
            await asyncio.sleep(1.0)
            tokens = self._backend.tokens_done()
            if growing and tokens != seen:
                seen = tokens
                writer.write(frame(Progress()))

    async def _answer(
        self, request: Request, writer: asyncio.StreamWriter, growing: Growing | None = None
    ) -> None:
        try:
            reply = await self._serve_one(request, writer, growing or Growing())
        except Refused as refused:
            reply = Failure(message=str(refused), error=refused.error)
        # vLLM's own errors must reach the ranks before this process ends
        except Exception as error:
            await self._stop_if_leaving()
            name = type(error).__name__
            reply = Failure(
                message=f"{name}: {error}".strip(),
                # vLLM's class
                error="EngineDiedError" if name == "EngineDeadError" else "EngineError",
            )
        if isinstance(request, UpdateWeights) and isinstance(reply, Failure):
            # a waiting request may be answered before the sender's, so both carry the reason
            await self._fail_update(request, reply.message)
        with suppress(ConnectionError):  # the rank has left
            writer.write(frame(replace(reply, request_id=request.request_id)))
            await writer.drain()
        if isinstance(request, Shutdown):
            self._closing.set()

    async def _fail_update(
        self, update: UpdateWeights, reason: str, error: ErrorName = "WeightSyncError"
    ) -> None:
        """End the running update as failed: requests that wait for it are refused, also if its sender is gone."""
        self._update = None
        mixed = f"the engine holds mixed weights, because an update failed: {reason}"
        self._weights.broken = error, mixed
        # completions that an update in flight has frozen; their ranks get the reason
        self._aborted |= self._generating
        for task in self._generating:
            task.cancel()
        await self._weights.idle()
        self._clock.freeze(False)
        self._states.end_update()
        await self._weights.end(update.version.update, None)

    async def _stop_if_leaving(self) -> None:
        """Return after `CAUSE_S`, or never if this process is ending: the owner then reads why, and not vLLM's error,
        which only follows from it."""
        await asyncio.sleep(CAUSE_S)
        if self.leaving.is_set():
            await asyncio.Event().wait()

    async def _serve_one(
        self, request: Request, writer: asyncio.StreamWriter, growing: Growing
    ) -> Message:
        match request:
            case Hello():
                return replace(self._backend.ready(), start=self._spec.start)
            case Generate():
                return await self._rows_unless_it_drains(request, growing)
            case Score():
                return await self._rows(request, growing)
            case OpenSession():
                return await self._endpoint.open(request, writer)
            case CloseSession():
                return await self.sessions.close(request)
            case Drain():
                self._drains = True
            case Await():
                await self._weights.attempt(request.min_update)
            case OpenSlots():
                await self._backend.open_slots(request)
            case CheckSlot():
                await self._check_slot(request)
            case UpdateWeights():
                await self._apply(request)
        return Done(
            version=self._weights.version,
            times=self._clock.read(),
            kv_use=self._kv_use,
            num_open=self._num_open,
            tokens=self._backend.tokens_done(),
        )

    async def _check_slot(self, request: CheckSlot) -> None:
        found = await self._backend.check_slot(request.slot, request.num_bytes)
        if set(found) != {request.crc}:
            raise Refused(
                "WeightSyncError",
                f"the workers read checksums {found} from a slot, expected {request.crc}",
            )

    async def _apply(self, update: UpdateWeights) -> None:
        await self._weights.begin(update.first_bucket, update.in_flight)
        self._states.begin_update(update.version.update)
        self._clock.freeze(update.in_flight)
        await self._backend.begin_update(update)
        await self._backend.load_buckets(update)
        start = time.perf_counter()
        committed = await self._backend.commit_update()
        if len(set(committed)) != 1:
            raise RuntimeError(f"vLLM's workers committed different weight versions: {committed}")
        # otherwise the sender refuses the version in `Done`
        if update.in_flight and committed[0] != update.version:
            raise Refused(
                "WeightVersionError",
                f"its workers committed the weights of {committed[0]}, expected {update.version}",
            )
        self._kv_use = await self._backend.take_kv_use()
        await self._backend.resume(committed[0])
        self._clock.freeze(False)
        self._clock.add_update(self._backend.load_s, time.perf_counter() - start)
        self._states.end_update()
        self._update = None
        await self._weights.end(update.version.update, committed[0])

    async def _rows_unless_it_drains(self, request: Generate, growing: Growing) -> Completions:
        if self._drains:
            raise Refused("EngineLeavingError", "the engine leaves the run and takes no new rows")
        self._num_open += 1
        try:
            return await self._rows(request, growing)
        finally:
            self._num_open -= 1

    async def _rows(self, request: Generate | Score, growing: Growing) -> Completions:
        scores = isinstance(request, Score)
        task = asyncio.current_task()
        assert task is not None
        await self._weights.acquire(request.min_update, scores)
        try:
            self._generating.add(task)
            first = growing.first = self._weights.version
            rows = await self._made(request, growing)
        except asyncio.CancelledError:
            if task not in self._aborted:  # the rank has left, or this process ends
                raise
            self._aborted.discard(task)
            assert self._weights.broken is not None
            raise Refused(*self._weights.broken) from None
        finally:
            self._generating.discard(task)
            await self._weights.release(scores)
        return Completions(rows=tuple(row.packed(first) for row in rows))

    async def _made(
        self, request: Generate | Score, growing: Growing
    ) -> Sequence[CompletionBuffer]:
        if isinstance(request, Score):
            with self._clock.request():
                return [await self._backend.score(request)]
        with self._clock.request(request.num_completions) as growing.end_row:
            await self._backend.generate(request, growing)
        return growing.rows


async def completions_so_far(request: Peek, growing: Mapping[int, Growing]) -> Completions:
    """Return the tokens that the requests of one completion have made so far, by their ids.

    The replies of completions that have just ended go first: a rank that took one for a beginning would continue it
    after its last token.
    """
    while True:
        rows = {
            number: found.rows[0].copy()
            for number, found in growing.items()
            if len(found.rows) == 1
        }
        ended = [growing[number].task for number in rows if growing[number].rows[0].complete]
        if not ended:
            break
        await asyncio.wait(ended)
    made = [row.packed(growing[number].first, number) for number, row in rows.items() if row.tokens]
    return Completions(request_id=request.request_id, rows=tuple(made))
