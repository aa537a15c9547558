"""Hub pushes in node mode: verified before, reported after, with run details in the model card.

The main process alone decides whether to push. Saving is a collective, and is complete before the main process checks
the files. The other ranks meanwhile enter the next step or reach the end of the script; if the main process raises,
the watchdog ends them with its message. So no rank waits for the result of the check.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainingArguments
from transformers import trainer as transformers_trainer
from transformers.trainer_utils import HubStrategy
from transformers.utils.hub import hf_api

from ..errors import ConfigurationError, HubPushError
from ..host import NodeHost
from ..libraries import replaced
from ..node_settings import NodeSettings, uses_fsdp, zero_stage
from ..run.reporter import report
from .model_card import add_section, run_section
from .pushing import CheckedHub
from .saved_weights import check_saved

SHARDED = "SHARDED_STATE_DICT"  # accelerate's default for FSDP2


class HubTrainer(Trainer):
    """
    Trainer that verifies, retries and reports Hub pushes in node mode (`host` is not `None`). In any other mode every
    method is transformers' own.

    Before a push, the main process compares the saved weights with the model, and never pushes a wrong file. It
    retries a push after a transient error. If the push still fails, it reports the command that repeats it, and the
    run continues, or ends if `hub_push_must_succeed`. `hub_token` is neither saved nor pushed with the training
    arguments.

    Raises (on the main process, from `push_to_hub` and from `train` with `hub_strategy` other than `"end"`):
        `SavedWeightsError`: if the saved weights are not the trained model.
        `HubPushError`: with `hub_push_must_succeed=True`; for a background push, at the next checkpoint or at the end
        of training; from the constructor, if the repository cannot be created.
    """

    host: NodeHost | None = None
    _pushing = False  # `True` inside `push_to_hub`, which saves the model before it raises

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        if self.host is None or not self.is_world_process_zero():
            return super().init_hf_repo(*args, **kwargs)
        self.push_in_progress = None
        try:
            with self._checked_hub():
                super().init_hf_repo(*args, **kwargs)
        except HubPushError as error:
            if self._must_succeed and not self._pushing:
                raise
            self._repo_error = error
            report(error)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        if self.host is None:
            return super().push_to_hub(*args, **kwargs)
        self._pushing = True
        try:
            with self._checked_hub(), self.host.phases("push"):
                pushed = super().push_to_hub(*args, **kwargs)
        finally:
            self._pushing = False
        if self._must_succeed and self.is_world_process_zero() and self.hub_model_id is None:
            raise self._repo_error  # the repository could not be created, and the model is saved
        return pushed

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # in node mode `_push_finished` follows, once the checkpoint is marked as finished
        if self.host is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _push_finished(self, checkpoint_folder: str) -> None:
        """Push a checkpoint that is marked as finished. A push that fails raises before an older one is deleted."""
        assert self.host is not None
        pushes = self.args.push_to_hub and self.args.hub_strategy != HubStrategy.END
        if not pushes or not self.is_world_process_zero():
            return
        if self.host.agreement.preemption.leaves:
            report(f"{checkpoint_folder} is not pushed to the Hub, because the run is pre-empted")
            return
        self._raise_failed_pushes()
        if self.hub_model_id is None:
            self.init_hf_repo()
        if self.hub_model_id is None:
            return
        with self._checked_hub(), replaced(self.args, "hub_token", None), self.host.phases("push"):
            super()._push_from_checkpoint(checkpoint_folder)

    def _finish_current_push(self) -> None:
        if self.host is None:
            super()._finish_current_push()
            return
        with self.host.phases("push"):
            super()._finish_current_push()
        self._raise_failed_pushes()

    def _save(self, *args: Any, **kwargs: Any) -> None:
        if self.host is None:
            return super()._save(*args, **kwargs)
        # transformers pickles the arguments beside the model and pushes the file
        with replaced(self.args, "hub_token", None):
            return super()._save(*args, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(*args, **kwargs)
        if self.host is not None and self.is_world_process_zero():
            section = run_section(self.host.topology, self.host.devices, self.state.log_history)
            add_section(Path(self.args.output_dir) / "README.md", section)

    # ---- inside -----------------------------------------------------------------------------------------------------

    @property
    def _must_succeed(self) -> bool:
        # read at every push, so a script can change it
        return NodeSettings.of(self.args).hub_push_must_succeed

    @contextmanager
    def _checked_hub(self) -> Iterator[None]:
        assert self.host is not None
        hub = CheckedHub(
            hf_api(),
            where=str(self.host.topology),
            output_dir=Path(self.args.output_dir),
            must_succeed=self._must_succeed,
            token=self.args.hub_token,
            check=self._check_saved,
        )
        with replaced(transformers_trainer, "hf_api", lambda: hub):
            yield

    def _check_saved(self, folder: Path) -> None:
        check_saved(folder, self.accelerator.unwrap_model(self.model, keep_torch_compile=False))

    def _raise_failed_pushes(self) -> None:
        """Raise the first error of the background pushes; transformers waits for them but never reads the outcome."""
        push = getattr(self, "push_in_progress", None)
        for job in push.jobs if push is not None else ():
            error = job.exception() if job.done() else None
            if error is not None:
                self.push_in_progress = None
                raise error


def check_push(args: TrainingArguments, call: dict[str, Any]) -> None:
    """Raise `ConfigurationError` if a push is requested but no file would hold the gathered weights."""
    if not args.push_to_hub:
        return
    if uses_fsdp() and os.environ.get("FSDP_STATE_DICT_TYPE", SHARDED) == SHARDED:
        raise ConfigurationError(
            "`push_to_hub=True` under FSDP without `fsdp_state_dict_type: FULL_STATE_DICT`: no file would "
            "hold the weights.",
            setting="fsdp_state_dict_type",
            expected="FULL_STATE_DICT",
            cure="Write it under `fsdp_config` in the accelerate config.",
        )
    has_adapter = call.get("peft_config") or hasattr(call["model"], "peft_config")
    if zero_stage(args) != 3 or has_adapter:  # ZeRO-3 always gathers an adapter
        return
    config = args.deepspeed_plugin.hf_ds_config
    if not config.get_value("zero_optimization.stage3_gather_16bit_weights_on_model_save", False):
        raise ConfigurationError(
            "`push_to_hub=True` under ZeRO-3 without `zero3_save_16bit_model`: no file would hold the weights.",
            setting="zero3_save_16bit_model",
            expected=True,
            cure="Set `zero3_save_16bit_model: true` in the accelerate config, or "
            '`"stage3_gather_16bit_weights_on_model_save": true` in the DeepSpeed file.',
        )
