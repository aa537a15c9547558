"""What a group's thread does: record the rollouts, score them, and try another prompt if they teach nothing."""

from typing import Any, Protocol

from .groups import Group
from .recorded import Recorded, Scores
from .stand_in import Ask, Recorder


class Scorer(Protocol):
    """Methods of [`~trl_multinode.rollouts.scoring.GroupScorer`] that a group's thread needs."""

    def score(self, recorded: Recorded) -> Scores: ...


class Again(Protocol):
    """Methods of [`~trl_multinode.rollouts.sampling_again.SamplingAgain`] that a group's thread needs."""

    def is_flat(self, scores: Scores) -> bool: ...

    def next_group(self, group: Group) -> bool: ...


class GroupMaker:
    """
    Maker of complete groups, for [`~trl_multinode.rollouts.recorded_groups.RecordedGroups`].

    Args:
        recorder ([`Recorder`]):
            Recorder of this rank.
        scorer (`Scorer`, *optional*):
            Scorer of this rank, with `score_groups`.
        again (`Again`, *optional*):
            Rule for the next prompt of a group without reward variance, with `dynamic_sampling`.
    """

    def __init__(self, recorder: Recorder, scorer: Scorer | None = None, again: Again | None = None):
        self._recorder, self._scorer, self._again = recorder, scorer, again

    def __call__(self, group: Group, ask: Ask) -> Recorded:
        recorded = self._recorder.record(group, ask)
        if self._scorer is not None:
            recorded.scores = self._scorer.score(recorded)
            while self._is_flat(recorded.scores) and self._again is not None and self._again.next_group(group):
                self._recorder.give_back(recorded)
                recorded = self._recorder.record(group, ask)
                recorded.scores = self._scorer.score(recorded)
        return recorded

    def _is_flat(self, scores: Any) -> bool:
        return self._again is not None and self._again.is_flat(scores)
