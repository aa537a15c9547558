"""Is a slow reward hidden? Rounds one ahead (`max_staleness=1`), with and without `score_groups`.

    python benchmarks/scoring.py [--quick] [--reward 0.4] [--train 1.2] [--repeats 5]

One rank and one fake engine. Everything but the library has a fixed length, so that the ratios do not depend on the
machine's speed: a completion takes `GENERATE_S` (the engine waits), training takes a fixed number of matrix products
(about `--train` seconds), and the reward function takes `--reward` seconds for each group of its call (it waits, as
for a judge on another machine). In a run the reward's price changes between segments, and the segments take turns:

    free      the reward costs nothing
    slow      the reward takes `--reward` seconds a group
    control   free again; its ratio to `free` says how far two equal things are apart here

`step_ratio` is slow / free. With `score_groups` it is 1 if the rewards are hidden: those of a round run beside each
other, and beside the training of the round before. Without it TRL calls the function with all groups of the rank when
the round is used. The rounds at the beginning of a segment, whose rewards belong to the segment before, are left out.
"""

import argparse
import json
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# ruff: noqa: E402 - the variables above are read when the libraries below are imported

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from transports import spread

from trl_multinode import GRPOConfig, GRPOTrainer
from trl_multinode.testing.faults import FAKE, Faults
from trl_multinode.testing.models import tiny_qwen2, tiny_tokenizer

ARMS = ("free", "slow", "control")
GROUP, GROUPS = 4, 4  # rows of a group, groups of a round
GENERATE_S = 0.6  # of every completion
WARM_UP = 4  # rounds
SKIPPED = 2  # rounds at the beginning of a segment
LIMIT = 1.1  # of `step_ratio` with `score_groups`
RESULTS = Path(__file__).parent / "results" / "scoring.json"


class Training(TrainerCallback):
    """A fixed number of matrix products before each optimizer step, in the place of a large model's training."""

    def __init__(self, seconds: float):
        self._square = torch.randn(256, 256)
        self.products = 0
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            self._square @ self._square
            self.products += 1

    def on_pre_optimizer_step(self, args, state, control, **_):
        for _ in range(self.products):
            self._square @ self._square


class Schedule(TrainerCallback):
    """Changes the price of the reward between segments, and keeps the seconds of each step."""

    def __init__(self, arms: list[str], segment: int, reward_s: float):
        self._arms, self._segment, self._reward_s = arms, segment, reward_s
        self.steps: dict[tuple[int, str], list[float]] = defaultdict(list)  # by segment
        self.price = 0.0
        self._since = 0.0

    def _place(self, step: int) -> tuple[int, int]:
        return divmod(step - WARM_UP, self._segment)

    def on_step_begin(self, args, state, control, **_):
        index, _ = self._place(state.global_step)
        self.price = self._reward_s if index >= 0 and self._arms[index] == "slow" else 0.0
        self._since = self._since or time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        now = time.perf_counter()
        index, inside = self._place(state.global_step - 1)
        if index >= 0 and inside >= SKIPPED:
            self.steps[index, self._arms[index]].append(now - self._since)
        self._since = now

    def reward(self, completions, **_):
        """Wait as long as a judge would, who reads one group after the other."""
        time.sleep(self.price * len(completions) / GROUP)
        return [float(len(set(text))) for text in completions]


def run(score_groups: bool, arms: list[str], segment: int, options: argparse.Namespace) -> Schedule:
    """Train through all segments."""
    schedule = Schedule(arms, segment, options.reward)
    num_steps = WARM_UP + len(arms) * segment
    prompts = [f"{i} + {i + 1} =" for i in range(1 + num_steps * GROUPS)]  # one epoch
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, max_steps=num_steps, num_generations=GROUP,
            per_device_train_batch_size=GROUP * GROUPS, max_completion_length=4, max_staleness=1, learning_rate=1e-6,
            vllm_importance_sampling_mode="token_truncate", vllm_importance_sampling_clip_max=2.0, rollout_seed=0,
            gradient_checkpointing=False, save_strategy="no", report_to=[], disable_tqdm=True,
            score_groups=score_groups,
        )  # fmt: skip
        trainer = GRPOTrainer(
            tiny_qwen2(), schedule.reward, args, Dataset.from_dict({"prompt": prompts}),
            processing_class=tiny_tokenizer(), callbacks=[Training(options.train), schedule],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        trainer.close()
    return schedule


def summarize(steps: dict[tuple[int, str], list[float]]) -> dict:
    """Medians over segments; the ratios pair the segments of one repeat."""
    by_arm = {arm: [median(steps[key]) for key in sorted(steps) if key[1] == arm] for arm in ARMS}

    def ratio(above: str) -> dict:
        return spread([a / b for a, b in zip(by_arm[above], by_arm["free"], strict=True)])

    step_s = {arm: spread(values) for arm, values in by_arm.items()}
    return {"step_s": step_s, "step_ratio": ratio("slow"), "control_ratio": ratio("control")}


def aim(found: dict) -> str:
    """The aim: with `score_groups`, a step with the slow reward takes at most 1.1 times one with the free reward.

    A machine on which two equal arms differ by more than the aim allows cannot decide it.
    """
    hidden = found["with"]
    if not 2 - LIMIT <= hidden["control_ratio"]["median"] <= LIMIT:
        return "undecided"
    return "reached" if hidden["step_ratio"]["median"] <= LIMIT else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat, no file: does it run, not how fast")
    parser.add_argument("--reward", type=float, default=0.4, help="seconds of the slow reward for each group")
    parser.add_argument("--train", type=float, default=1.2, help="seconds of training, about")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.output = 1, Path(os.devnull)
    os.environ.update(Faults().slow_engine(0, GENERATE_S).environment())
    assert FAKE in os.environ["TRL_MULTINODE_ENGINE_MODULE"]
    torch.set_num_threads(1)
    arms = [arm for repeat in range(options.repeats) for arm in (ARMS if repeat % 2 == 0 else ARMS[::-1])]
    found: dict = {
        "reward_s_per_group": options.reward, "groups": GROUPS, "generate_s": GENERATE_S, "train_s": options.train,
        "repeats": options.repeats,
    }  # fmt: skip
    for name, score_groups in (("with", True), ("without", False)):
        found[name] = summarize(run(score_groups, arms, SKIPPED + 3, options).steps)
        print(name, json.dumps(found[name]), flush=True)
    found["aim"] = aim(found)
    print(found["aim"])
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
