"""Does training hide the tools of the next round? One rank and one vLLM engine, each on a core of its own.

    python benchmarks/agents.py [--quick] [--mixes training_heavy ...]

Every completion calls a tool that sleeps, and answers. With `max_staleness=1` a step should take
max(T_rollouts, T_train) + T_sync; T_rollouts is generation and tools. Three arms run in one training run, one segment
after the other, so that drift of the machine meets all of them:

    alone     nothing runs ahead: a round's rollouts, each group in its thread, then its training
    ahead     max_staleness=1
    control   `alone` again; its ratio to `alone` says how far two equal things are apart here

T_rollouts, T_train and T_sync are those of `alone`. A second run, `max_staleness=0`, is TRL's own loop in the main
call, which calls the tools of all rows one after the other. `five_seconds` has a tool of 5 s; those of the
other mixes are scaled down to a tenth and a fifth of it.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# the variables are read when the libraries below are imported
import psutil
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
from transformers import PrinterCallback

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from multinode_kit.tool_model import tool_model, tool_tokenizer
from trl_multinode import GRPOConfig, GRPOTrainer

GROUP = 2
CALLS = "tools/call_frequency"
ARMS = ("alone", "ahead", "control")
WARM_UP_ROUNDS = 2
SHORT = ("step_ratio_vs_max", "control_ratio", "speedup_over_alone", "speedup_over_synchronous")
RESULTS = Path(__file__).parent / "results" / "agents.json"


@dataclass(frozen=True)
class Mix:
    """A balance of rollouts and training."""

    tool_s: float = 0.5  # of each row's tool
    num_rows: int = 8
    num_iterations: int = 1  # optimizer steps per round: more training for the same rollouts
    hidden: int = 64  # of the model
    layers: int = 4
    repeats: int = 4


MIXES = {
    "training_heavy": Mix(num_iterations=4),
    "tools_heavy": Mix(tool_s=1.0),
    "five_seconds": Mix(tool_s=5.0, num_iterations=24, repeats=2),
}


class TimedTrainer(GRPOTrainer):
    """Trainer that can leave out what runs ahead, and notes how long a round's rollouts and sync took."""

    schedule: Schedule
    runs_ahead = False

    def bare(self, on: bool) -> None:
        """Do nothing: this benchmark has no such arm."""

    def _batch_ahead(self, inputs, rounds: int):
        return super()._batch_ahead(inputs, rounds) if rounds == 0 or self.runs_ahead else None

    def time_rounds(self) -> None:
        generation = self.vllm_generation
        for name in ("take_groups", "sync_weights"):
            setattr(generation, name, partial(self._timed, name, getattr(generation, name)))

    def _timed(self, name: str, call, *args):
        start = time.perf_counter()
        try:
            return call(*args)
        finally:
            self.schedule.seconds[name] += time.perf_counter() - start


class Segments(Schedule):
    """Schedule whose arm `ahead` lets rounds run ahead."""

    def arm_of(self, step: int) -> tuple[str, int, int]:
        index, inside = divmod(step // self.per_round - WARM_UP_ROUNDS, self.segment)
        return (self.arms[index] if 0 <= index < len(self.arms) else "", index, inside)

    def on_step_begin(self, args, state, control, **_):
        self.trainer.runs_ahead = self.arm_of(state.global_step)[0] == "ahead"


def build(
    mix: Mix, folder: Path, schedule: Segments, num_rounds: int, max_staleness: int
) -> TimedTrainer:
    def look_up(a: int, b: int) -> int:
        """
        Adds two numbers, slowly.

        Args:
            a: The first number.
            b: The second number.

        Returns:
            The sum.
        """
        time.sleep(mix.tool_s)
        return a + b

    look_up.__name__ = "add"  # as the model calls it
    args = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        max_steps=num_rounds * mix.num_iterations,
        per_device_train_batch_size=mix.num_rows,
        num_generations=GROUP,
        num_iterations=mix.num_iterations,
        max_completion_length=200,
        max_tool_calling_iterations=1,
        learning_rate=1e-6,
        max_staleness=max_staleness,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
        rollout_seed=0,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    prompts = [
        [{"role": "user", "content": f"{i} + {i + 1}?"}]
        for i in range(num_rounds * mix.num_rows // GROUP)
    ]
    trainer = TimedTrainer(
        tool_model(calls=16.0, hidden=mix.hidden, layers=mix.layers),
        lambda completion_ids, **_: [float(len(ids)) for ids in completion_ids],
        args, Dataset.from_dict({"prompt": prompts}), processing_class=tool_tokenizer(), tools=[look_up],
        callbacks=[schedule],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.schedule, schedule.trainer = schedule, trainer
    trainer.time_rounds()
    return trainer


def rounds_of(
    mix: Mix, arms: list[str], segment: int, max_staleness: int
) -> dict[tuple[int, str], list[dict]]:
    """Train, and return the seconds of each segment's rounds but the first one, which the arm before has made."""
    schedule = Segments(arms, segment, mix.num_iterations)
    with tempfile.TemporaryDirectory() as folder:
        num_rounds = WARM_UP_ROUNDS + len(arms) * segment
        trainer = build(mix, Path(folder), schedule, num_rounds, max_staleness)
        for process in psutil.Process().children(recursive=True):
            pin(process.pid, ENGINE_CORE)
        pin(os.getpid(), RANK_CORE)
        trainer.train()
        calls = [entry[CALLS] for entry in trainer.state.log_history if CALLS in entry]
        assert min(calls) >= 1.0, "a row called no tool"
        trainer.close()
    return by_segment(schedule.steps, mix.num_iterations)


def by_segment(steps: list[dict], per_round: int) -> dict[tuple[int, str], list[dict]]:
    found: dict[tuple[int, str], list[dict]] = defaultdict(list)
    for start in range(0, len(steps), per_round):
        part = steps[start : start + per_round]
        if part[0]["arm"] and part[0]["round"] > 0:
            names = ("step_s", "take_groups", "sync_weights")
            total = {name: sum(step.get(name, 0.0) for step in part) for name in names}
            found[part[0]["segment"], part[0]["arm"]].append(total)
    return found


def summarize(
    segments: dict[tuple[int, str], list[dict]], synchronous: list[dict], mix: Mix, segment: int
) -> dict:
    """Medians over segments; ratios pair the segments of one repeat."""

    def of(arm: str, name: str) -> list[float]:
        return [
            median(row[name] for row in rows)
            for (_, its), rows in sorted(segments.items())
            if its == arm
        ]

    step = {arm: of(arm, "step_s") for arm in ARMS}
    # the sync of a round that begins alone is inside of `take_groups`
    sync = of("alone", "sync_weights")
    rollouts = [taken - sent for taken, sent in zip(of("alone", "take_groups"), sync, strict=True)]
    train = [a - b - c for a, b, c in zip(step["alone"], rollouts, sync, strict=True)]
    ideal = [max(r, t) + s for r, t, s in zip(rollouts, train, sync, strict=True)]

    def ratio(above: list[float], below: list[float]) -> dict:
        return spread([a / b for a, b in zip(above, below, strict=True)])

    whole = median(row["step_s"] for row in synchronous)
    return {
        "mix": asdict(mix),
        "repeats": len(ideal),
        "rounds_per_segment": segment - 1,
        "step_s": {arm: spread(step[arm]) for arm in ARMS} | {"synchronous": round(whole, 4)},
        "t_rollouts_s": spread(rollouts),
        "t_train_s": spread(train),
        "t_sync_s": spread(sync),
        "step_ratio_vs_max": ratio(step["ahead"], ideal),
        "control_ratio": ratio(step["control"], step["alone"]),
        "speedup_over_alone": ratio(step["alone"], step["ahead"]),
        "speedup_over_synchronous": spread([whole / one for one in step["ahead"]]),
    }


def run(mix: Mix, repeats: int, segment: int) -> dict:
    arms = [arm for repeat in range(repeats) for arm in (ARMS if repeat % 2 == 0 else ARMS[::-1])]
    segments = rounds_of(mix, arms, segment, max_staleness=1)
    ((_, synchronous),) = rounds_of(mix, ["synchronous"], 3, max_staleness=0).items()
    return summarize(segments, synchronous, mix, segment)


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
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    for name in options.mixes:
        mix = MIXES[name]
        results[name] = run(mix, 2, 3) if options.quick else run(mix, mix.repeats, 4)
        print(name, json.dumps({key: results[name][key] for key in SHORT}), flush=True)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
