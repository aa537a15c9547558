"""`MultiNodeGRPOTrainer`: TRL's `GRPOTrainer` with the engines of every node wired in. Wiring only."""

import copy
import logging
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from .checkpoints import CheckpointLog, fast_forward
from .config import MultiNodeGRPOConfig, check_fields, field_or_default, is_node_mode
from .errors import ConfigurationError
from .generation import NodeGeneration, Prompts
from .host import NodeHost
from .hub import HubTrainer
from .microbatches import BalancedGRPOTrainer
from .monitor import DivergenceMonitor
from .reporting import StepReport, announce
from .resume import Resume
from .rollouts import UpcomingBatches
from .staleness import StalenessMeter
from .text_logging import TextLogging

logger = logging.getLogger(__name__)


class MultiNodeGRPOTrainer(HubTrainer, BalancedGRPOTrainer):
    """
    TRL's [`~trl.GRPOTrainer`] where every node generates on its own vLLM engines.

    A drop-in replacement: same arguments. With `use_vllm=True` and `vllm_mode="node"` (the defaults of
    [`MultiNodeGRPOConfig`]) the local main process of every node starts the node's engines on the GPUs that no rank of
    the node trains on; prompts and completions stay on the node, and the weights come out of the ZeRO-3 shards through
    the node's memory. With any other mode it does what TRL does.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]):
            As in TRL.
        reward_funcs:
            As in TRL.
        args ([`MultiNodeGRPOConfig`] or [`~trl.GRPOConfig`], *optional*):
            A plain `GRPOConfig` is taken literally: it needs `use_vllm=True, vllm_mode="node"`.
        **kwargs:
            As in TRL.

    Raises:
        `ConfigurationError`: before any weights file is opened, the same on every rank.
    """

    _tag_names = [*GRPOTrainer._tag_names, "trl-multinode"]

    def __init__(self, model, reward_funcs=None, args: GRPOConfig | None = None, *more: Any, **kwargs: Any):
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path or type(model).__name__
            args = MultiNodeGRPOConfig(f"{name.split('/')[-1]}-GRPO")
        self.host: NodeHost | None = None
        if not is_node_mode(args):
            if not isinstance(args, MultiNodeGRPOConfig) and args.process_index == 0:
                print("[trl_multinode] node mode is off: a plain trl.GRPOConfig is taken literally. For node mode use "
                      "trl_multinode.GRPOConfig, or use_vllm=True, vllm_mode='node'.", flush=True)  # fmt: skip
            super().__init__(model, reward_funcs, args, *more, **kwargs)
            return
        self.host = NodeHost(args)
        with self.host.watch.guard():
            check_call(self.host, model, args, kwargs.get("train_dataset", more[0] if more else None), kwargs)
            build = partial(self._build_generation, self.host)
            with mock.patch.object(grpo_trainer, "VLLMGeneration", build):
                super().__init__(model, reward_funcs, args, *more, **kwargs)
            self._wire(self.host)

    @staticmethod
    def _build_generation(host: NodeHost, *, mode: str, **keywords: Any) -> NodeGeneration:
        """Called by TRL's `__init__` with what it passes to `VLLMGeneration`."""
        return NodeGeneration(host=host, **keywords)

    def _wire(self, host: NodeHost) -> None:
        host.step = lambda: self.state.global_step
        self._monitor = DivergenceMonitor(host, self.args, self.model, self.vllm_generation)
        self._texts = TextLogging(grpo_trainer, keep=self.args.log_completions)
        self._eval_rounds = 0
        self._meter = StalenessMeter(self.args)
        self._report = StepReport(host, self.accelerator, self._meter, self.vllm_generation)
        self._resume = Resume(self)
        self._upcoming: UpcomingBatches | None = None

    @property
    def steps_per_round(self) -> int:
        """Calls of `training_step` that one generation round serves."""
        return self.args.steps_per_generation * self.num_iterations

    @property
    def max_staleness(self) -> int:
        return field_or_default(self.args, "max_staleness") if self.host is not None else 0

    def last_checkpoint(self) -> str | None:
        """
        The newest checkpoint in `output_dir` that was written to its end, for `train(resume_from_checkpoint=...)`;
        `None` if there is none. Unfinished ones are named in the log. All training ranks call it.

        Raises:
            `ConfigurationError`: on every rank, if nodes see finished checkpoints and have none in common.
        """
        with self._guarded():
            folder = CheckpointLog(Path(self.args.output_dir), self.accelerator).last_whole()
            return str(folder) if folder else None

    def weights_changed(self) -> None:
        """
        Tells the trainer that the model's weights became others without an optimizer step, so that the next generation
        sends them to the engines. All training ranks call it. Without it they are sent once per optimizer step.
        """
        self._last_loaded_step = -1  # TRL's own mark of the step that vLLM has
        if self.host is not None:
            self.vllm_generation.weights_changed()

    # ---- seams ------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        with self._guarded():
            if self.host is not None:
                resume_from_checkpoint = self._resume.choose(resume_from_checkpoint)
                self.weights_changed()
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any):
        self._eval_rounds = 0  # every evaluation samples with the same seeds, wherever a run was resumed
        with self._guarded():
            return super().evaluate(*args, **kwargs)

    @contextmanager
    def _guarded(self):
        if self.host is None:
            yield
        else:
            with self.host.watch.guard():
                yield

    def _get_train_sampler(self, dataset=None):
        sampler = super()._get_train_sampler(dataset)
        return sampler if self.host is None else fast_forward(sampler, self._resume.epochs)

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        if self.max_staleness:
            if self._upcoming is None or self._upcoming.source is not epoch_iterator:
                self._upcoming = UpcomingBatches(epoch_iterator, self.steps_per_round)
            epoch_iterator = self._upcoming.open_window()
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.host is None:
            return super().training_step(*args, **kwargs)
        self._resume.place()
        self.host.phases.step = self.state.global_step
        with self.host.phases("train"):
            return super().training_step(*args, **kwargs)

    def _save_checkpoint(self, model, trial):
        if self.host is None:
            return super()._save_checkpoint(model, trial)
        with self._resume.saving():
            super()._save_checkpoint(model, trial)

    def _load_best_model(self):
        super()._load_best_model()
        self.weights_changed()

    def _generate_and_score_completions(self, inputs):
        if self.host is None:
            return super()._generate_and_score_completions(inputs)
        if not self.model.training:
            self.vllm_generation.begin_round("eval", self._eval_rounds)
            self._eval_rounds += 1
            return self._scored(inputs)
        number = self._step // self.steps_per_round
        following = partial(self._prompts_after, inputs) if self.max_staleness else None
        self.vllm_generation.begin_round("train", number, following)
        output = self._scored(inputs)
        self._meter.add_weights(output)
        self._meter.add_round(*self.vllm_generation.lag)
        return output

    def _scored(self, inputs):
        with self._texts.during_scoring():
            output = super()._generate_and_score_completions(inputs)
        stale = self.model.training and self.vllm_generation.lag[0] > 0
        self._monitor.check(output, stale)
        return output

    def _prompts_after(self, inputs) -> Prompts | None:
        """Token ids of the next round's prompts; `None` if there is no such round, or one that cannot be foreseen."""
        if self._upcoming is None:
            return None
        ahead = self.steps_per_round - self._step % self.steps_per_round
        left = (self.state.max_steps - self.state.global_step) * self.args.gradient_accumulation_steps
        batch = self._upcoming.after(inputs, ahead)
        if batch is None or ahead >= left - self._upcoming.place_in_window(inputs):
            return None
        if "image" in batch[0] or "images" in batch[0]:  # TRL builds the prompts of pictures while it scores
            return None
        prompt_ids, images, _ = self._tokenize_prompts([copy.deepcopy(row["prompt"]) for row in batch])
        return prompt_ids if images is None else None

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        if self.host is None:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._texts.remember(prompts, completions)
        with self.host.phases("reward"):
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if self.host is not None and self.model.training:
            logs |= self._report.metrics(self.vllm_generation.last_sync)
        super().log(logs, start_time)


def check_call(host: NodeHost, model, args: GRPOConfig, dataset, kwargs: dict) -> None:
    """Checks that need the trainer's arguments but no weights; raises `ConfigurationError`."""
    check_fields(args)
    check_dataset(dataset, args)
    check_foreseeable(args, kwargs)
    if kwargs.get("tools") or kwargs.get("environment_factory"):
        config = AutoConfig.from_pretrained(model) if isinstance(model, str) else model.config
        host.check_context(getattr(config.get_text_config(), "max_position_embeddings", 0))
    if host.topology.rank == 0:
        announce(args, host)


def check_foreseeable(args: GRPOConfig, kwargs: dict) -> None:
    """Raises `ConfigurationError` for completions that depend on more than the dataset row, if they run ahead."""
    for name in ("rollout_func", "environment_factory"):
        if kwargs.get(name) and field_or_default(args, "max_staleness"):
            raise ConfigurationError(
                f"`max_staleness=1` generates from the dataset's prompts before `{name}` is called. Use "
                "`max_staleness=0` with it."
            )


def check_dataset(dataset, args: GRPOConfig) -> None:
    """Raises `ConfigurationError` for an empty dataset, or one with fewer prompts than a generation batch takes."""
    if dataset is None or not hasattr(dataset, "__len__"):
        return
    needed = args.generation_batch_size // args.num_generations
    if len(dataset) < needed:
        raise ConfigurationError(
            f"The training dataset has {len(dataset)} rows, one generation batch takes {needed} prompts "
            f"(generation_batch_size {args.generation_batch_size} / num_generations {args.num_generations}). "
            "Use more data, or lower `per_device_train_batch_size` or `steps_per_generation`."
        )
