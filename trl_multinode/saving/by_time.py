"""`save_minutes`: checkpoints by time, because the seconds of a step may vary tenfold."""

import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from ..run.decision import StepDecision


class SaveByTime(TrainerCallback):
    """Callback that saves a checkpoint at the end of the step in which `minutes` have passed since the last one.

    Every checkpoint counts, also one of `save_steps` or of another callback. Rank 0 decides at the beginning of
    a step, with the seconds of the step before as an estimate. A step that takes unexpectedly long is therefore saved
    with the step after it.

    Args:
        minutes (`float`):
            Value of `save_minutes`.
        decision ([`StepDecision`]):
            Way in which rank 0's decision reaches all ranks.
        decides (`bool`):
            `True` on rank 0.
        clock (`Callable[[], float]`, *optional*):
            Function that returns seconds.
    """

    def __init__(
        self, minutes: float, decision: StepDecision, decides: bool, clock: Callable[[], float] = time.monotonic
    ):
        self._limit_s = 60.0 * minutes
        self._decision = decision
        self._decides = decides
        self._clock = clock
        self._saved = self._began = clock()
        self._last_s = 0.0  # of the step before, without its checkpoint

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._saved, self._last_s = self._clock(), 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = self._clock()
        if self._decides:
            self._decision.write(state.global_step, self._began - self._saved + self._last_s >= self._limit_s)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._last_s = self._clock() - self._began
        if self._decision.read(state.global_step - 1):  # the step began before it was counted
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._saved = self._clock()
