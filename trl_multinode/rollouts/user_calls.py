"""Calls of a user's functions: a limit for one that does not return, and what the longest one does."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from ..run.endings.exit_codes import USER_CODE
from ..run.topology import Topology
from .reward_call import Call

SUSPENDED_S = 5.0  # between two looks; this process was stopped meanwhile, and so was the function
AnyCall = TypeVar("AnyCall", bound=Call)


class UserCalls:
    """
    Open calls of one rank, as the watch thread sees them.

    Args:
        topology ([`Topology`]):
            Topology of this rank.
        timeout_s (`float`, *optional*):
            Limit for one call of one function; `None` for no limit.
        report (`Callable[..., None]`):
            Function that ends the run, with a line and its exit code as `code`.
    """

    def __init__(self, topology: Topology, timeout_s: float | None, report: Callable[..., None]):
        self.topology = topology
        self.timeout_s = timeout_s
        self._report = report
        self._open: list[Call] = []
        self._looked: float | None = None

    @classmethod
    def of(cls, host: Any, *args: Any) -> Self:
        """Return the calls of a rank's trainer, watched by the watch thread of its [`NodeHost`]."""
        calls = cls(host.topology, host.settings.call_timeout, host.watch.report, *args)
        host.watch.chores.append(calls.check)
        return calls

    @contextmanager
    def open_call(self, call: AnyCall) -> Iterator[AnyCall]:
        """Let the limit hold for a call while the context is open."""
        self._open.append(call)
        try:
            yield call
        finally:
            self._open.remove(call)

    def check(self, store: Any = None) -> None:
        """End the run if a function exceeds its limit. The watch thread calls this twice a second."""
        now = time.monotonic()
        gap = now - (self._looked or now)
        self._looked = now
        for call in list(self._open):
            if gap > SUSPENDED_S:
                call.since += gap
            seconds = now - call.since
            if self.timeout_s is not None and seconds >= self.timeout_s:
                what = (
                    f"{call.name} has not returned after {seconds:.0f} s{call.row()}{call.where()}"
                )
                cure = f"Give what it waits for a limit, or raise `call_timeout` (got {self.timeout_s:g} s)"
                self._report(f"{what}. {cure}", code=USER_CODE)

    def state(self) -> str:
        """Return the call that has run longest, if any. Any thread calls it."""
        calls = sorted(self._open, key=lambda call: call.since)
        if not calls:
            return ""
        oldest = calls[0]
        more = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
        return f"{oldest.name}{oldest.known_row()} runs for {time.monotonic() - oldest.since:.0f} s{more}"
