"""A line of rank 0 whenever a phase goes on and this library has printed nothing for 15 s.

Waits for engines that start and for other ranks have lines of their own (`engine/process.py`,
`run/heartbeats/judges.py`). The thread only reads; a failing line is left out, because no line of progress may end a
run.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from .phases import Phases
from .reporter import report, silent_since

EVERY_S = 15.0
POLL_S = 1.0
# Phase and what it does; other phases, such as `wait`, have no line
WORDS = {
    "set-up": "setting up the trainer",
    "generate": "generating",
    "reward": "computing rewards",
    "sync": "sending weights",
    "restart": "waiting for an engine",
    "train": "training",
    "checkpoint": "saving a checkpoint",
    "push": "pushing to the Hub",
    "convert": "converting a checkpoint for another number of ranks",
}


class ProgressLines:
    """Thread that reports a long phase.

    Args:
        phases ([`Phases`]):
            Phases of the calling rank.
        step (`Callable[[], int]`):
            Function that returns the optimizer steps done. A new step counts as a sign of life.
        left (`Callable[[str], str]`):
            Function of a phase's name that returns what is done or left in it; an empty string if that is unknown.
    """

    def __init__(self, phases: Phases, step: Callable[[], int], left: Callable[[str], str]):
        self._phases = phases
        self._step = step
        self._left = left
        self._closed = threading.Event()
        self._seen: tuple[int, str | None] = (-1, None)  # step and open phase at the last look
        self._step_since = self._phase_since = time.monotonic()

    def start(self) -> None:
        threading.Thread(target=self._run, name="progress-lines", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(POLL_S):
            with suppress(Exception):
                self.beat()

    def beat(self) -> None:
        """Report the open phase if nothing was printed for long."""
        now, seen = time.monotonic(), (self._step(), self._phases.open)
        if seen[0] != self._seen[0]:
            self._step_since = now
        if seen[1] != self._seen[1]:
            self._phase_since = now
        self._seen = seen
        step, phase = seen
        if phase not in WORDS or now - max(self._step_since, silent_since()) < EVERY_S:
            return
        left = self._left(phase)
        report(
            f"step {step + 1}: {WORDS[phase]} for {now - self._phase_since:.0f} s{left and ', '}{left}"
        )
