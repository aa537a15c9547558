"""Gradients of every loss on rows with tokens of several updates: those of our run, and TRL's on the same rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import deepspeed
import torch
import trl
from both_arms import Replay, Scenario, run_ours, run_trls
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import safe_get_full_grad
from scenarios import AtSteps
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from multinode_kit.models import tiny_qwen2

LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
NUM_FIRST = 4  # the rounds that begin before the first update hold hardly any row that sees several
# loss, level of the importance sampling, whether our micro-batches are balanced (not possible with "bnpo")
STEPS = [
    *[("grpo", "token", False)] * NUM_FIRST,
    *((loss, "token", False) for loss in LOSSES),
    ("grpo", "sequence", False),
    *((loss, "token", True) for loss in LOSSES if loss != "bnpo"),
    ("luspo", "sequence", True),
]
SETTINGS = {
    "loss_type": "vespo", "beta": 0.05, "max_steps": len(STEPS), "max_completion_length": 64,
    "per_device_train_batch_size": 8,
    "vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0,
    "generation_kwargs": {"allowed_token_ids": [1, *range(100, 119)]},
    # small steps, because a difference in the last digit of a weight must not grow from step to step
    "learning_rate": 0.3, "max_grad_norm": 0.1,
}  # fmt: skip
IN_FLIGHT = {"max_staleness": 3, "micro_batch_tokens": 256, "balance_across": "world"}


class Taken(trl.GRPOTrainer):
    """TRL's trainer; the rows of a batch are those that our run took."""

    def _generate_and_score_completions(self, inputs):
        return super()._generate_and_score_completions(self.taken.pop(0))


@contextmanager
def spy_on_gradients() -> Iterator[list[torch.Tensor]]:
    """The whole gradient of every optimizer step, as DeepSpeed's optimizer gets it."""
    found, step = [], DeepSpeedEngine.step  # accelerate calls it at the end of the last backward

    def spied(engine, *args, **kwargs):
        parts = [
            safe_get_full_grad(parameter).flatten().float()
            for parameter in engine.module.parameters()
        ]
        found.append(torch.cat(parts))
        return step(engine, *args, **kwargs)

    with mock.patch.object(DeepSpeedEngine, "step", spied):
        yield found


def compare(folder: Path, dataset) -> dict:
    """Both trainers, step by step."""
    taken: list[list[dict]] = []
    prompts: list[str] = []
    versions: list[list[int]] = []
    Taken.taken = taken

    def scenario() -> Scenario:
        model = tiny_qwen2()
        model.config._name_or_path = str(folder / "reference")  # from where TRL loads the reference
        callback = AtSteps(choose)

        def run(trainer):
            callback.trainer, trainer.kept_balance = trainer, getattr(trainer, "_balance", None)
            if trainer.__class__ is not Taken:
                record(trainer, taken, prompts, versions)
            trainer.train()

        return Scenario(
            SETTINGS,
            model=model,
            dataset=dataset,
            keywords={"callbacks": [callback]},
            run=run,
            trls=Taken,
            node_settings=IN_FLIGHT,
        )

    deepspeed.init_distributed("gloo")  # TRL loads the reference model before accelerate does
    unset_hf_deepspeed_config()
    with spy_on_gradients() as mine:
        ours, calls, _ = run_ours(scenario(), folder / "losses-ours", None)
    unset_hf_deepspeed_config()
    with spy_on_gradients() as its:
        theirs = run_trls(
            scenario(), folder / "losses-trl", type("Rows", (Replay,), {"calls": calls})
        )
    norms = [float(gradient.norm()) for gradient in its]
    return {
        "steps": STEPS,
        "prompts": prompts,
        "versions": versions,
        "norms": norms,
        "differences": [
            float((a - b).norm()) / n for a, b, n in zip(mine, its, norms, strict=True)
        ],
        "losses": [
            [log["loss"] for log in each["logs"] if "loss" in log] for each in (ours, theirs)
        ],
        "micro_steps": [log.get("balance/micro_steps", 0) for log in ours["logs"] if "loss" in log],
        "ratios": [
            log["sampling/importance_sampling_ratio/mean"]
            for log in theirs["logs"]
            if "loss" in log
        ],
        "not_taken": len(taken),
    }


def choose(trainer, step: int) -> None:
    trainer.loss_type, trainer.importance_sampling_level, balanced = STEPS[step]
    trainer._balance = trainer.kept_balance if balanced else None


def record(trainer, taken: list, prompts: list, versions: list) -> None:
    """Keep the rows of the dataset that each round takes, and how many updates made each of them."""
    take = trainer.vllm_generation.take_groups

    def recorded(*args):
        rows = take(*args)
        taken.append([dict(row) for row in rows])
        prompts.extend(row["prompt"] for row in rows)
        versions.append(
            [
                len(row.versions)
                for group in trainer.vllm_generation.rounds.taken
                for row in group.rows
            ]
        )
        return rows

    trainer.vllm_generation.take_groups = recorded
