"""What a rank tells the others, and the reader of its log, about what it does."""

from collections.abc import Callable
from pathlib import Path

from ..run.heartbeats.activity import RankActivity
from ..run.heartbeats.beats import Beats
from ..run.heartbeats.judges import Limits
from ..run.meeting import Meeting
from ..run.progress import ProgressLines
from ..run.warn_once import WarnOnce
from ..wire.leftovers import size_of
from .rank import RankContext


class Presence:
    """State, heartbeats and lines of progress of one rank, with the filter of its repeated warnings.

    Args:
        rank ([`RankContext`]):
            The rank.
    """

    def __init__(self, rank: RankContext):
        self._rank = rank
        self._ends = False
        # by phase: returns what is left or done in it
        self.work: dict[str, Callable[[], str]] = {"checkpoint": self._bytes_written}
        # each returns what a user's function does beside generation
        self.user_calls: list[Callable[[], str]] = []

    def begin(self, meeting: Meeting) -> None:
        """Start the heartbeats, the lines of progress of rank 0, and the filter of repeated warnings."""
        rank, settings = self._rank, self._rank.settings
        self.activity = RankActivity(rank.phases, meeting, rank.step, self.left)
        limits = Limits(
            settings.heartbeat_timeout, settings.stuck_timeout, settings.engine_start_timeout
        )
        Beats(rank.watch, limits, self.activity)
        self._progress_lines = ProgressLines(rank.phases, rank.step, self.left)
        if rank.topology.rank == 0:
            self._progress_lines.start()
        self._warn_once = WarnOnce(rank.watch.store.is_first)
        if rank.topology.launched:
            self._warn_once.install()

    def end(self) -> None:
        """Tell the ranks that wait for this one that it comes to no further meeting."""
        self._ends = True
        self._progress_lines.close()
        self._warn_once.restore()

    def left(self, phase: str) -> str:
        """Return what is left or done in a phase of this rank, as far as that is known."""
        if self._ends:
            return "has closed its trainer or ended its script"
        calls = self.user_calls if phase == "generate" else []
        work = [self.work[phase]] if phase in self.work else []
        return ", ".join(filter(None, (call() for call in [*work, *calls])))

    def _bytes_written(self) -> str:
        folder = Path(self._rank.args.output_dir) / f"checkpoint-{self._rank.step()}"
        return f"{size_of(folder) / 1e9:.1f} GB written"
