"""Training with and without TRL's scoring pass, on the same rows: CPU seconds of a step, without its generation.

    python benchmarks/training.py            # every loss, plain and balanced: about 12 minutes on one core
    python benchmarks/training.py --quick    # two cells with few repeats: a minute

One rank and an engine of this process that answers at once. Arms take turns within one training, in another order each
time, so drift of the machine meets all of them. In each turn they get the same rows:

    pass      TRL's scoring pass before the losses
    loss      the losses' own log-probs (`trl_multinode/rollouts/loss_scores.py`)
    control   `pass` again; its ratio to `pass` says how far two equal things are apart here

Gradients are compared in a second, short training of each kind, which sees the same rows.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
import numpy as np
import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback

# before this folder, which has an `agents.py` too
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import agents

from multinode_kit.models import tiny_qwen2
from trl_multinode.engine.client import Rollout

RESULTS = Path(__file__).parent / "results" / "training.json"
ARMS = ("pass", "loss", "control")
LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
WITH_CHECKPOINTING = ("dapo",)
WARM_UP = 3  # steps
ROWS, TOKENS, PROMPT = 8, 192, 32
SETTINGS = {
    "num_generations": 4, "per_device_train_batch_size": ROWS // 2, "gradient_accumulation_steps": 2,
    "max_completion_length": TOKENS, "logprob_divergence_limit": 0.0, "learning_rate": 0.0, "optim": "sgd",
    "rollout_seed": 1, "logging_steps": 1000, "shuffle_dataset": False,
}  # fmt: skip


class Instant(agents.ScriptedEngine):
    """Engine that answers the n-th time with the same tokens as `num_generations` times before."""

    answers: Counter[tuple[int, ...]] = Counter()

    def row(self, prompt: Any, seed: int, max_tokens: int) -> Rollout:
        key = tuple(map(int, prompt))
        number = self.answers[key] % SETTINGS["num_generations"]
        self.answers[key] += 1
        random = np.random.default_rng([number, *key])
        tokens = random.integers(10, 250, random.integers(TOKENS // 2, TOKENS)).astype(np.int32)
        logprobs = random.normal(-5.5, 0.2, len(tokens)).astype(np.float32)
        return Rollout(tokens, logprobs, self.version, 0)


class Turns(TrainerCallback):
    """Chooses the arm of each step, and keeps its CPU seconds, and the gradients on request."""

    def __init__(self, arms: tuple[str, ...], keeps_gradients: bool = False):
        self._arms, self._keeps = arms, keeps_gradients
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.gradients: list[torch.Tensor] = []
        self.generating = 0.0
        self.trainer: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        turn, place = divmod(state.global_step, len(self._arms))
        self._arm = self._arms[(place + turn) % len(self._arms)]
        self.trainer._loss_scores._replaces = self._arm == "loss"
        self.generating, self._since = 0.0, time.process_time()

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any, **_: Any
    ) -> None:
        if self._keeps:
            self.gradients.append(torch.cat([one.grad.flatten() for one in model.parameters()]))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seconds = time.process_time() - self._since - self.generating
        if state.global_step > WARM_UP * len(self._arms):
            self.seconds[self._arm].append(seconds)


def trained(arms: tuple[str, ...], steps: int, **settings: Any) -> Turns:
    """Train, and return what the callback has kept."""
    turns = Turns(arms, keeps_gradients=len(arms) == 1)
    agents.agent_model = lambda seed=0: tiny_qwen2(300, tied=False, layers=6, hidden=256)
    per_step = ROWS // SETTINGS["num_generations"]
    random = np.random.default_rng(0)
    prompts = random.integers(97, 122, (steps // len(arms), 1, per_step, PROMPT))
    prompts = prompts.repeat(len(arms), axis=1).reshape(-1, PROMPT)
    dataset = Dataset.from_dict({"prompt": ["".join(map(chr, row)) for row in prompts]})
    with tempfile.TemporaryDirectory() as folder, agents.engines_here(lambda *_: "", kind=Instant):
        trainer = agents.ours(
            Path(folder), reward, dataset, max_steps=steps, **(SETTINGS | settings)
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(turns)
        turns.trainer = trainer
        generate = trainer.vllm_generation.generate

        def timed(*args: Any, **kwargs: Any) -> Any:
            since = time.process_time()
            try:
                return generate(*args, **kwargs)
            finally:
                turns.generating += time.process_time() - since

        trainer.vllm_generation.generate = timed
        trainer.train()
        trainer.close()
    return turns


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 11) for ids in completion_ids]


def cell(repeats: int, **settings: Any) -> dict[str, Any]:
    """Return the figures of one loss and batching."""
    one, other = (trained((arm,), 2, **settings).gradients for arm in ("pass", "loss"))
    worst = max(float((a - b).norm() / a.norm()) for a, b in zip(one, other, strict=True))
    seconds = trained(ARMS, (WARM_UP + repeats) * len(ARMS), **settings).seconds
    rounds = list(zip(*(seconds[arm] for arm in ARMS), strict=True))
    return {
        "train_phase_speedup": spread([with_pass / loss for with_pass, loss, _ in rounds]),
        "control_ratio": spread([again / with_pass for with_pass, _, again in rounds]),
        "gradient_rel_diff": float(f"{worst:.2g}"),
        "pass_cpu_s": round(median(seconds["pass"]), 3),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Return median and the middle half of the values."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two cells; writes nothing")
    parser.add_argument("--repeats", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    losses, repeats = (LOSSES[:1], 2) if options.quick else (LOSSES, options.repeats)
    found: dict[str, Any] = {"with_checkpointing": {}}
    for loss in losses:
        for batching, settings in {"plain": {}, "balanced": {"micro_batch_tokens": 1024}}.items():
            if (loss, batching) == ("bnpo", "balanced"):
                continue  # its micro-batches cannot be regrouped
            sequence = {"importance_sampling_level": "sequence"} if loss == "luspo" else {}
            name = f"{loss}, {batching}"
            found[name] = cell(repeats, loss_type=loss, **settings, **sequence)
            print(name, json.dumps(found[name]), flush=True)
            if loss in WITH_CHECKPOINTING:
                checkpointed = cell(
                    repeats, loss_type=loss, gradient_checkpointing=True, **settings
                )
                found["with_checkpointing"][name] = checkpointed
                print(name, "with checkpointing", json.dumps(checkpointed), flush=True)
    if not options.quick:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
