"""Engines of a run whose completions grow: the autoscaler against each fixed number. A simulation, not a measurement.

    python benchmarks/autoscale.py                   prints the table, writes results/autoscale.json
    python benchmarks/autoscale.py --start_s 300     other agents: prints only

Two runs of 200 steps with `max_staleness=3`, of 256 and of 1024 rows a step in groups of 8. Eight GPUs train, and
each engine has a GPU of its own. Lengths are drawn from the completions of a recorded run (docs/use/long-tail.json,
its two whole rounds); they are scaled to a mean of 256 tokens at the first step, and of 2048 at the last one. Seconds
of a token step of an engine are those of `Decoder` of `trl-multinode plan`, those of training its formula's, both with
the rates of an H100. `Autoscaler` is the product's; it gets a measure after each step, as with `logging_steps=1`.

An engine that is asked for costs its GPU at once and serves after `--start_s`; one that leaves gets no new rows and
costs its GPU until its last row has ended. GPU-seconds are those of all GPUs, the eight that train included. Left out:
weight syncs, rewards, the wait for a free GPU, and what other jobs do with GPUs that are free.
"""

import argparse
import heapq
import json
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from trl_multinode.agent.autoscale import Autoscaler
from trl_multinode.engine.agents import Measure
from trl_multinode.tools.plan.hardware import parse_gpu
from trl_multinode.tools.plan.layouts import MODEL_FLOPS_SHARE, PASSES
from trl_multinode.tools.plan.model_size import model_size
from trl_multinode.tools.plan.rounds import Decoder

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "docs" / "use" / "long-tail.json"
RESULTS = Path(__file__).parent / "results" / "autoscale.json"
MODEL = model_size(str(ROOT / "tests" / "plan" / "configs" / "8B.json"))
GPU = parse_gpu("H100-80")
DECODER = Decoder(MODEL, GPU, tensor_parallel=1)
STEPS, GROUP, PROMPT = 200, 8, 512
ROWS = (256, 1024)  # of a step
AHEAD = 3  # `max_staleness`
MEANS = (256, 2048)  # tokens of a completion, at the first and at the last step
SLOTS = 128  # `max_num_seqs` of an engine
WINDOW = SLOTS * AHEAD // (AHEAD + 1)  # rows of open rounds on it, as `EngineSettings.open_window`
TRAINING_GPUS = 8
LEAST, MOST = 1, 8
START_S = 120.0
SAMPLED = 10  # steps between two numbers of engines in the results


def recorded_lengths() -> list[int]:
    """Return the lengths of the recorded rounds of which all rows are in the record."""
    rows = json.loads(RECORDED.read_text())["rows"]
    last = max(row["round"] for row in rows)
    return [row["tokens"] for row in rows if row["round"] >= last - 1]


def draw_rounds(rows: int) -> list[list[list[int]]]:
    """Return the lengths of the rows of each group, by round."""
    chance, recorded = random.Random(0), recorded_lengths()
    mean, rounds = fmean(recorded), []
    for number in range(STEPS):
        wanted = MEANS[0] + (MEANS[1] - MEANS[0]) * number / (STEPS - 1)
        lengths = [max(1, round(chance.choice(recorded) * wanted / mean)) for _ in range(rows)]
        rounds.append([lengths[at : at + GROUP] for at in range(0, rows, GROUP)])
    return rounds


def train_seconds(rows: list[int]) -> float:
    """Return the seconds of a step of training, by the formula of `trl-multinode plan`."""
    tokens = [PROMPT + row for row in rows]
    flops = MODEL.flops.of(sum(tokens), sum(MODEL.flops.squares(each) for each in tokens))
    return PASSES * flops / (TRAINING_GPUS * GPU.peak * MODEL_FLOPS_SHARE)


@dataclass
class Engine:
    """An engine that serves from `at` on."""

    ordered_s: float
    at: float
    steps: float = 0.0  # token steps that it has made
    step_s: float = 0.0  # of its present rows
    rows: list[tuple[float, float, int]] = field(default_factory=list)  # last step, first, group
    first_steps: float = 0.0  # summed over its rows
    row_s: float = 0.0
    is_leaving: bool = False

    def move(self, now: float) -> None:
        """Let its rows run until `now`."""
        passed = now - self.at
        if self.rows:
            self.steps += passed / self.step_s
        self.row_s += passed * len(self.rows)
        self.at = now

    def change(self) -> None:
        """Compute the seconds of a token step after its rows have changed."""
        if count := len(self.rows):
            context = count * (PROMPT + self.steps) - self.first_steps
            self.step_s = DECODER.step_s(count, context)

    def begin(self, length: int, group: int) -> None:
        heapq.heappush(self.rows, (self.steps + length, self.steps, group))
        self.first_steps += self.steps
        self.change()

    def next_end(self) -> float:
        return self.at + (self.rows[0][0] - self.steps) * self.step_s if self.rows else float("inf")

    def end_row(self) -> int:
        """End the row that is next, and return its group."""
        self.steps, first, group = heapq.heappop(self.rows)
        self.first_steps -= first
        self.change()
        return group


class Pool:
    """Engines of a simulated run, and its rows."""

    def __init__(self, engines: int, start_s: float):
        self.now = 0.0
        self.start_s = start_s
        self.engines = [Engine(0.0, 0.0) for _ in range(engines)]
        self.waiting: deque[tuple[int, int]] = deque()  # length and group of rows
        self.left: dict[int, int] = {}  # rows of a group that have not ended
        self.groups: list[list[int]] = []
        self.complete: deque[int] = deque()
        self.gpu_s = 0.0  # of engines that have left
        self._before: dict[int, float] = {}  # row-seconds of engines at the last measure
        self._measured_s = self._open_s = 0.0

    @property
    def serving(self) -> list[Engine]:
        ready = (engine for engine in self.engines if engine.at <= self.now)
        return [engine for engine in ready if not engine.is_leaving]

    def begin(self, groups: list[list[int]]) -> None:
        for group in groups:
            self.left[len(self.groups)] = len(group)
            self.waiting.extend((length, len(self.groups)) for length in group)
            self.groups.append(group)

    def _fill(self) -> None:
        while self.waiting and (serving := self.serving):
            engine = min(serving, key=lambda engine: len(engine.rows))
            if len(engine.rows) >= WINDOW:
                return
            engine.move(self.now)
            engine.begin(*self.waiting.popleft())

    def run(self, until: float = float("inf"), groups: int = 0) -> None:
        """Let time pass until then, or until so many groups are complete."""
        while not groups or len(self.complete) < groups:
            self._fill()
            events = [(engine.next_end(), engine) for engine in self.engines]
            events += [(e.at, e) for e in self.engines if not e.rows and e.at > self.now]
            time, engine = min(events, key=lambda event: event[0])
            if time > until:
                break
            self._pass(time)
            if not engine.rows:  # it begins to serve
                continue
            engine.move(time)
            group = engine.end_row()
            self.left[group] -= 1
            if not self.left[group]:
                self.complete.append(group)
            if engine.is_leaving and not engine.rows:
                self._end(engine)
        if not groups:
            self._pass(until)

    def _pass(self, time: float) -> None:
        self._open_s += (time - self.now) * len(self.serving)
        self.now = time

    def _end(self, engine: Engine) -> None:
        self.gpu_s += self.now - engine.ordered_s
        self.engines.remove(engine)

    def measure(self, step: int, waited_s: float) -> Measure:
        """Return the measure of the time since the last call."""
        for engine in self.serving:
            engine.move(self.now)
        now_s = {id(engine): engine.row_s for engine in self.engines}
        row_s = sum(now_s.values()) - sum(self._before.get(engine, 0.0) for engine in now_s)
        filled = min(1.0, row_s / SLOTS / self._open_s)
        waiting = waited_s / (self.now - self._measured_s)
        self._before, self._measured_s, self._open_s = now_s, self.now, 0.0
        return Measure(step, len(self.serving), filled, waiting)

    def order(self, engines: int) -> None:
        """Ask for that many engines, those that start included."""
        staying = [engine for engine in self.engines if not engine.is_leaving]
        for _ in range(engines - len(staying)):
            self.engines.append(Engine(self.now, self.now + self.start_s))
        leaving = max(0, len(staying) - engines)
        for engine in sorted(staying, key=lambda engine: len(engine.rows))[:leaving]:
            engine.is_leaving = True
            if not engine.rows:
                self._end(engine)


def simulate(rounds: list[list[list[int]]], least: int, most: int, start_s: float) -> dict:
    """Simulate a run, and return its seconds, the GPU-seconds of all GPUs, and the engines asked for at each step."""
    scaler = Autoscaler(least, most)
    wanted, _ = scaler.wanted(None, 0, 0.0)
    pool, numbers, waited = Pool(wanted, start_s), [], 0.0
    for number in range(AHEAD):
        pool.begin(rounds[number])
    groups = len(rounds[0])
    for step in range(STEPS):
        since = pool.now
        pool.run(groups=groups)
        waited_s = pool.now - since
        waited += waited_s
        taken = [pool.groups[pool.complete.popleft()] for _ in range(groups)]
        if step + AHEAD < STEPS:
            pool.begin(rounds[step + AHEAD])
        pool.run(until=pool.now + train_seconds([row for group in taken for row in group]))
        here = sum(not engine.is_leaving for engine in pool.engines)
        wanted, _ = scaler.wanted(pool.measure(step + 1, waited_s), here, pool.now)
        pool.order(wanted)
        numbers.append(wanted)
    gpu_s = pool.gpu_s + sum(pool.now - engine.ordered_s for engine in pool.engines)
    return {
        "seconds": round(pool.now),
        "gpu_seconds": round(gpu_s + TRAINING_GPUS * pool.now),
        "waiting": round(waited / pool.now, 3),
        "mean_engines": round(gpu_s / pool.now, 2),
        "engines": numbers[::SAMPLED] + numbers[-1:],
    }


# ---- results --------------------------------------------------------------------------------------------------------


def simulated(rows: int, start_s: float) -> dict:
    """Return the results of the autoscaler and of each fixed number of engines, with so many rows a step."""
    rounds = draw_rounds(rows)
    fixed = {}
    for number in range(LEAST, MOST + 1):
        one = simulate(rounds, number, number, start_s)
        del one["engines"]
        fixed[str(number)] = one
    scaled = simulate(rounds, LEAST, MOST, start_s)
    return {"fixed": fixed, "autoscale": scaled, **compared(scaled, fixed)}


def compared(scaled: dict, fixed: dict[str, dict]) -> dict:
    """Compare the autoscaler with the fastest fixed number that costs no more, and the cheapest that is as fast.

    A value is positive if the autoscaler is better, and `None` if no fixed number is that cheap or that fast.
    """
    cheap = [one for one in fixed.values() if one["gpu_seconds"] <= scaled["gpu_seconds"]]
    fast = [one for one in fixed.values() if one["seconds"] <= scaled["seconds"]]
    seconds = min((one["seconds"] for one in cheap), default=None)
    gpu_seconds = min((one["gpu_seconds"] for one in fast), default=None)
    return {
        "seconds_saved": None if seconds is None else seconds - scaled["seconds"],
        "gpu_seconds_saved": None if gpu_seconds is None else gpu_seconds - scaled["gpu_seconds"],
    }


def table(results: dict) -> list[str]:
    """Return the lines of the table in docs/operate/beyond.md: hours, GPU-hours and waits of each run."""
    runs = results["runs"]
    heads = " | ".join(f"{rows} rows a step" for rows in runs)
    lines = [f"| engines | {heads} |", f"|---|{'---|' * len(runs)}"]
    for number in range(LEAST, MOST + 1):
        found = " | ".join(cell(run["fixed"][str(number)]) for run in runs.values())
        lines.append(f"| {number} | {found} |")
    found = " | ".join(
        f"{cell(run['autoscale'])}, mean {run['autoscale']['mean_engines']:.1f}"
        for run in runs.values()
    )
    return [*lines, f"| `--autoscale {LEAST}:{MOST}` | {found} |"]


def cell(one: dict) -> str:
    """Return the figures of a simulated run."""
    hours = f"{one['seconds'] / 3600:.2f} h, {one['gpu_seconds'] / 3600:.1f} GPU-h"
    return f"{hours}, {100 * one['waiting']:.0f} %"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--start_s", type=float, default=START_S, help="until an engine serves")
    options = parser.parse_args()
    runs = {str(rows): simulated(rows, options.start_s) for rows in ROWS}
    results = {"simulation": True, "start_s": options.start_s, "runs": runs}
    print("\n".join(table(results)))
    for rows, run in runs.items():
        saved = {name: run[name] for name in ("seconds_saved", "gpu_seconds_saved")}
        print(f"{rows} rows a step:", json.dumps(saved | {"engines": run["autoscale"]["engines"]}))
    if options.start_s == START_S:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
