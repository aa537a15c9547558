"""Work of a group's thread: record the rollouts, score them, and try another prompt if they teach nothing."""

from functools import partial

import torch

from .groups import Group
from .recorded import Recorded
from .sampling_again import SamplingAgain
from .scoring import GroupScorer
from .stand_in import Ask, Recorder


class GroupMaker:
    """
    Maker of complete groups, for [`~trl_multinode.rollouts.recorded_groups.RecordedGroups`].

    Args:
        recorder ([`Recorder`]):
            Recorder of this rank.
        device (`torch.device`):
            Device of this rank, on which a user's functions place their own models.
        scorer ([`GroupScorer`], *optional*):
            Scorer of this rank, with `score_groups`.
        again ([`SamplingAgain`], *optional*):
            Rule for the next prompt of a group without reward variance, with `dynamic_sampling`; needs a scorer.
    """

    def __init__(
        self,
        recorder: Recorder,
        device: torch.device,
        scorer: GroupScorer | None = None,
        again: SamplingAgain | None = None,
    ):
        self._recorder, self._device, self._scorer, self._again = recorder, device, scorer, again

    def __call__(self, group: Group, ask: Ask) -> Recorded:
        if self._device.type == "cuda":  # a new thread's is GPU 0
            torch.cuda.set_device(self._device)
        if self._again is None:
            return self._make(group, ask)
        return self._again.sample(group, partial(self._make, ask=ask), self._recorder.give_back)

    def _make(self, group: Group, ask: Ask) -> Recorded:
        recorded = self._recorder.record(group, ask)
        if self._scorer is not None:
            recorded.scores = self._scorer.score(recorded)
        return recorded
