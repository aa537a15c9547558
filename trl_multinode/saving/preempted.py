"""Checkpoint of a run that is pre-empted: an ordinary one, at the end of an optimizer step."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..run.preemption import Preemption
from .checkpoints import PREFIX
from .newest import newest_whole


class SaveAtPreemption(TrainerCallback):
    """Callback that saves a checkpoint and ends the script at the end of the step in which a signal has come.

    An evaluation or a push that is due at that step is left out, because it may take longer than the launcher waits. A
    run whose last step has just ended goes on to its end.

    Args:
        preemption ([`Preemption`]):
            Pre-emption of this rank.
        output_dir (`str`):
            Folder of the checkpoints.
    """

    def __init__(self, preemption: Preemption, output_dir: str):
        self._preemption = preemption
        self._output_dir = Path(output_dir)
        preemption.last_checkpoint = lambda: newest_whole(self._output_dir)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._preemption.begin_training()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._preemption.begin_step(state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._preemption.end_step(state.global_step):
            return
        control.should_save = True
        if not control.should_training_stop:
            control.should_training_stop, control.should_evaluate = True, False
            self._preemption.leaves = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave: transformers ends the epoch after the save, and would evaluate or save again because of its end."""
        if self._preemption.leaves:
            self._preemption.leave(str(self._output_dir / f"{PREFIX}{state.global_step}"))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._preemption.end_training()
