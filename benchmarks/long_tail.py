"""Completions of very different lengths: rounds in flight against rounds that wait for their slowest completion.

    python benchmarks/long_tail.py [--quick] [--mixes 1 ...] [--arms ...] [--rows 48] [--repeats 2] [--cores 0 1]

One rank and one vLLM engine, each on a core of its own. Rows are requested one by one, in groups of 8, with
log-normal lengths: a row has its length by `max_tokens` and `ignore_eos`. All arms use one engine and one
`max_num_seqs`, and take turns:

    sync          a round is generated, then trained
    drain_1       max_staleness=1: the next round is generated while this one trains; a sync waits for it
    in_flight_k   max_staleness=k
    strict        in_flight_3 with max_age=3: groups are trained in the order of the dataset
    control       drain_1 again

The rank runs this library's rounds (`Rounds`), weight sync and engine, without a trainer:
training is a fixed number of matrix products, calibrated while the engine is full, so that the mixes have an exact
g/t. g is the time of a round's tokens at the engine's best rate, t the time of training.

Every arm begins with an idle engine. `step_s` leaves out the first rounds of an arm and, in flight, the last ones, for
which no further rows are begun; `whole_s` has all rounds. `ratio_to_ideal` divides `step_s` by max(generation,
training): training as it took in the arm, generation as the engine generates the same tokens when the arm's mean
number of running rows runs all the time, measured beside training right after the arm; `ratio_to_full` takes the rate
at the number of rows that the arm may have open. `row_seconds_share` is the share of the time of those rows in which
they ran. `trained_share` compares the tokens that were trained in the measured rounds with the mean of all rounds:
below 1, an arm would be fast because it leaves long rows for later.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace

import numpy as np
import psutil
import torch
from msgspec.structs import replace
from transports import spread

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from multinode_kit.engines import REAL, SyncDriver, connected_again, running_engines
from multinode_kit.models import tiny_qwen2
from trl_multinode.engine.group import answers
from trl_multinode.engine.node_engines import NodeEngines
from trl_multinode.engine.stream import Request
from trl_multinode.rollouts.rounds import Rounds
from trl_multinode.rollouts.seeds import RowSeeds
from trl_multinode.wire.messages import Await, Generate, Message, unpack_ids

GROUP = 8
# of the lengths; the sigmas are those of a long tail in the simulation
MEDIAN, GROUP_SIGMA, ROW_SIGMA = (
    64,
    0.7,
    0.7,
)
LONGEST = 700  # tokens: 11 medians, as 32k tokens are
SAMPLING = {"temperature": 1.0, "ignore_eos": True}
MIXES = ("1", "0.5", "4")  # g/t
RESULTS = Path(__file__).parent / "results" / "long_tail.json"
MOST_OPEN = 4  # rounds


@dataclass(frozen=True)
class Arm:
    """One way to run rounds. `first` and `measured` count its rounds; in flight, `open_rounds` further ones follow."""

    open_rounds: int = 0  # 0: every round waits for its slowest row
    ahead: int = 0
    max_age: int = 0
    first: int = 1
    measured: int = 4

    @property
    def rounds(self) -> int:
        return self.first + self.measured + self.open_rounds


def in_flight(rounds: int, max_age: int | None = None) -> Arm:
    return Arm(rounds, 0, max_age or 3 * rounds, first=6, measured=10)


ARMS = {
    "sync": Arm(),
    "drain_1": Arm(ahead=1),
    "in_flight_2": in_flight(2),
    "in_flight_3": in_flight(3),
    "in_flight_4": in_flight(4),
    "strict": in_flight(3, max_age=3),
    "control": Arm(ahead=1),
}


def draw_lengths(rng: np.random.Generator, rows: int) -> list[int]:
    """Lengths of a round's rows: a part of the deviation is common to a group."""
    deviation = (
        np.repeat(rng.normal(size=rows // GROUP), GROUP) * GROUP_SIGMA
        + rng.normal(size=rows) * ROW_SIGMA
    )
    return np.clip(np.exp(np.log(MEDIAN) + deviation), 2, LONGEST).astype(int).tolist()


class Lengths:
    """Lengths of all rows of a repeat, the same for every arm. A prompt's rows get them in the order of requests."""

    def __init__(self, rows: int, rounds: int, seed: int):
        rng = np.random.default_rng(seed)
        self.rounds = [draw_lengths(rng, rows) for _ in range(rounds)]
        self._left: dict[tuple[int, ...], list[int]] = {}

    def prompts(self, turn: int, number: int) -> list[list[int]]:
        """Prompts of a round, each group's own, which no other turn of an arm has."""
        rows = self.rounds[number]
        prompts = [[5 + turn, 5 + number, 5 + row // GROUP, 5] for row in range(len(rows))]
        for start in range(0, len(rows), GROUP):
            self._left[tuple(prompts[start])] = rows[start : start + GROUP][::-1]
        return prompts

    def limit(self, message: Message) -> Message:
        """Give a request the length of its row."""
        if not isinstance(message, Generate):
            return message
        return replace(
            message, max_tokens=self._left[tuple(unpack_ids(message.prompt).tolist())].pop()
        )

    def mean_tokens(self) -> float:
        return mean(sum(rows) for rows in self.rounds)


class Work:
    """Training: so many matrix products that it takes the wanted seconds beside a full engine."""

    def __init__(self) -> None:
        self._square = torch.randn(256, 256)
        self.per_second = 0.0

    def until(self, ended: Callable[[], bool]) -> None:
        start, count = time.perf_counter(), 0
        while not ended():
            self._square @ self._square
            count += 1
        self.per_second = count / (time.perf_counter() - start)

    def run(self, seconds: float) -> float:
        start = time.perf_counter()
        for _ in range(int(seconds * self.per_second)):
            self._square @ self._square
        return time.perf_counter() - start


@dataclass
class Turn:
    """What one arm did in one repeat."""

    ends: list[float] = field(default_factory=list)  # of its beginning and of each round
    train_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # trained
    ages: list[tuple[float, int]] = field(default_factory=list)  # mean and maximum, in rounds
    mixed: list[float] = field(default_factory=list)  # share of rows of several updates
    # row-seconds over slots, and seconds
    clocks: list[tuple[float, float]] = field(default_factory=list)


class Rank:
    """One rank with its engine, and no trainer."""

    def __init__(self, engines: NodeEngines, rows: int):
        self.engines, self.rows = engines, rows
        self.lengths: Lengths | None = None
        self.trainer = SyncDriver(tiny_qwen2(), engines, bucket_bytes=1 << 20)
        self.ahead, streams = connected_again(engines), connected_again(engines)
        self.stream = streams.open_stream(LONGEST, SAMPLING)
        for clients in (engines, self.ahead, streams):
            for client in clients:
                client.post = partial(self._post, client.post)
        self.work = Work()
        self.trainer.send()

    def _post(self, post: Callable[[Message], int], message: Message) -> int:
        return post(message if self.lengths is None else self.lengths.limit(message))

    def send(self) -> None:
        """Change the weights a little, as a step does, and send them."""
        self.trainer.perturb(1e-3)
        self.trainer.send()

    def generate(
        self, engines: NodeEngines, prompts: list[list[int]], max_tokens: int = LONGEST
    ) -> list:
        requests = [Request(prompt, 1) for prompt in prompts]
        groups = engines.generate(requests, max_tokens, SAMPLING, self.trainer.version.update)
        return [row for group in groups for row in group]

    def clock(self) -> tuple[float, float]:
        posted = self.engines.post_all(Await(min_update=self.trainer.version.update))
        ((_, done),) = answers(posted)
        return done.slot_s, done.clock_s

    def seconds_per_step(self, rows: int) -> float:
        """Seconds of one token of each of `rows` rows, all running, beside training: the median of three times."""
        return median(self._seconds_per_step(rows) for _ in range(3))

    def _seconds_per_step(self, rows: int, tokens: int = 48) -> float:
        self.lengths = None
        with ThreadPoolExecutor(1) as thread:
            start = time.perf_counter()
            prompts = [[5, 6 + row // 256, 7 + row % 256] for row in range(rows)]
            made = thread.submit(self.generate, self.ahead, prompts, tokens)
            self.work.until(made.done)
            made.result()
        return (time.perf_counter() - start) / tokens

    # ---- arms -------------------------------------------------------------------------------------------------------

    def turn(self, arm: Arm, lengths: Lengths, turn: int, train_s: float) -> Turn:
        self.lengths = lengths
        self.trainer.sync.in_flight = arm.open_rounds > 0
        found = Turn(ends=[time.perf_counter()], clocks=[self.clock()])
        for rows, ages in self._rounds(arm, partial(lengths.prompts, turn)):
            found.train_s.append(self.work.run(train_s))
            found.tokens.append(sum(len(row.tokens) for row in rows))
            found.mixed.append(mean(len(row.versions) > 1 for row in rows))
            found.ages.append(ages)
            found.clocks.append(self.clock())
            found.ends.append(time.perf_counter())
        return found

    def _rounds(self, arm: Arm, prompts_of: Callable):
        """Yield the rows of each round, and their mean and largest age. A round that drains is one group."""
        in_flight = arm.open_rounds > 0
        size = GROUP if in_flight else self.rows
        ahead, age = (arm.open_rounds, arm.max_age) if in_flight else (arm.ahead, arm.ahead)
        generation = SimpleNamespace(
            accelerator=SimpleNamespace(process_index=0),
            seeds=RowSeeds(None, 0),
            max_completion_length=None,
            engines=SimpleNamespace(max_model_len=sys.maxsize),
        )
        settings = SimpleNamespace(max_staleness=ahead, oldest_rounds=age, in_flight=in_flight)
        rounds = Rounds(generation, settings, self.stream)
        for number in range(arm.rounds):
            batch_ahead = partial(self._batch, prompts_of, number, arm.rounds)
            rounds.begin_round(number, self.rows // size, size, batch_ahead)
            if must_sync := rounds.must_sync:
                self._swap(rounds)
                rounds.begin_following(self.trainer.version)
            rounds.take()
            if not must_sync:
                if not in_flight:
                    rounds.groups.wait_for_all()
                self._swap(rounds)
                rounds.begin_following(self.trainer.version)
            ages = rounds.ages(self.trainer.version)
            rows = [row for group in rounds.taken for row in group.rows]
            yield rows, (ages.rounds_mean, ages.rounds_max)
        assert not rounds.groups.ids, "a group was begun and not trained"

    def _batch(self, prompts_of: Callable, number: int, rounds: int, ahead: int):
        if number + ahead >= rounds:
            return None
        prompts = prompts_of(number + ahead)
        return [{}] * len(prompts), prompts

    def _swap(self, rounds: Rounds) -> None:
        self.send()
        rounds.updates.add(self.trainer.version, rounds._number)


# ---- figures --------------------------------------------------------------------------------------------------------


def figures(
    arm: Arm,
    turn: Turn,
    rows: int,
    slots: int,
    mean_tokens: float,
    seconds_per_step: Callable[[int], float],
) -> dict:
    """Figures of one turn. `seconds_per_step` measures an engine that generates one token of each of so many rows."""
    first, last = arm.first, arm.first + arm.measured
    step_s = (turn.ends[last] - turn.ends[first]) / arm.measured
    slot_s, clock_s = (b - a for a, b in zip(turn.clocks[first], turn.clocks[last], strict=True))
    running, open_rows = slots * slot_s / clock_s, rows * max(1, arm.open_rounds)
    train_s, tokens = mean(turn.train_s[first:last]), mean(turn.tokens[first:last])

    def ideal(at_once: int) -> float:
        return max(train_s, tokens / at_once * seconds_per_step(at_once))

    return {
        "step_s": step_s,
        "whole_s": (turn.ends[-1] - turn.ends[0]) / arm.rounds,
        "train_s": train_s,
        "ratio_to_ideal": step_s / ideal(max(1, round(running))),
        "ratio_to_full": step_s / ideal(open_rows),
        "running_rows": running,
        "row_seconds_share": running / open_rows,
        "trained_share": tokens / mean_tokens,
        "mean_age": mean(average for average, _ in turn.ages[first:last]),
        "max_age": max(oldest for _, oldest in turn.ages[first:last]),
        "mixed_rows": mean(turn.mixed[first:last]),
    }


def summarize(repeats: list[dict[str, dict]]) -> dict:
    """Medians of an arm's figures; ratios of arms pair the turns of one repeat."""

    def ratio(above: str, below: str) -> dict:
        return spread([repeat[above]["step_s"] / repeat[below]["step_s"] for repeat in repeats])

    arms = {}
    for arm in repeats[0]:
        arms[arm] = {
            key: spread([repeat[arm][key] for repeat in repeats]) for key in repeats[0][arm]
        }
        arms[arm]["max_age"] = max(repeat[arm]["max_age"] for repeat in repeats)
        arms[arm]["speedup_over_staleness_1"] = ratio("drain_1", arm)
    return {"repeats": len(repeats), "arms": arms, "control_ratio": ratio("control", "drain_1")}


def reached(cell: dict) -> dict[str, str]:
    """The aim: in flight 3 at least 1.8 times as fast as drain 1, and at most 1.25 times the ideal.

    A machine on which two equal arms differ by more than a quarter cannot decide it.
    """
    control, arm = cell["control_ratio"], cell["arms"]["in_flight_3"]
    if control["low"] < 0.8 or control["high"] > 1.25:
        return dict.fromkeys(("speedup_at_least_1.8", "ratio_at_most_1.25"), "undecided")
    met = {
        "speedup_at_least_1.8": arm["speedup_over_staleness_1"]["median"] >= 1.8,
        "ratio_at_most_1.25": arm["ratio_to_ideal"]["median"] <= 1.25,
    }
    return {what: "reached" if is_met else "missed" for what, is_met in met.items()}


def measure(rank: Rank, mix: str, arms: list[str], repeats: int, slots: int) -> dict:
    found, calibrations, most = [], [], rank.rows * MOST_OPEN
    turn = 0
    for repeat in range(repeats):
        lengths = Lengths(rank.rows, max(arm.rounds for arm in ARMS.values()) + 1, seed=repeat)
        g = lengths.mean_tokens() / most * rank.seconds_per_step(most)
        calibrations.append({"g_s": g, "t_s": g / float(mix)})
        names = arms if repeat % 2 == 0 else arms[::-1]
        one = {}
        for name in names:
            done = rank.turn(ARMS[name], lengths, turn := turn + 1, g / float(mix))
            one[name] = figures(
                ARMS[name], done, rank.rows, slots, lengths.mean_tokens(), rank.seconds_per_step
            )
            print(
                mix,
                name,
                json.dumps({key: round(value, 3) for key, value in one[name].items()}),
                flush=True,
            )
        found.append({name: one[name] for name in arms})
    times = {key: spread([each[key] for each in calibrations]) for key in ("g_s", "t_s")}
    return {"g_over_t": float(mix), "rows": rank.rows, **times, **summarize(found)}


def run(options: argparse.Namespace) -> None:
    from overlap import pin

    torch.set_num_threads(1)
    slots = (MOST_OPEN + 1) * options.rows
    results = json.loads(options.output.read_text()) if options.output.is_file() else {"cells": {}}
    if options.note:
        results["note"] = options.note
    results["lengths"] = {"median": MEDIAN, "longest": LONGEST, "sigmas": [GROUP_SIGMA, ROW_SIGMA]}
    settings = {"max_num_seqs": slots, "window": MOST_OPEN * options.rows, "max_model_len": 1024}
    with (
        tempfile.TemporaryDirectory() as folder,
        running_engines(tiny_qwen2(), Path(folder), REAL, **settings) as engines,
    ):
        for process in psutil.Process().children(recursive=True):
            pin(process.pid, options.cores[1])
        pin(os.getpid(), options.cores[0])
        rank = Rank(engines, options.rows)
        rank.seconds_per_step(options.rows)  # warms up
        for mix in options.mixes:
            cell = measure(rank, mix, options.arms, options.repeats, slots)
            cell["aim"] = reached(cell)
            results["cells"][f"{options.rows} rows, g/t {mix}"] = cell
            print(mix, json.dumps(cell["arms"]["in_flight_3"]), json.dumps(cell["aim"]), flush=True)
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one mix, one repeat, no file")
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=list(ARMS), help="those of the ratios at least"
    )
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--cores", type=int, nargs=2, default=[0, 1], help="of the rank and of the engine"
    )
    parser.add_argument("--note", help="remark on the machine, for the table")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if missing := {"drain_1", "in_flight_3", "control"} - set(options.arms):
        parser.error(f"the ratios need the arms {sorted(missing)}")
    if not set(options.cores) <= os.sched_getaffinity(0):
        parser.error(f"this process may use the cores {sorted(os.sched_getaffinity(0))} only")
    if options.quick:
        options.mixes, options.repeats, options.output = options.mixes[:1], 1, Path(os.devnull)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(options.cores[1])
    run(options)


if __name__ == "__main__":
    main()
