"""Metrics of an interval between two logs, from the numbers of all ranks. docs/operate/observe.md lists the names."""

import math
from dataclasses import dataclass, fields
from itertools import islice
from statistics import fmean

from ..rollouts.staleness import NUM_SUMS, RoundSums, merged
from ..run.phases import PHASES
from ..run.topology import Topology
from ..weights.timings import STAGES
from .flops import ModelFlops

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


NUM_NUMBERS = len(PHASES) + len(STAGES) + NUM_SUMS + len(fields(StepSums))


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
            rounds=RoundSums(*islice(numbers, NUM_SUMS)),
            step=StepSums(*numbers),
        )


@dataclass(frozen=True)
class RunShape:
    """Constants of a run that the metrics need."""

    topology: Topology
    iterations: int = 1  # `num_iterations`: times that a completion is trained on
    flops: ModelFlops | None = None
    peak_flops: float | None = None  # of one device


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
    steps_of_ranks, rounds_of_ranks = [rank.step for rank in ranks], [rank.rounds for rank in ranks]
    step, rounds = merged(steps_of_ranks, sum), merged(rounds_of_ranks, sum)
    if step.tokens:
        metrics["tokens"] = step.tokens / steps
    gpu = _largest("gib", [each.gpu_gib for each in steps_of_ranks])
    largest = gpu or _largest("gib", [each.host_gib for each in steps_of_ranks])
    metrics["memory_gib"] = largest["gib/max"]
    if kv_use := max(each.engine_kv_use for each in rounds_of_ranks):
        metrics["kv_use"] = kv_use
    if rounds.engine_clock_s:
        metrics["engine_busy"] = rounds.engine_busy_s / rounds.engine_clock_s
        metrics["engine_filled"] = rounds.engine_slot_s / rounds.engine_clock_s
    return metrics
