"""Restarts of a node's engines that died, by its local main process: in threads, beside the training."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..errors import EngineStartError
from ..run.endings.exit_codes import ENGINE
from ..run.watch.watchdog import Watchdog
from .process import EngineProcess, wait_until_ready

DYING_S = 5.0  # an engine that is given up has so long to end with a reason of its own


class EngineRestarts:
    """Engine processes of a node, each of which is started again a number of times.

    ```python
    restarts = EngineRestarts(processes, start_again, limit, timeout_s, watch, report)  # watches the processes
    ...
    restarts.wait_for(index, start)  # until a later process than number `start` is ready
    ```

    Args:
        processes (`list[EngineProcess]`):
            Processes of the engines, which are ready, by their index; a restart replaces its entry.
        start_again (`Callable[[int], EngineProcess]`):
            Function that starts the engine of an index.
        limit (`int`):
            Number of restarts of each engine; with 0, the end of an engine ends the run.
        timeout_s (`float`):
            Longest start of an engine.
        watch (`Watchdog`):
            Watchdog of this rank, which sees the end of a process.
        report (`Callable[[str], None]`):
            Function that prints a line of progress.
    """

    def __init__(
        self,
        processes: list[EngineProcess],
        start_again: Callable[[int], EngineProcess],
        limit: int,
        timeout_s: float,
        watch: Watchdog,
        report: Callable[[str], None],
    ):
        self._processes = processes
        self._start_again = start_again
        self._limit = limit
        self._timeout_s = timeout_s
        self._watch = watch
        self._report = report
        self._counts = [0] * len(processes)
        self._starting: set[int] = set()  # indices
        self._changed = threading.Condition()
        self._closed = False
        for process in processes:
            watch.add_process(process.pid, partial(self._on_end, process))

    @property
    def count(self) -> int:
        """Number of restarts so far, of all engines."""
        return sum(self._counts)

    def close(self) -> None:
        """Start no engine any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def state(self) -> str:
        """Return which engines start, for a line of progress."""
        return ", ".join(
            f"engine {index} starts again ({self._processes[index].start_log.stage})"
            for index in list(self._starting)
        )

    def is_ready(self, index: int) -> bool:
        """Return whether the process of an engine runs and is not starting."""
        return index not in self._starting and self._processes[index].is_alive()

    def wait_for(self, index: int, start: int) -> None:
        """Wait until a later process than number `start`, which a rank has given up, is ready.

        The wait ends with the run if the engine may not be started again; each start has the limit
        `engine_start_timeout`.
        """
        deadline = time.monotonic() + DYING_S
        with self._changed:
            while not self._closed and (
                self._processes[index].start <= start or index in self._starting
            ):
                if self._processes[index].start <= start and time.monotonic() > deadline:
                    self._processes[index].kill()  # it lives although its connection has ended
                self._changed.wait(0.2)

    def _on_end(self, process: EngineProcess) -> str | None:
        """Start a new process for one that has ended, or return the message that ends the run."""
        index = process.index
        why = process.why_ended()
        with self._changed:
            if self._closed or process is not self._processes[index]:
                return None
            if not self._may_start_again(index, why):
                after = f" after {self._limit} restart(s) (`engine_restarts={self._limit}`)"
                return f"{process.name} ended{after if self._limit else ''}: {why}"
            self._starting.add(index)
        threading.Thread(
            target=self._start, args=(index,), name=f"restart of engine {index}", daemon=True
        ).start()
        return None

    def _may_start_again(self, index: int, why: str) -> bool:
        """Record that a process has ended; count and report the start of another one, if any is left."""
        self._processes[index].record_loss(why)
        left = self._limit - self._counts[index] - 1
        if left < 0:
            return False
        self._counts[index] += 1
        self._report(f"engine {index} ended ({why}); it is started again, {left} restart(s) left")
        return True

    def _start(self, index: int) -> None:
        begin = time.monotonic()
        while True:
            try:
                self._processes[index].kill()
                if self._closed:
                    return
                self._processes[index] = process = self._start_again(index)
                wait_until_ready(
                    [process], self._timeout_s, lambda text: self._report(f"engine {index}: {text}")
                )
                break
            except Exception as error:  # this thread has no caller that would see it
                if self._closed:
                    return
                is_start_error = isinstance(error, EngineStartError)
                if not is_start_error or not self._may_start_again(index, str(error)):
                    self._watch.report(f"{type(error).__name__}: {error}", code=ENGINE)
                    return
        self._report(
            f"engine {index} was started again in {time.monotonic() - begin:.1f} s and waits for its weights"
        )
        self._watch.add_process(process.pid, partial(self._on_end, process))
        with self._changed:
            self._starting.discard(index)
            self._changed.notify_all()


@dataclass(frozen=True, order=True)
class LostEngine:
    """Engine whose process has ended, and which needs the weights of all ranks.

    Args:
        node (`int`), index (`int`), start (`int`):
            Its node, its index there, and the number of the process.
    """

    node: int
    index: int
    start: int

    def __str__(self) -> str:
        """Return the word with which a rank asks all ranks for the weights."""
        return f"{self.node}:{self.index}:{self.start}"


def lost_engines(words: list[str]) -> list[LostEngine]:
    """Return each lost engine among the words of a meeting, with the number of its last process.

    A rank that could not connect to a process before it ended asks with the number of the one before.
    """
    found = sorted(LostEngine(*map(int, word.split(":"))) for word in words)
    return list({(one.node, one.index): one for one in found}.values())
