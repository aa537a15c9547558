"""One scenario under `MultiNodeGRPOTrainer` and under TRL's own trainer, on the same completions, and what differed.

Ours runs first, with its engines; what its ranks got from them is kept. Then `trl.GRPOTrainer` runs with its
`VLLMGeneration` replaced by a replay of it, which also insists on the same prompts in the same order.
"""

import gc
import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import deepspeed
import numpy as np
import torch
import trl
from accelerate.state import AcceleratorState
from common import RANK, WORLD
from datasets import Dataset
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl.trainer import grpo_trainer

import trl_multinode
from multinode_kit.models import tiny_qwen2, tiny_tokenizer
from trl_multinode.weights.source import keep_head_during_backward

STEPS = 3
# parts of names that no two runs have in common
OF_THE_CLOCK = (
    "time",
    "runtime",
    "per_second",
    "flos",
)
SETTINGS = {
    "use_cpu": True, "bf16": False, "num_generations": 4, "max_completion_length": 12, "logging_steps": 1,
    "report_to": [], "save_strategy": "no", "gradient_checkpointing": False, "disable_tqdm": True, "optim": "sgd",
    "max_grad_norm": 0.0, "learning_rate": 0.1, "max_steps": STEPS, "per_device_train_batch_size": 4,
    "lr_scheduler_type": "constant", "shuffle_dataset": True,
}  # fmt: skip


def distinct(completion_ids, **_):
    """Reward: distinct tokens."""
    return [float(len(set(ids))) for ids in completion_ids]


@dataclass
class Scenario:
    """What both arms are built from; made anew for each."""

    settings: dict = field(default_factory=dict)  # of the config, on top of `SETTINGS`
    model: object = None
    tokenizer: object = None
    reward_funcs: object = distinct
    dataset: object = None
    keywords: dict = field(default_factory=dict)  # further ones of the trainer
    run: Callable = lambda trainer: trainer.train()
    observe: Callable = lambda trainer: {}  # what else must be the same in both arms
    made_up: bool = False  # no engine in either arm: TRL's own modes passed through
    trls: type = trl.GRPOTrainer  # the other arm
    node_settings: dict = field(default_factory=dict)  # of our config alone

    def __post_init__(self):
        self.model = tiny_qwen2() if self.model is None else self.model
        self.tokenizer = self.tokenizer or tiny_tokenizer()
        self.dataset = self.dataset or Dataset.from_dict(
            {"prompt": [f"{i} + {i + 1} =" for i in range(32)]}
        )


class Weights(TrainerCallback):
    """All trainable parameters, whole, before the first and after every optimizer step. With SGD and no clipping their
    differences are the gradients."""

    def __init__(self):
        self.steps: list[torch.Tensor] = []

    def on_train_begin(self, args, state, control, model=None, **_):
        self.on_step_end(args, state, control, model)

    def on_step_end(self, args, state, control, model=None, **_):
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        sharded = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
        with deepspeed.zero.GatheredParameters(sharded) if sharded else nullcontext():
            self.steps.append(
                torch.cat([whole(parameter.detach()).flatten().clone() for parameter in parameters])
            )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Replay:
    """In the place of TRL's `VLLMGeneration`."""

    calls: list[tuple] = []

    def __init__(self, *, mode: str, model, **_):
        self.mode = mode
        self._model = model
        self._first = True
        context = model.config.get_text_config().max_position_embeddings
        engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=context))
        self.llm = SimpleNamespace(llm_engine=engine)  # asked for by TRL's tool loop

    def sync_weights(self):
        # TRL 1.16 cannot train an untied head under ZeRO-3 without: docs/inside/notes.md
        if self._first:
            keep_head_during_backward(self._model)
        self._first = False

    def generate(self, prompts, images, num_generations, profiler=None):
        asked, completions, logprobs = self.calls.pop(0)
        assert asked == prompts, (
            f"rank {RANK}: TRL's trainer asks for {prompts}, ours asked for {asked}"
        )
        return prompts, completions, logprobs, None


class MadeUp(Replay):
    """Completions that depend on the prompt and the row alone."""

    vllm_client = SimpleNamespace(
        get_server_info=lambda: {"model_config": {"logprobs_mode": "processed_logprobs"}}
    )

    def generate(self, prompts, images, num_generations, profiler=None):
        completions = []
        for row, prompt in enumerate(prompts):
            seed = hashlib.sha256(repr((prompt, row, RANK)).encode()).digest()[:8]
            random = np.random.default_rng(int.from_bytes(seed, "big"))
            completions.append([*random.integers(2, 258, int(random.integers(1, 11))).tolist(), 1])
        return prompts, completions, [[[-5.6]] * len(ids) for ids in completions], None


def compare(name: str, make: Callable[[], Scenario], folder: Path) -> dict:
    """Both arms of a scenario. All ranks; their results agree where the metrics are the world's."""
    unset_hf_deepspeed_config()  # the trainer before left it, and under it a model begins with other weights
    scenario = make()
    generation = MadeUp if scenario.made_up else None
    ours, calls, engine = run_ours(scenario, folder / f"{name}-ours", generation)
    unset_hf_deepspeed_config()
    theirs = run_trls(
        make(), folder / f"{name}-trl", generation or type("Recorded", (Replay,), {"calls": calls})
    )
    return {
        "world": WORLD,
        "engine": engine,
        "mode": ours["mode"],
        "rows": ours["rows"],
        "calls": ours["calls"],
        "not_replayed": 0 if generation else len(calls),
        "moved": [difference(step, ours["weights"][0]) for step in ours["weights"][1:]],
        "weights": [
            difference(a, b) for a, b in zip(ours["weights"], theirs["weights"], strict=True)
        ],
        "missing": sorted(names(theirs["logs"]) - names(ours["logs"])),
        "metrics": metric_differences(ours["logs"], theirs["logs"]),
        "logs": [
            {key: value for key, value in log.items() if not of_the_clock(key)}
            for log in theirs["logs"]
        ],
        "observed": [ours["observed"], theirs["observed"]],
    }


def run_ours(scenario: Scenario, folder: Path, generation) -> tuple[dict, list, str]:
    settings = settings_of(scenario) | scenario.node_settings
    args = trl_multinode.GRPOConfig(output_dir=str(folder), rollout_seed=5, **settings)
    with mock.patch.object(
        grpo_trainer, "VLLMGeneration", generation or grpo_trainer.VLLMGeneration
    ):
        trainer = build(trl_multinode.GRPOTrainer, scenario, args)
    calls, engine = [], "none"
    if trainer.host is not None:
        calls = record(trainer.vllm_generation)
        engine = trainer.vllm_generation.engines[0].ready.model_runner
    try:
        found = run(trainer, scenario)
    finally:
        if trainer.host is not None:
            trainer.host.close()
        let_go(trainer)
    return found | {"rows": sum(len(call[0]) for call in calls), "calls": len(calls)}, calls, engine


def run_trls(scenario: Scenario, folder: Path, generation) -> dict:
    settings = {"use_vllm": True, "vllm_mode": "colocate"} | settings_of(scenario)
    with mock.patch.object(grpo_trainer, "VLLMGeneration", generation):
        trainer = build(scenario.trls, scenario, trl.GRPOConfig(output_dir=str(folder), **settings))
    found = run(trainer, scenario)
    let_go(trainer)
    return found


def settings_of(scenario: Scenario) -> dict:
    return SETTINGS | scenario.settings


def build(trainer_class, scenario: Scenario, args):
    return trainer_class(
        scenario.model, scenario.reward_funcs, args, scenario.dataset, processing_class=scenario.tokenizer,
        **scenario.keywords,
    )  # fmt: skip


def record(generation) -> list[tuple]:
    """Every answer of `generate` from now on, as plain lists."""
    calls, generate = [], generation.generate

    def recorded(prompts, images, num_generations, profiler=None):
        answer = generate(prompts, images, num_generations, profiler)
        calls.append((
            [list(prompt) for prompt in prompts],
            [list(ids) for ids in answer[1]],
            [[list(top) for top in row] for row in answer[2]],
        ))  # fmt: skip
        return answer

    generation.generate = recorded
    return calls


def run(trainer, scenario: Scenario) -> dict:
    weights = Weights()
    trainer.add_callback(weights)
    scenario.run(trainer)
    return {
        "weights": weights.steps,
        "logs": trainer.state.log_history,
        "mode": getattr(getattr(trainer, "vllm_generation", None), "mode", "none"),
        "observed": scenario.observe(trainer),
    }


def let_go(trainer) -> None:
    """DeepSpeed's plugin belongs to one trainer; the process group stays."""
    trainer.accelerator.free_memory()
    AcceleratorState._reset_state()
    gc.collect()


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def names(logs: list[dict]) -> set[str]:
    return {key for log in logs for key in log}


def of_the_clock(key: str) -> bool:
    return any(part in key for part in OF_THE_CLOCK)


def metric_differences(ours: list[dict], theirs: list[dict]) -> dict[str, float]:
    """Largest relative difference of every number that TRL logs."""
    worst: dict[str, float] = {}
    for mine, its in zip(ours, theirs, strict=True):
        for key, value in its.items():
            if isinstance(value, int | float) and not of_the_clock(key) and key in mine:
                # or both are NaN
                same = mine[key] == value or (mine[key] != mine[key] and value != value)
                relative = 0.0 if same else abs(mine[key] - value) / max(abs(mine[key]), abs(value))
                worst[key] = max(worst.get(key, 0.0), relative)
    return worst
