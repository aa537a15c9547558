"""Metrics of an interval between two logs, from the numbers of all ranks. docs/operate/observe.md lists the names."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any, TypeVar

from ..engine.agents import Measure
from ..rollouts.staleness import SUMS, RoundSums
from ..run.phases import PHASES
from ..run.topology import Topology
from ..weights.timings import STAGES
from .flops import ModelFlops

T = TypeVar("T")
SECONDS_PER_HOUR = 3600.0


@dataclass
class StepSums:
    """Numbers of one rank between two logs, beside those of its phases, syncs and rounds."""

    wall_s: float = 0.0
    tokens: float = 0.0  # tokens of prompts and completions in the micro-batches
    squares: float = 0.0  # sum of the squared lengths of their rows
    trained_tokens: float = 0.0  # completion tokens in the loss; an iteration counts them again
    # peak of the memory that torch has reserved on the rank's GPU, since the start
    gpu_gib: float = math.nan
    gpu_share: float = math.nan  # of the GPU's memory, including what other processes use there now
    host_gib: float = math.nan  # resident memory of the process


NUM_NUMBERS = len(PHASES) + len(STAGES) + len(SUMS) + len(fields(StepSums))


@dataclass(frozen=True)
class RankNumbers:
    """Numbers that one rank contributes to a log."""

    phases: dict[str, float]  # seconds, by the names of `PHASES`
    stages: list[float]  # seconds of the last sync, in the order of `STAGES`
    rounds: RoundSums
    step: StepSums

    @classmethod
    def of(cls, row: list[float]) -> "RankNumbers":
        """Read a row of `NUM_NUMBERS` gathered numbers."""
        numbers = iter(row)
        return cls(
            phases={name: next(numbers) for name in PHASES},
            stages=[next(numbers) for _ in STAGES],
            rounds={name: next(numbers) for name in SUMS},
            step=StepSums(*numbers),
        )


@dataclass(frozen=True)
class RunShape:
    """Constants of a run that the metrics need."""

    topology: Topology
    iterations: int = 1  # `num_iterations`: times that a completion is trained on
    flops: ModelFlops | None = None
    peak_flops: float | None = None  # of one device


def merged(rows: Sequence[T], merge: Callable[[Any], float]) -> T:
    """Return one row of numbers: each is merged from those of all rows, dataclasses of one kind."""
    return type(rows[0])(*map(merge, zip(*(vars(row).values() for row in rows), strict=True)))


def step_metrics(ranks: list[RankNumbers], steps: int, shape: RunShape) -> dict[str, float]:
    """Return the metrics with the prefixes `perf/`, `memory/`, `engine/` and, with several nodes, `node<k>/`.

    Args:
        ranks (`list[RankNumbers]`):
            Numbers of all ranks.
        steps (`int`):
            Optimizer steps since the last log.
        shape (`RunShape`):
            Constants of the run.
    """
    topology = shape.topology
    metrics = _phase_metrics(ranks, steps, shape) | _throughput(ranks, steps, shape)
    metrics |= _largest("memory/gpu_gib", [rank.step.gpu_gib for rank in ranks], topology)
    metrics |= _largest("memory/gpu_share", [rank.step.gpu_share for rank in ranks])
    metrics |= _largest("memory/host_gib", [rank.step.host_gib for rank in ranks], topology)
    if topology.num_nodes > 1:
        for node in range(topology.num_nodes):
            of_node = _node_metrics([ranks[rank] for rank in topology.ranks_of(node)], steps)
            metrics |= {f"node{node}/{name}": value for name, value in of_node.items()}
    return metrics


def pool_measure(
    ranks: list[RankNumbers], step: int, own: int, engines: int, pool_filled: float | None
) -> Measure | None:
    """Return the use of all engines of a run in an interval; `None` if no engine has reported any.

    Ranks wait for completions in phase `generate`. With `max_staleness=0` this is the whole generation; engines are
    idle in the rest of the step. The slowest rank counts: the others wait for it in phase `wait`, which also has other
    waits.

    Args:
        ranks (`list[RankNumbers]`):
            Numbers of all ranks.
        step (`int`):
            Optimizer steps done.
        own (`int`), engines (`int`):
            Engines of the training nodes, and all that serve.
        pool_filled (`float`, *optional*):
            Share of the slots of the engines of agents in which rows ran; `None` if it is not known.
    """
    clock_s = sum(rank.rounds["engine_clock_s"] for rank in ranks)
    wall_s = max(rank.step.wall_s for rank in ranks)
    shares: list[float] = []  # of the slots, one per engine
    if clock_s:
        shares += [sum(rank.rounds["engine_slot_s"] for rank in ranks) / clock_s] * own
    if pool_filled is not None:
        shares += [pool_filled] * (engines - own)
    if not shares or not wall_s:
        return None
    waiting = max(rank.phases["generate"] for rank in ranks) / wall_s
    return Measure(step, engines, fmean(shares), min(1.0, waiting))


def _phase_metrics(ranks: list[RankNumbers], steps: int, shape: RunShape) -> dict[str, float]:
    metrics = {"perf/step_s": max(rank.step.wall_s for rank in ranks) / steps}
    for name in PHASES:
        seconds = [rank.phases[name] / steps for rank in ranks]
        metrics |= {
            f"perf/{name}_s": fmean(seconds),
            f"perf/{name}_s/min": min(seconds),
            f"perf/{name}_s/max": max(seconds),
            f"perf/{name}_s/slowest_node": float(
                shape.topology.node_of(seconds.index(max(seconds)))
            ),
        }
    return metrics


def _throughput(ranks: list[RankNumbers], steps: int, shape: RunShape) -> dict[str, float]:
    wall, devices = max(rank.step.wall_s for rank in ranks), shape.topology.num_devices
    total = merged([rank.step for rank in ranks], sum)
    if not (wall and total.tokens):  # a trainer whose batches have no masks
        return {}
    trained = total.trained_tokens / shape.iterations
    metrics = {
        "perf/tokens_per_s": total.tokens / wall,
        "perf/tokens_per_s_per_device": total.tokens / wall / devices,
        "perf/valid_tokens_per_device_hour": trained / wall / devices * SECONDS_PER_HOUR,
    }
    return metrics | _utilization(ranks, total, shape)


def _utilization(ranks: list[RankNumbers], total: StepSums, shape: RunShape) -> dict[str, float]:
    train_s = sum(rank.phases["train"] for rank in ranks)
    if shape.flops is None or shape.peak_flops is None or not train_s:
        return {}
    flops = shape.flops.of(total.tokens, total.squares)
    return {"perf/mfu": flops / (train_s * shape.peak_flops)}


def _largest(name: str, values: list[float], topology: Topology | None = None) -> dict[str, float]:
    """Return the largest value of any rank, and its node on request; nothing if no rank measured it."""
    measured = [value for value in values if not math.isnan(value)]
    if not measured:
        return {}
    largest = {f"{name}/max": max(measured)}
    if topology is not None:
        largest[f"{name}/fullest_node"] = float(topology.node_of(values.index(max(measured))))
    return largest


def _node_metrics(ranks: list[RankNumbers], steps: int) -> dict[str, float]:
    """Return the metrics of one node: mean seconds of its ranks per step, its tokens, memory and engines."""
    metrics = {f"{name}_s": fmean(rank.phases[name] for rank in ranks) / steps for name in PHASES}
    each_step, each_round = [rank.step for rank in ranks], [rank.rounds for rank in ranks]
    if tokens := merged(each_step, sum).tokens:
        metrics["tokens"] = tokens / steps
    gpu = _largest("gib", [one.gpu_gib for one in each_step])
    largest = gpu or _largest("gib", [one.host_gib for one in each_step])
    metrics["memory_gib"] = largest["gib/max"]
    if kv_use := max(one["engine_kv_use"] for one in each_round):
        metrics["kv_use"] = kv_use
    if clock_s := sum(one["engine_clock_s"] for one in each_round):
        metrics["engine_busy"] = sum(one["engine_busy_s"] for one in each_round) / clock_s
        metrics["engine_filled"] = sum(one["engine_slot_s"] for one in each_round) / clock_s
    return metrics
