"""Activity of a rank for its heartbeats: its phase, its meetings, and what is left in the phase."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..meeting import Meeting
from ..phases import Phases
from .beats import Activity
from .frames import bytes_written

# Phases with a limit of their own (`engine_stall_timeout`, `engine_start_timeout`, the Hub's), or that run the user's
# functions
LONG_PHASES = ("generate", "restart", "reward", "push", "convert")


class RankActivity:
    """Activity of one rank. Its watch thread calls it; nothing in it waits or touches a disk.

    Progress of a rank is a new phase, step or meeting, a completion that arrived, a bucket that was gathered, and in a
    checkpoint each MiB that this process has written.

    Args:
        phases ([`Phases`]), meeting ([`Meeting`]):
            Phases and meetings of the rank.
        step (`Callable[[], int]`):
            Function that returns the optimizer steps done.
        left (`Callable[[str], str]`):
            Function of a phase's name that returns what is left in it.
    """

    def __init__(
        self, phases: Phases, meeting: Meeting, step: Callable[[], int], left: Callable[[str], str]
    ):
        self._phases = phases
        self._meeting = meeting
        self._step = step
        self._left = left
        self._inside = 0
        self.synced = False  # whether this rank has taken part in a weight sync

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Mark the code inside as the trainer's: outside of it a script may work for as long as it likes."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def __call__(self) -> Activity:
        phase, saves = self._phases.current, self._phases.current == "checkpoint"
        written = f"{bytes_written() / 2**20:.0f} MiB written" if saves else ""
        return Activity(
            phase=phase,
            since=self._phases.since,
            step=self._step(),
            left=written or self._left(phase),
            progress=f"{self._phases.changes} {self._meeting.arrivals}",
            synced=self.synced,
            may_take_long=phase in LONG_PHASES or self._inside == 0,
            meeting=self._meeting.arrivals,
            waits_since=self._meeting.waits_since,
        )
