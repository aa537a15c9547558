"""Time per phase: `with phases("sync"):` writes one JSON line and adds to the sums for the log.

Phases nest; each counts only its own time, so the sums add up to the wall time of the outermost phase.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from .phase_file import PhaseFile

PHASES = ("sync", "generate", "reward", "train", "wait")  # the phases of a step, in the order of the log


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
        self.step = 0

    @property
    def current(self) -> str:
        """Name of the innermost phase, or of the one that raised the current exception. The watch thread reads it."""
        try:
            return self._failed or self._stack[-1][0]
        except IndexError:
            return "set-up" if self.step == 0 else "between steps"

    @property
    def open(self) -> str | None:
        """Name of the innermost phase, or `None` outside of phases. Other threads read it."""
        try:
            return self._stack[-1][0]
        except IndexError:
            return None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start, wall = time.perf_counter(), time.time()
        self._stack.append([name, 0.0])
        self._failed = None
        try:
            yield
        except BaseException:
            self._failed = self._failed or name
            raise
        finally:
            total = time.perf_counter() - start
            _, inside = self._stack.pop()
            if self._stack:
                self._stack[-1][1] += total
            self._record(name, wall, total, total - inside)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Keep an evaluation out of the sums, because it is not part of a training step; still write its lines."""
        kept = self._sums.copy()
        try:
            yield
        finally:
            self._sums = kept

    def _record(self, name: str, wall: float, total: float, seconds: float) -> None:
        self._sums[name] += seconds
        if self.file is not None:
            self.file.write(name, wall, total, seconds, self.step)

    def take_sums(self) -> list[float]:
        """Return the seconds per phase of `PHASES` since the last call."""
        sums = [self._sums[name] for name in PHASES]
        self._sums.clear()
        return sums


def split_advice(generate_s: float, train_s: float, training: int, reserved: int, overlapped: bool = False) -> str:
    """Recommend a split of a node's GPUs, from its measured seconds.

    Let g and t be the GPU-seconds of generation and training per step. With R of M GPUs reserved, a step takes
    g/R + t/(M-R), or max(g/R, t/(M-R)) if overlapped; colocation on all M would take about (g+t)/M.

    Args:
        generate_s (`float`), train_s (`float`):
            Measured seconds per step.
        training (`int`), reserved (`int`):
            Current number of training and of reserved GPUs per node.
        overlapped (`bool`, *optional*, defaults to `False`):
            `True` if the engines generate while the ranks train (`max_staleness=1`).
    """
    total = training + reserved
    g, t = generate_s * reserved, train_s * training
    combine = max if overlapped else sum
    times = {r: combine((g / r, t / (total - r))) for r in range(1, total)}
    best = min(times, key=lambda r: times[r])
    how = "beside" if overlapped else "and"
    now = f"{training}+{reserved} takes {times[reserved]:.1f} s of generation {how} training per step"
    colocated = f"colocation on all {total} would take about {(g + t) / total:.1f} s if it fits in memory"
    if times[best] > 0.95 * times[reserved]:
        return f"Split: {now}, which is the best or within 5 % of it; {colocated}."
    return (
        f"Split: {now}; {total - best}+{best} would take about {times[best]:.1f} s "
        f"(num_processes = {total - best} per node); {colocated}."
    )
