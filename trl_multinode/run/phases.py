"""Time per phase: `with phases("sync"):` makes one JSON line and adds to the sums for the log.

Phases nest; each counts only its own time, so the sums add up to the wall time of the outermost phase.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from .phase_file import PhaseFile

# the phases of a step, in the order of the log
PHASES = (
    "sync",
    "generate",
    "reward",
    "train",
    "wait",
)


class Phases:
    """Phase timer of one rank.

    Args:
        file ([`PhaseFile`], *optional*):
            File that gets a line per phase.
    """

    def __init__(self, file: PhaseFile | None = None):
        self.file = file
        self._stack: list[list] = []  # per open phase: name, seconds spent in nested phases
        self._failed: str | None = None  # the phase that raised the current exception
        self._sums: dict[str, float] = defaultdict(float)
        self._evaluates = False
        self._is_last = True  # whether the lines are complete when the outermost phase ends
        self.step = 0  # optimizer steps done at the begin of the current one
        self.trains = False  # whether a step has begun
        self.changes = 0  # entries and exits so far
        self.since = time.monotonic()  # of the last one

    @property
    def current(self) -> str:
        """Name of the innermost phase, or of the one that raised the current exception. The watch thread reads it."""
        return self._failed or self.open or ("between steps" if self.trains else "set-up")

    @property
    def open(self) -> str | None:
        """Name of the innermost phase, or `None` outside of phases. Other threads read it."""
        try:
            return self._stack[-1][0]
        except IndexError:
            return None

    def begin_step(self, step: int, is_last: bool = True) -> None:
        """Note that the optimizer step after `step` others begins, or goes on with a further micro-batch.

        The lines of a step are written at once, at the end of its last micro-batch.
        """
        self.step, self.trains, self._is_last = step, True, is_last

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start, wall = time.perf_counter(), time.time()
        self._stack.append([name, 0.0])
        self._failed = None
        self._count_change()
        try:
            yield
        except BaseException:
            self._failed = self._failed or name
            raise
        finally:
            total = time.perf_counter() - start
            _, inside = self._stack.pop()
            self._count_change()
            if self._stack:
                self._stack[-1][1] += total
            self._record(name, wall, total, total - inside)

    def _count_change(self) -> None:
        self.changes, self.since = self.changes + 1, time.monotonic()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Keep an evaluation out of the sums, because it is not part of a training step; still write its lines."""
        kept, self._evaluates = self._sums.copy(), True
        try:
            yield
        finally:
            self._sums, self._evaluates = kept, False

    def _record(self, name: str, wall: float, total: float, seconds: float) -> None:
        self._sums[name] += seconds
        if self.file is not None:
            self.file.write(name, wall, total, seconds, self.step, self._evaluates)
            if self._is_last and not self._stack:
                self.file.flush()

    def take_sums(self) -> list[float]:
        """Return the seconds per phase of `PHASES` since the last call."""
        sums = [self._sums[name] for name in PHASES]
        self._sums.clear()
        return sums
