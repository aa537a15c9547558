"""`NodeTrainer`: a mixin that makes a TRL trainer generate on the engines of every node. It contains only wiring.

TRL's trainers build one `VLLMGeneration` and call its `sync_weights()` and `generate()`. The mixin replaces this
object and adds what a run on many nodes needs; a trainer uses it in a few lines.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch

from .call_checks import Call, check_call
from .config import NodeFields
from .host import NodeHost
from .libraries import check_trl, replaced
from .model_outline import outline
from .must_agree import check_agreement, check_training
from .node_settings import check_supported, is_node_mode
from .reporting.callbacks import Alerts, report_steps
from .reporting.record import RunRecord
from .reporting.setup import report_choices, report_start
from .reporting.steps import StepReport
from .rollouts.aligning import aligned_before_gather
from .rollouts.generation import SAMPLING, NodeGeneration
from .rollouts.monitor import DivergenceMonitor, check_nan
from .rollouts.one_prompt import check_one_prompt
from .rollouts.rewards import RewardCalls
from .rollouts.staleness import StalenessMeter
from .rollouts.text_logging import TextLogging
from .saving.callbacks import SaveAtPreemption, SaveByTime
from .saving.checkpoint_files import newest_whole
from .saving.checkpoints import CheckpointLog, fast_forward
from .saving.hub import HubTrainer
from .saving.resume import Resume

# newest logs in `log_history` that keep this library's metrics; `_multinode/log.jsonl` has all
KEPT_LOGS = 500


def bound_arguments(kind: type, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call of `kind.__init__` by name, those of its `**kwargs` among them."""
    signature = inspect.signature(kind.__init__)  # type: ignore[misc]
    call = signature.bind(*args, **kwargs).arguments
    del call["self"]
    rest = next(
        (name for name, one in signature.parameters.items() if one.kind is one.VAR_KEYWORD), None
    )
    return call | call.pop(rest, {}) if rest else call


class NodeTrainer(HubTrainer):
    """
    Node mode for a TRL trainer that builds a `VLLMGeneration`. With any other `vllm_mode`, every method is TRL's.

    ```python
    class MultiNodeRLOOTrainer(NodeTrainer, RLOOTrainer):
        _trl, _config = RLOOTrainer, MultiNodeRLOOConfig

        def _generate_and_score_completions(self, inputs):  # TRL's method that generates one round
            return self._one_round(partial(super()._generate_and_score_completions, inputs))
    ```

    All training ranks must call every method; `training_step`, `train`, `evaluate` and `log` are collectives.

    Raises:
        `ConfigurationError`: if node mode cannot run as configured; the same on every rank, before any weights file is
            opened.
    """

    _trl: ClassVar[type]  # the TRL trainer that this class extends
    _config: ClassVar[type]  # this library's config for it
    # TRL's class with the code of a round, if `_trl` only inherits it
    _rounds_of: ClassVar[type | None] = None
    # the module in which TRL looks up `VLLMGeneration`; default: that with the code of a round
    _builds_in: ClassVar[ModuleType | None] = None
    # every rank calls `generate` exactly once per round, and a collective other than `gather` follows it
    _generates_once: ClassVar[bool] = False
    _record: RunRecord | None = None  # on rank 0
    _own_metrics: frozenset[str] = frozenset()  # names of this library's metrics so far
    _sync_mark: ClassVar[str] = (
        "_last_loaded_step"  # TRL's attribute with the step at which vLLM last got weights
    )

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "_trl" in vars(cls):
            cls._tag_names = [*cls._trl._tag_names, "trl-multinode"]  # type: ignore[attr-defined]

    def __init__(self, *args: Any, **kwargs: Any):
        call = bound_arguments(self._trl, self, *args, **kwargs)
        self.host = None
        settings = call["args"] = call.get("args") or self._default_args(call["model"])
        report_choices(settings, self._config, isinstance(settings, NodeFields))
        if not is_node_mode(settings):
            super().__init__(**call)
            return
        self.host = NodeHost(settings)
        with self.host.watch.guard(self.host.close), self.host.phases("set-up"):
            self._check_call(self.host, settings, call)
            untested = check_trl(type(self))
            if self.host.topology.rank == 0:
                report_start(settings, self.host, untested)
            self.host.start_early(partial(outline, settings, call), self._engine_keywords(settings))
            build = partial(self._build_generation, self.host)
            with replaced(self._builds_in or self._code(), "VLLMGeneration", build):
                super().__init__(**call)
            self._wire(self.host)

    @classmethod
    def _code(cls) -> ModuleType:
        """Return TRL's module with the code of a round."""
        return sys.modules[(cls._rounds_of or cls._trl).__module__]

    def _check_call(self, host: NodeHost, settings: Any, call: Call) -> None:
        check_supported(settings, self._config, type(self).__name__)
        check_call(host, settings, call)
        check_agreement(host, settings, call)

    def _default_args(self, model: Any) -> Any:
        name = (
            model if isinstance(model, str) else model.config._name_or_path or type(model).__name__
        )
        return self._config(f"{name.split('/')[-1]}-{self._name}")

    @staticmethod
    def _engine_keywords(args: Any) -> dict[str, Any]:
        """Return the keywords of `VLLMGeneration` with which engines start, as TRL's `__init__` will compute them."""
        steps = getattr(args, "steps_per_generation", None) or args.gradient_accumulation_steps
        rows = args.per_device_train_batch_size * steps
        return {
            "max_num_seqs": rows * args.vllm_tensor_parallel_size,
            "max_model_length": args.vllm_max_model_length,
            "model_impl": args.vllm_model_impl,
            "trust_remote_code": args.trust_remote_code,
        }

    @staticmethod
    def _build_generation(host: NodeHost, *, mode: str, **keywords: Any) -> NodeGeneration:
        """Build a [`NodeGeneration`] from the keywords that TRL's `__init__` passes to `VLLMGeneration`."""
        return NodeGeneration(host=host, **keywords)

    def _wire(self, host: NodeHost) -> None:
        host.follow(self)
        # TRL's tool loop compares lengths with it
        if getattr(self, "max_completion_length", 0) is None:
            self.max_completion_length = self.vllm_generation.max_completion_length
        self._sampled = {name: getattr(self, name) for name in SAMPLING if hasattr(self, name)}
        self._eval_rounds = 0
        self._meter = StalenessMeter(self.args)
        iterations = getattr(self, "num_iterations", 1)
        self._report = StepReport(
            host, self.accelerator, self._meter, self.vllm_generation, self.model, iterations
        )
        report_steps(self.callback_handler.callbacks)
        self.add_callback(Alerts())
        self._record = RunRecord(host, self.args, self.model) if host.topology.rank == 0 else None
        self._resume = Resume(self)
        host.watch.ending.checkpoint = partial(newest_whole, Path(self.args.output_dir))
        if (minutes := host.settings.save_minutes) is not None:
            self.add_callback(SaveByTime(minutes, host.agreement.save))
        self.add_callback(SaveAtPreemption(host.agreement.preemption))

    @property
    def steps_per_round(self) -> int:
        """Number of `training_step` calls that one generation round serves."""
        steps = getattr(self.args, "steps_per_generation", self.args.gradient_accumulation_steps)
        return steps * getattr(self, "num_iterations", 1)

    @property
    def max_staleness(self) -> int:
        """Number of generation rounds that are begun while a round trains; 0 outside of node mode."""
        return self.host.settings.max_staleness if self.host is not None else 0

    def last_checkpoint(self) -> str | None:
        """
        Return the newest finished checkpoint in `output_dir`, for `train(resume_from_checkpoint=...)`, or `None` if
        there is no checkpoint. The log names unfinished ones. All training ranks must call it.

        Raises:
            `ConfigurationError`: on every rank, if there are finished checkpoints but none that every rank sees, or if
                there are only unfinished ones.
        """
        with self._guarded():
            if self.host is not None:
                self.host.watch.ending.resumes = True
            folder = CheckpointLog(Path(self.args.output_dir), self.accelerator).last_whole()
            return str(folder) if folder else None

    def weights_changed(self) -> None:
        """
        Mark the weights as changed without an optimizer step, so that the next generation sends them to the engines.
        All training ranks must call it. Without this call, the trainer sends the weights once per optimizer step.
        """
        setattr(self, self._sync_mark, -getattr(self, "vllm_sync_frequency", 1))
        if self.host is not None:
            self.vllm_generation.weights_changed()

    # ---- one generation round ---------------------------------------------------------------------------------------

    def _begin_round(self) -> None:
        """Begin a round, before TRL generates for a new batch of prompts. Every rank calls it, in the same mode."""
        self._forward_sampling()
        if self.model.training:
            self.vllm_generation.begin_round("train", self._step // self.steps_per_round)
        else:
            self.vllm_generation.begin_round("eval", self._eval_rounds)
            self._eval_rounds += 1
        if getattr(self, "vllm_sync_frequency", 1) > 1 and self.vllm_generation.must_sync:
            self.vllm_generation.sync_weights()  # TRL would wait for the next multiple of it, even after a resume

    def _forward_sampling(self) -> None:
        """Give the engines the sampling settings that a callback has changed in this trainer."""
        for name, before in self._sampled.items():
            if (value := getattr(self, name)) != before:
                setattr(self.vllm_generation, name, value)
                self._sampled[name] = value

    def _one_round(self, make: Callable[[], Any]) -> Any:
        """Run `make`, TRL's method that generates one round, and return its output."""
        if self.host is None:
            return make()
        self._begin_round()
        with self.vllm_generation.recovering(), self._aligned(self.host):
            output = make()
        # a `rollout_func` may take its completions from elsewhere
        if self.vllm_generation.generated:
            tokens, nan = self._check_completions(output)
            if self.model.training:
                self._meter.add_round(self.vllm_generation.ages)
                self._meter.add(trained_tokens=tokens, nan_tokens=nan)
        return output

    def _check_completions(self, output: Any) -> tuple[int, int]:
        """Raise if this round's log-probs cannot be right, and return how many there are and how many are NaN.

        Those of the engine may not be NaN. A trainer that scores its completions compares them here.
        """
        rows = [np.empty(0, np.float32), *(row.logprobs for row in self.vllm_generation.rows)]
        logprobs = torch.from_numpy(np.concatenate(rows))
        version = self.vllm_generation.version
        return check_nan(str(self.host.topology), {"engine": logprobs}, version, version)  # type: ignore[union-attr]

    @contextmanager
    def _aligned(self, host: NodeHost) -> Iterator[None]:
        """Let all ranks wait for the slowest one's completions before TRL's first collective of the round."""
        if not self._generates_once:
            with aligned_before_gather(self.accelerator, host.updates.align):
                yield
            return
        self.vllm_generation.on_generated = host.updates.align
        try:
            yield
        finally:
            self.vllm_generation.on_generated = None

    def close(self) -> None:
        """
        Shut this trainer's engines down cleanly. All training ranks must call it, and wait for each other. Without
        this call, the engines end when the trainer is garbage-collected (under a launcher: when the next trainer is
        built), when a new trainer's engines need their GPUs, or with the process.
        """
        if self.host is not None:
            self.host.close()

    # ---- seams ------------------------------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        with self._guarded():
            if self.host is not None:
                check_training(self.host, self.args, resume_from_checkpoint)
                ending = self.host.watch.ending
                ending.resumes = resume_from_checkpoint is True or bool(ending.resumes)
                resume_from_checkpoint = self._resume.choose(resume_from_checkpoint)
                self.weights_changed()
                self._report.restart()
                with self._resume.loading():
                    return super().train(resume_from_checkpoint, *args, **kwargs)
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self._eval_rounds = 0  # every evaluation uses the same seeds, wherever a run was resumed
        if self.host is None:
            return super().evaluate(*args, **kwargs)
        with self._guarded(), self.host.phases.uncounted(), self._meter.paused():
            return super().evaluate(*args, **kwargs)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        if self.host is None:
            yield
        else:
            with self.host.watch.guard(), self.host.presence.activity.inside():
                yield

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        sampler = super()._get_train_sampler(dataset)
        return sampler if self.host is None else fast_forward(sampler, self._resume.epochs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.host is None:
            return super().training_step(*args, **kwargs)
        self._resume.restore_position()
        self.host.phases.begin_step(self.state.global_step, self.accelerator.sync_gradients)
        self._report.begin_step(self.state.global_step)
        with self.host.phases("train"):
            return super().training_step(*args, **kwargs)

    def compute_loss(self, model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.host is not None and self.model.training:
            self._report.count(inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        # the script, `push_to_hub` and every checkpoint call this method on all ranks
        if self.host is not None:
            self.host.updates.check_before_save(self.model)
        super().save_model(*args, **kwargs)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        if self.host is None:
            super()._save_checkpoint(model, trial)
            return
        self.host.updates.check_before_save(self.model)  # before the checkpoint has a folder
        with self._resume.rotating():
            with self.host.phases("checkpoint"), self._resume.saving() as folder:
                super()._save_checkpoint(model, trial)
            self._push_finished(str(folder))

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        with self._resume.rotating_at_end() if self.host is not None else nullcontext():
            return super()._finalize_training(*args, **kwargs)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self.weights_changed()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        found: dict[str, float] = {}
        # all ranks log `loss`; a script may log other values on one rank
        if self.host is not None and "loss" in logs:
            steps_left = self.state.max_steps - self.state.global_step
            found = self._report.metrics(self.vllm_generation.last_sync, steps_left)
        super().log(logs | found, start_time)
        if self.host is not None and self.state.log_history:
            self._own_metrics |= found.keys()
            if self._record is not None:
                self._record.add_log(self.state.log_history[-1])
            # every rank and every checkpoint keep the history: 11.5 MiB per 1000 logs of 100 metrics
            for old in self.state.log_history[:-KEPT_LOGS][-1:]:
                kept = {name: value for name, value in old.items() if name not in self._own_metrics}
                self.state.log_history[-KEPT_LOGS - 1] = kept


class RewardedNodeTrainer(NodeTrainer):
    """[`NodeTrainer`] for trainers with reward functions; it stops TRL from gathering all texts to all ranks."""

    def _wire(self, host: NodeHost) -> None:
        super()._wire(host)
        self._texts = TextLogging(self._code(), keep=self.args.log_completions)
        self._reward_calls = RewardCalls.of(host)
        self._monitor = DivergenceMonitor(host, self.args, self.vllm_generation)
        if not self.args.log_completions:
            self.log_multimodal = (
                False  # TRL would gather the images to all ranks in every round, unused
            )

    def _one_round(self, make: Callable[[], Any]) -> Any:
        with self._texts.during_scoring() if self.host is not None else nullcontext():
            return super()._one_round(make)

    def _check_groups(self, inputs: list[dict[str, Any]]) -> None:
        """Raise if a group of this training round has several prompts. An evaluation may fill its last batch up."""
        if self.host is not None and self.model.training:
            check_one_prompt(self.accelerator, inputs, self.num_generations)

    def _log_completion_extra(self, column: str, values: list) -> None:
        """Drop columns of reward functions unless completions are logged; TRL would gather them for no use."""
        if self.host is None or self.args.log_completions:
            super()._log_completion_extra(column, values)

    def _calculate_rewards(
        self, inputs: list, prompts: list, completions: list, completion_ids_list: list
    ) -> torch.Tensor:
        if self.host is None:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._texts.remember(prompts, completions)
        calculate = partial(
            super()._calculate_rewards, inputs, prompts, completions, completion_ids_list
        )
        return self._reward_calls.rewards(self, self._code(), calculate)
