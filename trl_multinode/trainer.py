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

from .config import MultiNodeGRPOConfig, check_fields, field_or_default, is_node_mode
from .errors import ConfigurationError
from .generation import NodeGeneration
from .host import NodeHost
from .monitor import DivergenceMonitor
from .phases import PHASES, split_advice, summarize
from .text_logging import TextLogging
from .weight_source import keep_head_during_backward

logger = logging.getLogger(__name__)
ADVICE_AT_STEP = 5


class MultiNodeGRPOTrainer(GRPOTrainer):
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
            if not isinstance(args, MultiNodeGRPOConfig) and not args.use_vllm:
                logger.info("Node mode is off: use trl_multinode.GRPOConfig, or use_vllm=True and vllm_mode='node'.")
            super().__init__(model, reward_funcs, args, *more, **kwargs)
            return
        self.host = NodeHost(args)
        with self.host.watch.guard():
            self._check(model, args, more, kwargs)
            build = partial(self._build_generation, self.host)
            with mock.patch.object(grpo_trainer, "VLLMGeneration", build):
                super().__init__(model, reward_funcs, args, *more, **kwargs)
            self._wire(self.host)

    @staticmethod
    def _build_generation(host: NodeHost, *, mode: str, **keywords: Any) -> NodeGeneration:
        """Called by TRL's `__init__` with what it passes to `VLLMGeneration`."""
        return NodeGeneration(host=host, **keywords)

    def _check(self, model, args: GRPOConfig, more: tuple, kwargs: dict) -> None:
        """Checks that need the arguments but no weights."""
        check_fields(args)
        dataset = kwargs.get("train_dataset", more[0] if more else None)
        check_dataset(dataset, args)
        if kwargs.get("tools") or kwargs.get("environment_factory"):
            config = AutoConfig.from_pretrained(model) if isinstance(model, str) else model.config
            positions = getattr(config.get_text_config(), "max_position_embeddings", 0)
            self.host.check_context(positions, has_tools=True)
        if self.host.topology.rank == 0:
            announce(args, self.host)

    def _wire(self, host: NodeHost) -> None:
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        keep_head_during_backward(base)
        host.step = lambda: self.state.global_step
        self._monitor = DivergenceMonitor(host, self.args, self.model, self.vllm_generation)
        self._texts = TextLogging(grpo_trainer, keep=self.args.log_completions)
        self._rounds = {"train": 0, "eval": 0}
        self._advice: list[list[float]] = []

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
            self._log_phases(logs)
        super().log(logs, start_time)

    def _log_phases(self, logs: dict[str, float]) -> None:
        """Every rank takes part: one small gather per log."""
        host, sync = self.host, self.vllm_generation.last_sync
        mine = torch.tensor(host.phases.take_sums(), device=self.accelerator.device).unsqueeze(0)
        per_rank = self.accelerator.gather(mine).tolist()
        logs |= summarize(per_rank, host.topology.ranks_per_node)
        logs |= {"sync/mib": sync.num_bytes / 2**20, "sync/buckets": sync.num_buckets, "sync/gather_s": sync.gather_s,
                 "sync/copy_s": sync.copy_s, "sync/load_s": sync.load_s, "sync/commit_s": sync.commit_s}  # fmt: skip
        self._advise(per_rank)

    def _advise(self, per_rank: list[list[float]]) -> None:
        """Once, after some steps, from this run's own seconds; the first interval has the warm-up in it."""
        self._advice.append([max(column) for column in zip(*per_rank, strict=True)])
        if self.state.global_step < ADVICE_AT_STEP or len(self._advice) < 2 or len(self._advice[0]) == 0:
            return
        rows, self._advice = self._advice[1:], [[]]
        mean = dict(zip(PHASES, (sum(column) / len(rows) for column in zip(*rows, strict=True)), strict=True))
        reserved = sum(len(gpus) for gpus in self.host.devices.per_engine) or len(self.host.devices.per_engine)
        if self.host.topology.rank == 0:
            advice = split_advice(mean["generate"], mean["train"], self.host.topology.ranks_per_node, reserved)
            print(f"[trl_multinode] {advice}", flush=True)


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


def announce(args: GRPOConfig, host: NodeHost) -> None:
    """What node mode does with this run, the changed defaults included; rank 0 prints it."""
    topology, share = host.topology, args.vllm_gpu_memory_utilization
    where = "CPU" if not host.devices.per_engine[0] else f"GPUs {list(host.devices.per_engine)}"
    lines = [
        f"{topology.num_nodes} node(s) x {topology.ranks_per_node} training ranks, "
        f"{len(host.devices.per_engine)} engine(s) per node on {where}",
        f"defaults that differ from TRL's: use_vllm={args.use_vllm}, vllm_mode={args.vllm_mode!r}, "
        f"vllm_gpu_memory_utilization={share if share is not None else '0.9 on a reserved GPU, else 0.3'}",
    ]
    if share == 0.3 and not host.devices.shared_with_training and host.devices.per_engine[0]:
        lines.append(
            "warning: vllm_gpu_memory_utilization=0.3 leaves most of a reserved GPU unused; leave it unset for 0.9"
        )
    seed = field_or_default(args, "rollout_seed")
    lines.append(f"rollout_seed={seed}" + ("" if seed is not None else " (rollouts depend on the layout of the run)"))
    for line in lines:
        print(f"[trl_multinode] {line}", flush=True)
