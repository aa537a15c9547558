"""`MultiNodeGRPOTrainer`: TRL's `GRPOTrainer` with the engines of every node wired in. Wiring only."""

import logging
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from .config import MultiNodeGRPOConfig, check_fields, is_node_mode
from .errors import ConfigurationError
from .generation import NodeGeneration
from .host import NodeHost
from .microbatches import BalancedGRPOTrainer
from .monitor import DivergenceMonitor
from .reporting import StepReport, announce
from .text_logging import TextLogging

logger = logging.getLogger(__name__)


class MultiNodeGRPOTrainer(BalancedGRPOTrainer):
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
        self._rounds = {"train": 0, "eval": 0}
        self._report = StepReport(host, self.accelerator)

    # ---- seams ------------------------------------------------------------------------------------------------------

    def train(self, *args: Any, **kwargs: Any):
        with self._guarded():
            return super().train(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any):
        with self._guarded():
            return super().evaluate(*args, **kwargs)

    @contextmanager
    def _guarded(self):
        if self.host is None:
            yield
        else:
            with self.host.watch.guard():
                yield

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.host is None:
            return super().training_step(*args, **kwargs)
        self.host.phases.step = self.state.global_step
        with self.host.phases("train"):
            return super().training_step(*args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        if self.host is None:
            return super()._generate_and_score_completions(inputs)
        mode = "train" if self.model.training else "eval"
        self.vllm_generation.seeds.begin_round(mode, self._rounds[mode])
        self._rounds[mode] += 1
        with self._texts.during_scoring():
            output = super()._generate_and_score_completions(inputs)
        self._monitor.check(output)
        return output

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
    if kwargs.get("tools") or kwargs.get("environment_factory"):
        config = AutoConfig.from_pretrained(model) if isinstance(model, str) else model.config
        host.check_context(getattr(config.get_text_config(), "max_position_embeddings", 0))
    if host.topology.rank == 0:
        announce(args, host)


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
