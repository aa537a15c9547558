"""Order of weight updates and requests in an engine, and the clock of its busy time."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec.structs import replace

from ..wire.messages import EngineTimes, ErrorName, WeightVersion
from .backend import Refused

TAIL = 0.1  # fewer rows than this share of a round's are the tail of its generation


class WeightGate:
    """Gate between weight updates and the requests that use the weights; it holds the weights' version."""

    def __init__(self) -> None:
        self.version = WeightVersion()
        self.attempted = 0  # number of the last update that ended, committed or failed
        # if the weights are mixed: error of the requests that are refused for it, and reason
        self.broken: tuple[ErrorName, str] | None = None
        self._users = Counter[bool]()  # requests that use the weights now, by whether they score
        self._updating = False
        self._begins = (
            False  # an update waits until no request is running, and new ones wait for it
        )
        self._changed = asyncio.Condition()

    async def acquire(self, min_update: int, scores: bool = False) -> None:
        """Wait until update `min_update` was attempted and no update is running.

        The wait itself has no limit: the local main process, which sends the update, enforces the deadline.

        Raises:
            `Refused`: if the weights are mixed, or still dummy weights.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: self.attempted >= min_update and not (self._updating or self._begins)
            )
            if self.broken:
                raise Refused(*self.broken)
            if self.version.update == 0:
                raise Refused(
                    "WeightSyncError",
                    "the engine has dummy weights: no weight update reached it yet",
                )
            self._users[scores] += 1

    async def attempt(self, update: int) -> None:
        """Wait until an update was attempted; the next request reports whether it failed."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.attempted >= update)

    async def release(self, scores: bool = False) -> None:
        async with self._changed:
            self._users[scores] -= 1
            self._changed.notify_all()

    async def idle(self) -> None:
        """Wait until no request uses the weights."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._users.total())

    async def begin(self, first_bucket: int, in_flight: bool = False) -> None:
        """Wait until no request is running, then begin an update. An update in flight waits for scores only, because
        the log-probs of one score must have the same weights."""
        async with self._changed:
            if first_bucket and (self.broken or self.version.update == 0):
                raise Refused(
                    "WeightSyncError",
                    "an update without the frozen weights came before a full update, or after a failed one",
                )
            self._begins = not in_flight
            try:
                await self._changed.wait_for(
                    lambda: (
                        not (
                            self._updating
                            or self._users[True]
                            or (self._users[False] and not in_flight)
                        )
                    )
                )
                self._updating = True
            finally:
                self._begins = False
                self._changed.notify_all()
            self.broken = (
                "WeightSyncError",
                "the last weight update did not finish: the engine holds mixed weights",
            )

    async def end(self, attempted: int, version: WeightVersion | None) -> None:
        async with self._changed:
            if version is not None:
                self.version = version
                self.broken = None
            self.attempted = attempted
            self._updating = False
            self._changed.notify_all()


class BusyClock:
    """Clock of the time with at least one request running, measured in the engine.

    Attributes:
        slots (`int`):
            Completions that the engine can generate at once.
    """

    def __init__(self) -> None:
        self.slots = 1
        self._since = time.perf_counter()
        self._requests = self._rows = 0
        self._most_rows = 0  # since a request arrived at the idle engine
        self._frozen = False
        self._times = EngineTimes()
        # gets both numbers
        self.on_change: Callable[[int, int], None] = lambda requests, rows: None

    @contextmanager
    def request(self, rows: int = 1) -> Iterator[Callable[[], None]]:
        """Count a request of `rows` completions, and yield the function to call when one of them is complete."""
        running = rows

        def end_row() -> None:
            nonlocal running
            if running:  # a cancelled request has left already
                running -= 1
                self._add(0, -1)

        self._add(1, rows)
        try:
            yield end_row
        finally:
            left = running
            running = 0
            self._add(-1, -left)

    def freeze(self, frozen: bool) -> None:
        """Stop the time of running requests, or let it go on."""
        self.read()
        self._frozen = frozen

    def add_update(self, load_s: float, commit_s: float) -> None:
        """Add the seconds of a weight update."""
        times = self._times
        self._times = replace(
            times, load_s=times.load_s + load_s, commit_s=times.commit_s + commit_s
        )

    def _add(self, requests: int, rows: int) -> None:
        self.read()
        self._requests += requests
        self._rows += rows
        self._most_rows = max(self._most_rows, self._rows) if self._requests else 0
        self.on_change(self._requests, self._rows)

    def read(self) -> EngineTimes:
        """Return the seconds up to now."""
        now = time.perf_counter()
        times = self._times
        passed = now - self._since
        self._since = now
        running = passed if self._requests else 0.0
        used = 0.0 if self._frozen else running
        at_once = min(self._rows, self.slots)
        self._times = replace(
            times,
            clock_s=times.clock_s + passed,
            busy_s=times.busy_s + used,
            slot_s=times.slot_s + used * at_once / self.slots,
            tail_s=times.tail_s
            + (used if at_once < TAIL * min(self._most_rows, self.slots) else 0.0),
            frozen_s=times.frozen_s + (running if self._frozen else 0.0),
        )
        return self._times
