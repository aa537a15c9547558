"""Does training hide generation? One rank and one engine, each on a core of its own.

    python benchmarks/overlap.py [--quick] [--mixes balanced ...]

A step of `max_staleness=1` should take max(T_gen, T_train) + T_sync. All arms run in one training run, one segment
after the other, so that drift of the machine meets all of them:

    sync      max_staleness=0
    overlap   max_staleness=1
    control   max_staleness=0 again; its ratio to `sync` says how far two equal things are apart here
    bare      max_staleness=0 without the code of this feature: what it costs when it is off

T_gen, T_sync are the seconds inside `generate` and `sync_weights` in `sync`; T_train is the rest of the step.

Two cores of one machine share more than two devices do (power, cache, memory, often the floating-point units), so both
halves slow down when they run at once, whoever schedules them. `contention` says by how much: the speed of a process
that multiplies matrices, walks through memory, or runs Python, with its like on the other core.
`step_ratio_vs_max_side_by_side` divides by max(T_gen, T_train) + T_sync as measured while both run, which is what the
loop itself answers for.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

# the first two that this process may use; one core for both, if there is one, is refused later
RANK_CORE, ENGINE_CORE = (sorted(os.sched_getaffinity(0)) * 2)[:2]
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(ENGINE_CORE))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# ruff: noqa: E402 - the variables above are read when the libraries below are imported

import psutil
import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from multinode_kit.models import tiny_qwen2, tiny_tokenizer
from trl_multinode import GRPOConfig, GRPOTrainer

KEYS = ("step_s", "generate", "sync_weights", "ahead_s", "waited_s")
ARMS = ("sync", "overlap", "control", "bare")
WARM_UP_STEPS = 4  # of the run; the first step of every segment is left out as well
SHORT = (
    "step_ratio_vs_max",
    "step_ratio_vs_max_side_by_side",
    "speedup",
    "control_ratio",
    "cost_when_off",
)
RESULTS = Path(__file__).parent / "results" / "overlap.json"


@dataclass(frozen=True)
class Mix:
    """A balance of generation and training."""

    hidden: int = 64  # of the model: small, because matrices of two cores get in each other's way
    layers: int = 8
    num_rows: int = 48
    num_tokens: int = 32  # of every completion
    num_iterations: int = 1  # optimizer steps per round: more training for the same generation
    reward_s: float = 0.0  # of pure Python in the reward function


MIXES = {
    "balanced": Mix(num_iterations=2),
    "generation_heavy": Mix(num_rows=16, num_tokens=96),
    "training_heavy": Mix(num_iterations=5),
    "slow_reward": Mix(layers=4, reward_s=0.5),
}


def burn(seconds: float) -> None:
    """Pure Python for so long: holds the interpreter as a parser or a sandbox does."""
    end, total = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        total += sum(range(100))


class Schedule(TrainerCallback):
    """Switches the arm between segments and notes when each step ended."""

    def __init__(self, arms: list[str], segment: int, per_round: int):
        self.arms, self.segment, self.per_round = arms, segment, per_round
        self.steps: list[dict] = []
        self.seconds: dict[str, float] = defaultdict(float)
        self._since = time.perf_counter()

    def arm_of(self, step: int) -> tuple[str, int, int]:
        """Arm, number of the segment, round inside it."""
        index, inside = divmod(step // self.per_round - WARM_UP_STEPS, self.segment)
        return (self.arms[index] if 0 <= index < len(self.arms) else "", index, inside)

    def on_train_begin(self, args, state, control, **_):
        self._since = time.perf_counter()

    def on_step_begin(self, args, state, control, **_):
        arm, _, _ = self.arm_of(state.global_step)
        self.trainer.runs_ahead = arm == "overlap"
        self.trainer.bare(arm == "bare")

    def on_log(self, args, state, control, logs, **_):
        if "loss" not in logs:
            return
        now = time.perf_counter()
        arm, index, inside = self.arm_of(state.global_step - 1)
        step = {
            "arm": arm,
            "segment": index,
            "round": inside,
            "step_s": now - self._since,
            **self.seconds,
        }
        self.steps.append(step | {"engine/busy": logs.get("engine/busy", 0.0)})
        self.seconds.clear()
        self._since = now


class TimedTrainer(GRPOTrainer):
    """Knows how long its generation object took, and can do without the feature's own code."""

    schedule: Schedule
    runs_ahead = False

    def _batch_ahead(self, inputs, rounds):
        """Nothing is foreseen in the other arms: that is `max_staleness=0`, and batches keep their order."""
        return super()._batch_ahead(inputs, rounds) if self.runs_ahead else None

    def time_generation(self) -> None:
        for name in ("generate", "sync_weights"):
            setattr(
                self.vllm_generation, name, self._timed(name, getattr(self.vllm_generation, name))
            )
        groups = self.vllm_generation.rounds.groups
        groups.take_seconds = self._noted(groups.take_seconds)

    def _noted(self, take_seconds):
        def noted():
            generated_s, waited_s = take_seconds()
            self.schedule.seconds["ahead_s"] += generated_s
            self.schedule.seconds["waited_s"] += waited_s
            return generated_s, waited_s

        return noted

    def _timed(self, name, call):
        def timed(*args, **kwargs):
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.schedule.seconds[name] += time.perf_counter() - start

        return timed

    def bare(self, on: bool) -> None:
        """Replace what a step does for this feature at staleness 0 by nothing, or put it back."""
        parts = [(self._meter, "add_weights"), (self._meter, "add_round")]
        for thing, name in parts:
            thing.__dict__.pop(name, None)
            if on:
                setattr(thing, name, lambda *_: None)


def pin(pid: int, core: int) -> None:
    """All threads of a process: the system call takes one thread at a time."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def build(mix: Mix, folder: Path, schedule: Schedule, num_steps: int) -> TimedTrainer:
    def reward(completions, **_):
        burn(mix.reward_s)
        return [float(len(set(text))) for text in completions]

    args = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        max_steps=num_steps,
        per_device_train_batch_size=mix.num_rows,
        num_generations=8,
        num_iterations=mix.num_iterations,
        max_completion_length=mix.num_tokens,
        generation_kwargs={"ignore_eos": True},
        learning_rate=1e-6,
        max_staleness=1,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
        rollout_seed=0,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    # one epoch: no bubble
    prompts = [f"{i} + {i + 1} =" for i in range(1 + num_steps * mix.num_rows // 8)]
    model = tiny_qwen2(hidden=mix.hidden, layers=mix.layers)
    trainer = TimedTrainer(
        model, reward, args, Dataset.from_dict({"prompt": prompts}), processing_class=tiny_tokenizer(),
        callbacks=[schedule],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.schedule, schedule.trainer = schedule, trainer
    trainer.time_generation()
    return trainer


def run(mix: Mix, repeats: int, segment: int) -> dict:
    arms = [arm for repeat in range(repeats) for arm in (ARMS if repeat % 2 == 0 else ARMS[::-1])]
    schedule = Schedule(arms, segment, mix.num_iterations)
    num_steps = (WARM_UP_STEPS + len(arms) * segment) * mix.num_iterations
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(mix, Path(folder), schedule, num_steps)
        for process in psutil.Process().children(recursive=True):
            pin(process.pid, ENGINE_CORE)
        pin(os.getpid(), RANK_CORE)
        trainer.train()
        trainer.host.close()
    return summarize(schedule.steps, mix, repeats, segment)


def rounds_of(steps: list[dict], mix: Mix) -> dict[tuple[str, int], list[dict]]:
    """Per segment the seconds of its rounds; the first round of a segment belongs to the arm before."""
    segments: dict[tuple[str, int], list[dict]] = defaultdict(list)
    for start in range(0, len(steps), mix.num_iterations):
        part = steps[start : start + mix.num_iterations]
        if part[0]["arm"] and part[0]["round"] > 0:
            total = {key: sum(step.get(key, 0.0) for step in part) for key in KEYS}
            total["hidden"] = (total["ahead_s"] - total["waited_s"]) / total["step_s"]
            total["busy_ranks"] = 1 - (total["generate"] + total["waited_s"]) / total["step_s"]
            # since the last sync, that is of a whole round
            total["busy_engines"] = part[0]["engine/busy"]
            segments[part[0]["arm"], part[0]["segment"]].append(total)
    return segments


def spread(values: list[float]) -> dict:
    return {
        "median": round(median(values), 4),
        "low": round(min(values), 4),
        "high": round(max(values), 4),
    }


def summarize(steps: list[dict], mix: Mix, repeats: int, segment: int) -> dict:
    """Medians over segments; ratios pair the segments of one repeat."""
    segments = rounds_of(steps, mix)
    by_arm = {
        arm: [segments[key] for key in sorted(segments, key=lambda k: k[1]) if key[0] == arm]
        for arm in ARMS
    }

    def of(arm: str, key: str) -> list[float]:
        return [median(row[key] for row in rows) for rows in by_arm[arm]]

    step = {arm: of(arm, "step_s") for arm in ARMS}
    gen, sync = of("sync", "generate"), of("sync", "sync_weights")
    train = [s - g - w for s, g, w in zip(step["sync"], gen, sync, strict=True)]
    ideal = [max(g, t) + w for g, t, w in zip(gen, train, sync, strict=True)]
    # While both run: the open round's own seconds; a rank's step without its waiting and its sync (which begins with
    # waiting for the open round).
    beside_gen, waited = of("overlap", "ahead_s"), of("overlap", "waited_s")
    beside_sync = of("overlap", "sync_weights")
    synced = [s - w for s, w in zip(beside_sync, waited, strict=True)]
    beside_train = [a - b for a, b in zip(step["overlap"], beside_sync, strict=True)]
    beside = [max(g, t) + w for g, t, w in zip(beside_gen, beside_train, synced, strict=True)]

    def ratio(above: list[float], below: list[float]) -> dict:
        return spread([a / b for a, b in zip(above, below, strict=True)])

    def share(arm: str, key: str) -> float:
        return round(median(row[key] for rows in by_arm[arm] for row in rows), 3)

    return {
        "mix": asdict(mix),
        "repeats": repeats,
        "rounds_per_segment": segment - 1,
        "step_s": {arm: spread(step[arm]) for arm in ARMS},
        "t_gen_s": spread(gen),
        "t_train_s": spread(train),
        "t_sync_s": spread(sync),
        "step_ratio_vs_max": ratio(step["overlap"], ideal),
        "step_ratio_vs_max_side_by_side": ratio(step["overlap"], beside),
        "side_by_side": {
            "t_gen_s": spread(beside_gen),
            "t_train_s": spread(beside_train),
            "t_sync_s": spread(synced),
        },
        "speedup": ratio(step["sync"], step["overlap"]),
        "best_possible_speedup": ratio(step["sync"], ideal),
        "control_ratio": ratio(step["control"], step["sync"]),
        "cost_when_off": ratio(step["sync"], step["bare"]),
        "hidden_share": share("overlap", "hidden"),
        "busy_share": {
            arm: {"ranks": share(arm, "busy_ranks"), "engines": share(arm, "busy_engines")}
            for arm in ("sync", "overlap")
        },
    }


WORK = {  # each a few milliseconds
    "matrices": lambda square, _: square @ square,
    "memory": lambda _, large: large.add_(1.0),
    "python": lambda *_: sum(range(20_000)),
}


def busy_process(core: int, kind: str, seconds: float, results) -> None:
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    square, large = torch.randn(384, 384), torch.randn(8 * 2**20)  # in a cache; far beyond it
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        WORK[kind](square, large)
        count += 1
    results.put(count)


def contention(seconds: float = 1.0) -> dict[str, float]:
    """Speed of one core when the other is busy as well, as a share of its speed alone."""
    # nothing has used torch yet; spawning would import all of it again
    context = multiprocessing.get_context("fork")

    def speed(cores: list[int], kind: str) -> float:
        results = context.Queue()
        arguments = [(core, kind, seconds, results) for core in cores]
        processes = [context.Process(target=busy_process, args=each) for each in arguments]
        for process in processes:
            process.start()
        counts = [results.get(timeout=60) for _ in processes]
        for process in processes:
            process.join()
        return sum(counts) / len(counts)

    both = [RANK_CORE, ENGINE_CORE]
    return {
        kind: round(median(speed(both, kind) / speed(both[:1], kind) for _ in range(3)), 3)
        for kind in WORK
    }


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
    repeats, segment = (2, 3) if options.quick else (6, 5)
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    results["contention"] = contention()
    print("contention", results["contention"], flush=True)
    for name in options.mixes:
        results[name] = run(MIXES[name], repeats, segment)
        short = {key: results[name][key] for key in SHORT}
        print(name, json.dumps(short), flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
