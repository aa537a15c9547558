"""Order of weight updates and requests in an engine, and the clock of its busy time."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..wire.messages import SyncFailed, WeightVersion
from .backend import Refused


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
                raise Refused(SyncFailed, self.broken)
            if self.version.update == 0:
                raise Refused(SyncFailed, "the engine has dummy weights: no weight update reached it yet")
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
                    SyncFailed, "an update without the frozen weights came before a full update, or after a failed one"
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

    def __init__(self) -> None:
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
