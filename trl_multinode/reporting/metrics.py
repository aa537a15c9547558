"""Metrics of an interval between two logs, from the numbers of all ranks. docs/operate/observe.md lists the names."""

import math
from dataclasses import dataclass
from statistics import fmean

from ..engine.agents import Measure
from ..rollouts.staleness import SUMS, column
from ..run.phases import PHASES
from ..run.topology import Topology
from ..weights.timings import STAGES
from .flops import ModelFlops

SECONDS_PER_HOUR = 3600.0
# Numbers that one rank contributes to a log: seconds by phase, those of the last sync by stage, sums over rounds
NUMBERS = (
    *PHASES,
    *STAGES,
    *SUMS,
    "interval_s",  # since the last log
    "batch_tokens",  # tokens of prompts and completions in the micro-batches
    "squares",  # sum of the squared lengths of their rows
    "loss_tokens",  # completion tokens in the loss; an iteration counts them again
    "gpu_gib",  # peak of the memory that torch has reserved on the rank's GPU, since the start
    "gpu_share",  # of the GPU's memory, including what other processes use there now
    "host_gib",  # resident memory of the process
)

RankNumbers = dict[str, float]  # by `NUMBERS`


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
    metrics |= _largest("memory/gpu_gib", column(ranks, "gpu_gib"), topology)
    metrics |= _largest("memory/gpu_share", column(ranks, "gpu_share"))
    metrics |= _largest("memory/host_gib", column(ranks, "host_gib"), topology)
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
    clock_s = sum(column(ranks, "engine_clock_s"))
    interval_s = max(column(ranks, "interval_s"))
    shares: list[float] = []  # of the slots, one per engine
    if clock_s:
        shares += [sum(column(ranks, "engine_slot_s")) / clock_s] * own
    if pool_filled is not None:
        shares += [pool_filled] * (engines - own)
    if not shares or not interval_s:
        return None
    waiting = max(column(ranks, "generate")) / interval_s
    return Measure(step, engines, fmean(shares), min(1.0, waiting))


def _phase_metrics(ranks: list[RankNumbers], steps: int, shape: RunShape) -> dict[str, float]:
    metrics = {"perf/step_s": max(column(ranks, "interval_s")) / steps}
    for name in PHASES:
        seconds = [rank[name] / steps for rank in ranks]
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
    wall, devices = max(column(ranks, "interval_s")), shape.topology.num_devices
    tokens = sum(column(ranks, "batch_tokens"))
    if not (wall and tokens):  # a trainer whose batches have no masks
        return {}
    trained = sum(column(ranks, "loss_tokens")) / shape.iterations
    metrics = {
        "perf/tokens_per_s": tokens / wall,
        "perf/tokens_per_s_per_device": tokens / wall / devices,
        "perf/valid_tokens_per_device_hour": trained / wall / devices * SECONDS_PER_HOUR,
    }
    train_s = sum(column(ranks, "train"))
    if shape.flops is not None and shape.peak_flops is not None and train_s:
        flops = shape.flops.of(tokens, sum(column(ranks, "squares")))
        metrics["perf/mfu"] = flops / (train_s * shape.peak_flops)
    return metrics


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
    metrics = {f"{name}_s": fmean(column(ranks, name)) / steps for name in PHASES}
    if tokens := sum(column(ranks, "batch_tokens")):
        metrics["tokens"] = tokens / steps
    gpu = _largest("gib", column(ranks, "gpu_gib"))
    largest = gpu or _largest("gib", column(ranks, "host_gib"))
    metrics["memory_gib"] = largest["gib/max"]
    if kv_use := max(column(ranks, "engine_kv_use")):
        metrics["kv_use"] = kv_use
    if clock_s := sum(column(ranks, "engine_clock_s")):
        metrics["engine_busy"] = sum(column(ranks, "engine_busy_s")) / clock_s
        metrics["engine_filled"] = sum(column(ranks, "engine_slot_s")) / clock_s
    return metrics
