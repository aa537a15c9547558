"""What a group's thread does: record the rollouts, score them, and try another prompt if they teach nothing."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from .groups import Group
from .recorded import Recorded, Scores
from .stand_in import Ask, Recorder


class Scorer(Protocol):
    """Method of [`~trl_multinode.rollouts.scoring.GroupScorer`] that a group's thread needs."""

    def score(self, recorded: Recorded) -> Scores: ...


class Again(Protocol):
    """Method of [`~trl_multinode.rollouts.sampling_again.SamplingAgain`] that a group's thread needs."""

    def sample(
        self, group: Group, make: Callable[[Group], Recorded], drop: Callable[[Recorded], None]
    ) -> Recorded: ...


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
        make = partial(self._make, ask)
        return make(group) if self._again is None else self._again.sample(group, make, self._recorder.give_back)

    def _make(self, ask: Ask, group: Group) -> Recorded:
        recorded = self._recorder.record(group, ask)
        if self._scorer is not None:
            recorded.scores = self._scorer.score(recorded)
        return recorded
