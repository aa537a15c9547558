"""Processes whose end the watch thread notices at once, beside its own wake-ups and signals."""

import os
import select
import threading
from collections.abc import Callable

from ...wire.process_end import open_end
from .signals import StopSignals


class Pidfds:
    """Watched processes of the watch thread.

    Args:
        signals ([`StopSignals`]):
            Pipe that ends a wait, too.
    """

    def __init__(self, signals: StopSignals):
        self._signals = signals
        # pidfd, or the end of a pipe -> function, owner
        self._ended: dict[int, tuple[Callable[[], object], object]] = {}
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(signals.read_end, select.POLLIN)

    def add(self, pid: int, ended: Callable[[], object], owner: object) -> None:
        """Make the watch thread call `ended` when process `pid` ends.

        Any thread may call this. It calls `ended` itself if the process has ended before.
        """
        try:
            pidfd = open_end(pid)
        except ProcessLookupError:
            ended()
            return
        with self._lock:
            self._ended[pidfd] = ended, owner
            self._poll.register(pidfd, select.POLLIN)
        self._signals.wake()

    def forget(self, owner: object = None) -> None:
        """Stop watching the processes of an owner; all processes without one."""
        with self._lock:
            for pidfd, (_, its) in list(self._ended.items()):
                if owner is None or its is owner:
                    self._drop(pidfd)

    def wait(self, seconds: float) -> tuple[list[Callable[[], object]], bool]:
        """Wait; return the functions of the processes that have ended, and whether the pipe of `signals` has data."""
        fired = [fd for fd, _ in self._poll.poll(seconds * 1000)]
        with self._lock:
            found = [(fd, self._ended[fd][0]) for fd in fired if fd in self._ended]
            for fd, _ in found:
                self._drop(fd)
        return [ended for _, ended in found], self._signals.read_end in fired

    def _drop(self, pidfd: int) -> None:
        del self._ended[pidfd]
        self._poll.unregister(pidfd)
        os.close(pidfd)
