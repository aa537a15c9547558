"""What all ranks decide together: facts that must be equal, and whether a step ends with a checkpoint or the run."""

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
        self.meeting = Meeting(rank.topology, rank.store)
        rank.watch.missed = self.meeting.is_missed
        self.save = StepDecision(rank.topology, rank.store, "save")
        self.preemption = Preemption(
            rank.topology, rank.store, rank.settings.preemption_grace, rank.watch
        )

    def compare(self, facts: Facts) -> list[Disagreement]:
        """Compare facts of all ranks; every rank calls it and gets the same answer."""
        return disagreements(self.meeting, facts)
