"""Does `score_groups` hide a slow reward? One rank and one vLLM engine, each on a core of its own.

    python benchmarks/scoring.py [--quick] [--mixes waits ...]

The reward takes `reward_s` for each group, and the step is compared with the same reward free of charge. The seconds
are a column of the dataset, so arms take turns in one training run, and drift of the machine meets all of them:

    free      the reward takes no time
    slow      it takes `reward_s` for a group
    control   `free` again; its ratio to `free` says how far two equal things are apart here

A second run has the same slow reward without `score_groups`: TRL calls it in the round, with the rows of all groups.

    waits        2 s of waiting in a sync function, `max_staleness=1`
    awaits       2 s in an async function, `max_staleness=1`
    computes     0.5 s of pure Python in a process (`score_groups=2`, cores of their own), `max_staleness=1`
    same_round   0.2 s of waiting, `max_staleness=0`: beside the generation of the other groups of its round, of which
                 the engine runs one at a time; the reward of the last group cannot be hidden
"""

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# the variables are read when the libraries below are imported
import psutil
import slow_rewards
import torch
from datasets import Dataset

# also binds the engine to its core
from overlap import (
    ENGINE_CORE,
    RANK_CORE,
    Schedule,
    pin,
    spread,
)
from slow_rewards import GROUP
from transformers import PrinterCallback

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from multinode_kit.models import tiny_qwen2, tiny_tokenizer
from trl_multinode import GRPOConfig, GRPOTrainer

ARMS = ("free", "slow", "control")
WARM_UP_ROUNDS = 2
POOL_CORES = {2, 3}
SHORT = ("step_ratio", "control_ratio", "step_ratio_in_round")
RESULTS = Path(__file__).parent / "results" / "scoring.json"


@dataclass(frozen=True)
class Mix:
    """A reward, and the round beside which it runs."""

    function: str  # of `slow_rewards.py`
    reward_s: float = 2.0  # of each group
    processes: int = 0
    max_staleness: int = 1
    num_rows: int = 16
    num_tokens: int = 24  # of every completion
    num_iterations: int = (
        80  # optimizer steps per round: training is longer than generation and a reward
    )
    max_num_seqs: int = 16


MIXES = {
    "waits": Mix("waits"),
    "awaits": Mix("awaits"),
    "computes": Mix("computes", reward_s=0.5, processes=2),
    "same_round": Mix(
        "waits",
        reward_s=0.2,
        max_staleness=0,
        num_rows=32,
        num_tokens=96,
        num_iterations=1,
        max_num_seqs=4,
    ),
}


class Segments(Schedule):
    """Schedule whose arms are only names of segments."""

    def arm_of(self, step: int) -> tuple[str, int, int]:
        index, inside = divmod(step // self.per_round - WARM_UP_ROUNDS, self.segment)
        return (self.arms[index] if 0 <= index < len(self.arms) else "", index, inside)

    def on_step_begin(self, args, state, control, **_):
        """Do nothing: the dataset has the arms."""

    def on_log(self, args, state, control, logs, **_):
        super().on_log(args, state, control, logs)
        if "loss" in logs and "reward_seconds" in logs:
            self.steps[-1]["reward_s"] = logs["reward_seconds"]


def rows_of(mix: Mix, schedule: Segments, num_rounds: int) -> Dataset:
    """Return the prompts in the order of the rounds, each with the seconds that its reward takes."""
    rows = []
    for number in range(num_rounds):
        arm, _, _ = schedule.arm_of(number * mix.num_iterations)
        reward_s = mix.reward_s if arm == "slow" else 0.0
        rows += [
            {"prompt": f"{number} + {i} =", "reward_s": reward_s}
            for i in range(mix.num_rows // GROUP)
        ]
    return Dataset.from_list(rows)


def build(
    mix: Mix, folder: Path, schedule: Segments, num_rounds: int, score_groups: int | None
) -> GRPOTrainer:
    args = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        max_steps=num_rounds * mix.num_iterations,
        per_device_train_batch_size=mix.num_rows,
        num_generations=GROUP,
        num_iterations=mix.num_iterations,
        max_completion_length=mix.num_tokens,
        generation_kwargs={"ignore_eos": True},
        engine_kwargs={"max_num_seqs": mix.max_num_seqs},
        shuffle_dataset=False,
        learning_rate=1e-6,
        max_staleness=mix.max_staleness,
        score_groups=score_groups,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
        rollout_seed=0,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        tiny_qwen2(hidden=64, layers=8), getattr(slow_rewards, mix.function), args,
        rows_of(mix, schedule, num_rounds), processing_class=tiny_tokenizer(), callbacks=[schedule],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    schedule.trainer = trainer
    return trainer


def pin_all() -> None:
    """Give the rank and the engine a core each, and processes of rewards the others."""
    here = psutil.Process()
    for process in here.children(recursive=True):
        scores = "trl_multinode.rollouts.scoring_process" in process.cmdline()
        if not scores:
            pin(process.pid, ENGINE_CORE)
        elif allowed := POOL_CORES & set(range(os.cpu_count() or 1)):
            process.cpu_affinity(list(allowed))
    pin(here.pid, RANK_CORE)


def rounds_of(
    mix: Mix, arms: list[str], segment: int, score_groups: int | None
) -> dict[tuple[int, str], list[dict]]:
    """Train, and return the rounds of each segment."""
    schedule = Segments(arms, segment, mix.num_iterations)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(
            mix, Path(folder), schedule, WARM_UP_ROUNDS + len(arms) * segment, score_groups
        )
        pin_all()
        trainer.train()
        trainer.close()
    return by_segment(schedule.steps, mix)


def by_segment(steps: list[dict], mix: Mix) -> dict[tuple[int, str], list[dict]]:
    """Return the rounds of each segment, which had the reward of their arm.

    With `max_staleness=1` a round's rewards are computed while the round before trains. So the last round of a segment
    trains beside the rewards of the next arm, and is left out as well.
    """
    found: dict[tuple[int, str], list[dict]] = defaultdict(list)
    for start in range(0, len(steps), mix.num_iterations):
        part = steps[start : start + mix.num_iterations]
        first = part[0]
        if first["arm"] and first["round"] > 0:
            reward_s = first["reward_s"]  # as the function measured it
            if first["arm"] == "slow":
                assert reward_s >= mix.reward_s, f"the reward took {reward_s} s"
            found[first["segment"], first["arm"]].append(
                {"step_s": sum(step["step_s"] for step in part), "reward_s": reward_s}
            )
    return {key: rounds[: -mix.max_staleness or None] for key, rounds in found.items()}


def summarize(
    segments: dict[tuple[int, str], list[dict]], in_round: list[dict], mix: Mix, segment: int
) -> dict:
    """Medians over segments; ratios pair the segments of one repeat."""
    step = {
        arm: [
            median(row["step_s"] for row in rows)
            for (_, its), rows in sorted(segments.items())
            if its == arm
        ]
        for arm in ARMS
    }

    def ratio(above: list[float], below: list[float]) -> dict:
        return spread([a / b for a, b in zip(above, below, strict=True)])

    whole = median(row["step_s"] for row in in_round)
    return {
        "mix": asdict(mix),
        "groups": mix.num_rows // GROUP,
        "repeats": len(step["slow"]),
        "rounds_per_segment": segment - 1 - mix.max_staleness,
        "step_s": {arm: spread(step[arm]) for arm in ARMS} | {"in_round": round(whole, 4)},
        "step_ratio": ratio(step["slow"], step["free"]),
        "control_ratio": ratio(step["control"], step["free"]),
        "step_ratio_in_round": spread([whole / one for one in step["free"]]),
    }


def run(mix: Mix, repeats: int, segment: int) -> dict:
    arms = [arm for repeat in range(repeats) for arm in (ARMS if repeat % 2 == 0 else ARMS[::-1])]
    segments = rounds_of(mix, arms, segment, score_groups=mix.processes)
    ((_, in_round),) = rounds_of(mix, ["slow"], 2 + mix.max_staleness, score_groups=None).items()
    return summarize(segments, in_round, mix, segment)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="two repeats: does it run, not how fast"
    )
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("rank and engine need a core each; this process may use one only")
    torch.set_num_threads(1)
    repeats, segment = (2, 3) if options.quick else (4, 4)
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    for name in options.mixes:
        results[name] = run(MIXES[name], repeats, segment)
        print(name, json.dumps({key: results[name][key] for key in SHORT}), flush=True)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
