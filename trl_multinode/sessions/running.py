"""Sessions of one rank: each runs an agent in a thread, beside a connection to the engine that serves it.

```python
sessions = Sessions(harness, host, engines, sampling)
found = sessions.run(rows, seeds, places)   # waits for all of them; the calling thread is that of a group
...
sessions.close()                            # cancels those that run
```

The connection owns the session: if this rank ends, the engine cancels its calls; if the engine ends, the session
begins again on another one, or on the same one after its restart.
"""

import asyncio
import copy
import math
import secrets
import select
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ..engine.client import LOSSES, EngineClient
from ..engine.node_engines import NodeEngines
from ..errors import EngineError, RolloutError
from ..run.endings.error_text import described
from ..run.reporter import warn
from ..wire.marked import kill_processes_of
from ..wire.messages import Await, Calls, CloseSession, Done, Endpoint, OpenSession, unpack_ids
from .chaining import SessionCall
from .harness import Harness, Outcome, Session

LOOK_S = 0.5  # between two looks at a session, and between two attempts to reach an engine
PING_S = 5.0  # between two questions to its engine
CANCELLED_S = 5.0  # a harness that was cancelled may still return something


@dataclass
class Finished:
    """A session that has ended.

    Args:
        calls (`list[SessionCall]`):
            Calls that the agent got an answer for, in the order of their ends; none if the session failed.
        value (`float` or `str`, *optional*):
            Value that the harness returned.
        counts (`Counter`):
            Numbers for the log, by name.
        fault (`str`, *optional*):
            Why the session is left out, if the harness did not say so itself.
    """

    calls: list[SessionCall] = field(default_factory=list)
    value: Outcome = None
    counts: Counter[str] = field(default_factory=Counter)
    fault: str = ""


class HarnessThread(threading.Thread):
    """Thread in which a harness runs, with an event loop of its own: one that blocks holds up no other session."""

    def __init__(self, harness: Harness, session: Session):
        super().__init__(name="harness", daemon=True)
        self.value: Outcome = None
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self._harness, self._session = harness, session
        self._was_cancelled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task | None = None

    def run(self) -> None:
        try:
            asyncio.run(self._main())
        # `SystemExit` of a library would end the thread in silence
        except BaseException as error:
            if not self.ended.is_set():
                self.error = error
        finally:
            self.ended.set()

    async def _main(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._loop.set_default_executor(DaemonThreads())
        if self._was_cancelled:
            raise asyncio.CancelledError
        self.value = await self._harness.run(self._session)
        # `asyncio.run` then waits for tasks that the harness has left
        self.ended.set()

    def cancel(self) -> None:
        """Raise `asyncio.CancelledError` in the harness, and wait a while for its end. Only the first call does."""
        if self._was_cancelled or self.ended.is_set():
            return
        self._was_cancelled = True
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # it has just ended
                self._loop.call_soon_threadsafe(self._task.cancel)
        self.ended.wait(CANCELLED_S)


class DaemonThreads(ThreadPoolExecutor):
    """Executor of a harness's `asyncio.to_thread`, whose calls hold up neither their session nor the process's end."""

    def submit(self, fn: Callable, /, *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()

        def call() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        future.set_running_or_notify_cancel()
        threading.Thread(target=call, name="harness call", daemon=True).start()
        return future


class Sessions:
    """Sessions of one rank.

    Args:
        harness ([`Harness`]):
            Agent and limits.
        host ([`NodeHost`]), generation ([`NodeGeneration`]):
            Host of the rank, and its generation: the sampling settings and the weights of the moment.
        template_kwargs (`dict`):
            Keywords of the chat template.
        returns_text (`bool`):
            `True` if the harness returns texts for reward functions, `False` if it returns rewards.

    Attributes:
        on_stopped (`Callable[[], None]`):
            Called in any thread when a session waits for an engine.
    """

    def __init__(
        self,
        harness: Harness,
        host: Any,
        generation: Any,
        template_kwargs: dict[str, Any],
        returns_text: bool,
    ):
        self.on_stopped: Callable[[], None] = lambda: None
        self._harness = harness
        self._topology = host.topology
        self._raises = host.settings.tool_errors == "raise"
        self._generation = generation
        self._engines: NodeEngines = generation.engines
        self._serving = harness.serving(template_kwargs)
        self._returns_text = returns_text
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._open: dict[int, float] = {}  # start of each session that runs, by its thread
        self._waiting: set[int] = set()  # threads of those that wait for an engine
        self._ended_well = False
        self._reported: set[str] = set()

    @property
    def stopped(self) -> bool:
        """Return whether a session waits for an engine, which needs the weights of all ranks. Any thread reads it."""
        return bool(self._waiting)

    def state(self) -> str:
        """Return how many sessions run, for the lines of progress. Any thread calls it."""
        begun = list(self._open.values())
        if not begun:
            return ""
        longest = time.monotonic() - min(begun)
        return (
            f"{len(begun)} sessions of `{self._harness.name}` run, the longest for {longest:.0f} s"
        )

    def run(
        self,
        rows: Sequence[dict[str, Any]],
        seeds: Sequence[int] | None,
        look: Callable[[bool], None],
    ) -> list[Finished]:
        """
        Run a session for each row, all at the same time, and return them in the rows' order.

        Args:
            rows (`Sequence[dict]`):
                Rows of the dataset.
            seeds (`Sequence[int]`, *optional*):
                Seed of each session.
            look (`Callable[[bool], None]`):
                Function that is called twice a second, with whether a session waits for an engine; what it raises
                ends all sessions.

        Raises:
            `RolloutError`: if the harness returned something else than it must, or failed with `tool_errors="raise"`,
                or if all sessions have failed and none has ended well so far.
        """
        found: list[Finished | BaseException | None] = [None] * len(rows)
        cancelled = threading.Event()

        def run_one(index: int) -> None:
            seed = None if seeds is None else seeds[index]
            try:
                found[index] = self._session(rows[index], seed, cancelled)
            except BaseException as error:  # the calling thread raises it
                found[index] = error

        threads = [
            threading.Thread(target=run_one, args=(index,), name=f"session-{index}", daemon=True)
            for index in range(len(rows))
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(LOOK_S)
                    look(self.stopped)
                    _raise_first(found)
            _raise_first(found)
        finally:
            cancelled.set()
        finished = [one for one in found if isinstance(one, Finished)]
        faults = [one.fault for one in finished if one.fault]
        if len(faults) == len(rows) > 1 and not self._ended_well:
            raise RolloutError(
                f"{self._topology}: all {len(rows)} sessions failed, and none has ended well so far. The last one: "
                f"{faults[-1]}."
            )
        return finished

    def _session(
        self, row: dict[str, Any], seed: int | None, cancelled: threading.Event
    ) -> Finished:
        """Run a session until an engine has served all of it. Its own thread calls it."""
        thread, counts = threading.get_ident(), Counter[str]()
        lost: set[int] = set()  # pids of engines
        self._open[thread] = time.monotonic()
        try:
            while True:
                message = self._message()
                with self._engine(message.min_update, cancelled) as client:
                    try:
                        found = self._attempt(client, row, message, seed, cancelled)
                        found.counts += counts
                        return found
                    except LOSSES as error:
                        # an engine that lives, and ends the connection again, would do so for ever
                        if client.ready.pid in lost:
                            raise
                        lost.add(client.ready.pid)
                        client.lose(error)
                counts["again"] += 1
        finally:
            del self._open[thread]

    @contextmanager
    def _engine(self, min_update: int, cancelled: threading.Event) -> Iterator[EngineClient]:
        """Connect to an engine of this node that has the weights, that with the fewest sessions if there are several.

        If there is none, the session waits, and the main thread looks whether an engine was lost.
        """
        thread, client = threading.get_ident(), None
        without: set[int] = set()  # engines that have not the weights yet
        try:
            while True:
                self._check(cancelled)
                try:
                    client = self._engines.reserve(without)
                    client.post(Await(min_update=min_update))
                    # not `select`, which takes no descriptor above 1023
                    answer = select.poll()
                    answer.register(client, select.POLLIN)
                    answered = answer.poll(1000 * LOOK_S)
                    # `None` is a sign of progress, which an engine that waits for the weights may send too
                    if answered and client.receive() is not None:
                        break
                    without.add(client.index)
                except EngineError:  # none of the others answers
                    without.update(range(len(self._engines.own)))
                    time.sleep(LOOK_S)
                if client is not None:
                    self._engines.release(client)
                    client = None
                if len(without) == len(self._engines.own):
                    self._waiting.add(thread)
                    self.on_stopped()
                    without.clear()
            self._waiting.discard(thread)
            yield client
        finally:
            self._waiting.discard(thread)
            if client is not None:
                self._engines.release(client)

    def _message(self) -> OpenSession:
        """Return the request that opens a session now, without its key and seed."""
        generation = self._generation
        return OpenSession(
            key="",
            max_calls=self._harness.max_calls,
            max_tokens=generation.max_completion_length,
            sampling=generation.sampling,
            min_update=generation.version.update,
            serving=self._serving,
        )

    def _check(self, cancelled: threading.Event) -> None:
        """Raise if nobody waits for the sessions any more."""
        if cancelled.is_set() or self._closed.is_set():
            raise RolloutError(f"{self._topology}: its sessions have been cancelled")

    def _attempt(
        self,
        client: EngineClient,
        row: dict[str, Any],
        message: OpenSession,
        seed: int | None,
        cancelled: threading.Event,
    ) -> Finished:
        key = secrets.token_urlsafe(32)
        endpoint = client.ask(replace(message, key=key, seed=seed))
        assert isinstance(endpoint, Endpoint), endpoint
        if endpoint.forks_because:
            self._say(f"messages of earlier turns are tokenized anew: {endpoint.forks_because}")
        folder = Path(tempfile.mkdtemp(prefix="session_", dir=self._engines.folder))
        session = Session(
            copy.deepcopy(row),
            f"http://127.0.0.1:{endpoint.port}/v1",
            key,
            endpoint.model,
            folder,
            self._harness.session_timeout,
            self._harness.max_calls,
        )
        thread = HarnessThread(self._harness, session)
        try:
            thread.start()
            in_time = self._watch(thread, client, cancelled)
            calls = client.ask(CloseSession(key=key))
        finally:
            thread.cancel()
            kill_processes_of(key)
            shutil.rmtree(folder, ignore_errors=True)
        assert isinstance(calls, Calls), calls
        return self._finished(thread, in_time, calls, client)

    def _watch(
        self, thread: HarnessThread, client: EngineClient, cancelled: threading.Event
    ) -> bool:
        """Wait for the end of a harness, and return whether it was in time.

        Raises:
            `EngineError`: if its engine has ended, or has work and makes no token.
        """
        begun = asked = time.monotonic()
        progress = Progress(client, begun)
        while not thread.ended.wait(LOOK_S):
            self._check(cancelled)
            now = time.monotonic()
            if now - begun > self._harness.session_timeout:
                thread.cancel()
                return False
            if now - asked > PING_S or client.has_ended:
                asked = now
                progress.check(now)
        return True

    def _finished(
        self, thread: HarnessThread, in_time: bool, calls: Calls, client: EngineClient
    ) -> Finished:
        counts = Counter(
            calls=len(calls.calls),
            refused=calls.num_refused,
            cancelled=calls.num_cancelled,
            replaced=sum(call.replaced for call in calls.calls),
            timed_out=not in_time,
        )
        if calls.overridden:
            names = ", ".join(calls.overridden)
            self._say(f"the trainer's values replace those of `{self._harness.name}` for {names}")
        fault = self._fault(thread, in_time)
        value = None if fault else self._checked(thread.value)
        if value is None:
            counts["failed"] = 1
            return Finished(counts=counts, fault=fault)
        self._ended_well = True
        made = [
            SessionCall(unpack_ids(call.prompt).tolist(), client.row(call.completion))
            for call in calls.calls
        ]
        return Finished(made, value, counts)

    def _fault(self, thread: HarnessThread, in_time: bool) -> str:
        """Return why a session is left out, or an empty text.

        Raises:
            `RolloutError`: if the harness raised an exception, with `tool_errors="raise"`.
        """
        name = self._harness.name
        if not thread.ended.is_set():
            what = f"did not end within {CANCELLED_S:g} s of its cancellation: it blocks its event loop, or catches it"
        elif thread.error is None:
            return ""
        elif in_time:
            what = f"failed with {described(thread.error)}"
        else:
            what = f"has not returned after {self._harness.session_timeout:g} s (`session_timeout`)"
        if self._raises and in_time:
            raise RolloutError(
                f"{self._topology}: the harness `{name}` {what}. Mend it, or let it return a reward for the fault "
                '(`tool_errors="answer"` leaves such sessions out).'
            ) from thread.error
        self._say(
            f"the harness `{name}` {what}. Such sessions are left out of training; `harness/failed` counts them",
            kind=type(thread.error).__name__,
        )
        return f"the harness `{name}` {what}"

    def _checked(self, value: Any) -> Outcome:
        if value is None or (self._returns_text and isinstance(value, str)):
            return value
        if isinstance(value, Real) and not isinstance(value, bool):
            with suppress(OverflowError):
                number = float(value)
                if math.isnan(number):
                    return None
                if math.isfinite(number) and not self._returns_text:
                    return number
        expected = (
            "a text, which the reward functions get"
            if self._returns_text
            else "a finite number, its reward"
        )
        raise RolloutError(
            f"{self._topology}: the harness `{self._harness.name}` returned {value!r} "
            f"({type(value).__name__}). It must return {expected}, or None. With `reward_funcs` it returns texts, "
            "without them rewards."
        )

    def _say(self, text: str, kind: str = "") -> None:
        """Warn once of something, or of the first of a kind."""
        with self._lock:
            is_new = (kind or text) not in self._reported
            self._reported.add(kind or text)
        if is_new:
            warn(f"{self._topology}: {text}")

    def close(self) -> None:
        """Cancel the sessions that run, and wait a while for the ends of their processes."""
        self._closed.set()
        end = time.monotonic() + 2 * CANCELLED_S
        while self._open and time.monotonic() < end:
            time.sleep(0.05)


def _raise_first(found: Sequence[Finished | BaseException | None]) -> None:
    for one in found:
        if isinstance(one, BaseException):
            raise one


class Progress:
    """Check that an engine with open calls makes tokens, by questions from time to time.

    Args:
        client ([`EngineClient`]):
            Connection of the session.
        now (`float`):
            Present time of `time.monotonic`.
    """

    def __init__(self, client: EngineClient, now: float):
        self._client = client
        self._tokens = -1
        self._since = now  # the engine has made a token, or had no open call

    def check(self, now: float) -> None:
        """Ask the engine.

        Raises:
            `EngineStalledError`: if it has open calls, and has made no token for `engine_stall_timeout` seconds.
        """
        done = self._client.ask(Await(min_update=0))
        assert isinstance(done, Done), done
        if done.num_open == 0 or done.tokens != self._tokens:
            self._tokens, self._since = done.tokens, now
        self._client.check_progress(self._since, done.num_open)
