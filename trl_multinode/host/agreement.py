"""What all ranks decide together: facts that must be equal, and whether a step ends with a checkpoint or the run."""

from ..run.clock_offset import clock_offset
from ..run.decision import StepDecision
from ..run.facts import Disagreement, Facts, disagreements
from ..run.meeting import Meeting
from ..run.preemption import Preemption
from .rank import RankContext


class Agreement:
    """The meetings and decisions of all ranks, as one of them takes part in them, on the run's store.

    Args:
        rank ([`RankContext`]):
            The rank.
    """

    def __init__(self, rank: RankContext):
        self._rank = rank
        self._has_measured_clock = False
        self.meeting = Meeting(rank.topology, rank.store)
        rank.watch.missed = self.meeting.is_missed
        self.save = StepDecision(rank.topology, rank.store, "save")
        self.preemption = Preemption(
            rank.topology, rank.store, rank.settings.preemption_grace, rank.watch
        )

    def compare(self, facts: Facts) -> list[Disagreement]:
        """Compare facts of all ranks; every rank calls it and gets the same answer."""
        return disagreements(self.meeting, facts)

    def meet(self, request: str = "") -> list[str]:
        """Wait for all ranks in a meeting, and return the words that any of them brought; see [`Meeting.wait`].

        The first one also measures the clock of this node: all ranks have just met, so each finds the others ready.
        """
        words = self.meeting.wait(request)
        if not self._has_measured_clock:
            self._has_measured_clock = True
            self._rank.phase_file.clock_offset = clock_offset(self._rank.topology, self._rank.store)
        return words
