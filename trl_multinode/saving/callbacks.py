"""Callbacks that save a checkpoint beside those of `save_strategy`: after `save_minutes`, and at a pre-emption."""

import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..run.decision import StepDecision
from ..run.preemption import Preemption
from .checkpoint_files import PREFIX


class SaveByTime(TrainerCallback):
    """Callback that saves a checkpoint at the end of the step in which `minutes` have passed since the last one.

    The seconds of a step may vary tenfold. Every checkpoint counts, also one of `save_steps` or of another callback.
    Rank 0 decides at the beginning of a step, with the seconds of the step before as an estimate. A step that takes
    unexpectedly long is therefore saved with the step after it.

    Args:
        minutes (`float`):
            Value of `save_minutes`.
        decision ([`StepDecision`]):
            Decision of all ranks at the end of a step, for which rank 0 asks.
    """

    def __init__(self, minutes: float, decision: StepDecision):
        self._limit_s = 60.0 * minutes
        self._decision = decision
        self._saved = self._began = time.monotonic()
        self._last_s = 0.0  # of the step before, without its checkpoint

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._decision.begin_training()
        self._saved, self._last_s = time.monotonic(), 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.monotonic()
        due = self._began - self._saved + self._last_s >= self._limit_s
        if due and state.is_world_process_zero:
            self._decision.ask(state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._last_s = time.monotonic() - self._began
        if self._decision.read(state.global_step):
            control.should_save = True

    def on_save(self, *_: Any, **__: Any) -> None:
        self._saved = time.monotonic()


class SaveAtPreemption(TrainerCallback):
    """Callback that saves a checkpoint and ends the script at the end of the step in which a signal has come.

    An evaluation or a push that is due at that step is left out, because it may take longer than the launcher waits. A
    run whose last step has just ended goes on to its end.

    Args:
        preemption ([`Preemption`]):
            Pre-emption of this rank.
    """

    def __init__(self, preemption: Preemption):
        self._preemption = preemption

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._preemption.decision.begin_training()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._preemption.step = state.global_step + 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._preemption.end_step(state.global_step):
            return
        control.should_save = True
        if not control.should_training_stop:
            control.should_training_stop = True
            control.should_evaluate = False
            self._preemption.leaves = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave: transformers ends the epoch after the save, and would evaluate or save again because of its end."""
        if self._preemption.leaves:
            self._preemption.leave(str(Path(args.output_dir) / f"{PREFIX}{state.global_step}"))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._preemption.step = 0
