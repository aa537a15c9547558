"""Measured seconds of a run, from the files in its `output_dir`."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ..timeline.lanes import PhaseLine
from ..timeline.reading import RANK, TimelineError, read_logs, read_phases, read_settings
from . import PlanError

TAIL_ROWS = 0.1  # an engine generates a tail with fewer than this share of its rows
WARM_UP = 0.2  # share of the steps, at least one, that is left out
AHEAD = 0.01  # share of the time hidden behind training, above which a run generates ahead


@dataclass(frozen=True)
class StepTimes:
    """Measured seconds of one step.

    Args:
        generate_s (`float`), train_s (`float`):
            Seconds in which engines generate, and in which ranks train.
        tail_s (`float`, *optional*, defaults to 0):
            Part of `generate_s` in which an engine has fewer than 10 % of its rows.
    """

    generate_s: float
    train_s: float
    tail_s: float = 0.0

    def drained(self, gpus: float) -> float:
        """Return the seconds of generation with `gpus` times the present GPUs, if a round waits for all of its rows.

        More engines share the rows, but the longest rows end no sooner.
        """
        return self.tail_s + (self.generate_s - self.tail_s) / gpus

    def in_flight(self, gpus: float) -> float:
        """Return the same if rows of other rounds take the place of those that ended: a row of the tail then takes at
        most 10 % of an engine."""
        return (self.generate_s - self.tail_s + TAIL_ROWS * self.tail_s) / gpus


@dataclass(frozen=True)
class MeasuredRun:
    """Seconds of a step of a run, and the split with which they were measured."""

    times: StepTimes
    sync_s: float
    training: int  # ranks of a node
    reserved: int | None  # GPUs of a node; `None` without a log
    nodes: int
    steps: int  # that the means are of
    ahead: bool
    in_flight: bool
    tail_known: bool
    mean_length: float | None  # tokens of a completion


def read_run(folder: str) -> MeasuredRun:
    """Read the files of phases of the last attempt, and the logs, which have the tail.

    Raises:
        `PlanError`: if the folder has no files of phases, or fewer than two steps in them.
    """
    path = Path(folder)
    ranks = _last_attempt(path)
    nodes = Counter(lines[0].node for lines in ranks)
    _check_nodes(path, nodes)
    kept = _measured_steps(ranks, folder)
    logs = [
        log for log in read_logs([path]) if log.get("step", 0) > kept[0] and "perf/step_s" in log
    ]
    step_s = mean_of(logs, "perf/step_s") or 0.0
    hidden = mean_of(logs, "perf/hidden_share") or 0.0
    tail = mean_of(logs, "engine/tail_share")
    in_flight = mean_of(logs, "in_flight/mixed_rows") is not None
    generate = _slowest(ranks, "generate", kept) + hidden * step_s
    if in_flight:
        generate = step_s  # engines always work
    training = max(nodes.values())
    return MeasuredRun(
        times=StepTimes(
            generate, _slowest(ranks, "train", kept), min(generate, (tail or 0.0) * step_s)
        ),
        sync_s=_slowest(ranks, "sync", kept),
        training=training,
        reserved=_reserved(logs, len(nodes), training, folder),
        nodes=len(nodes),
        steps=len(kept),
        ahead=in_flight or hidden > AHEAD,
        in_flight=in_flight,
        tail_known=tail is not None,
        mean_length=mean_of(logs, "completions/mean_length"),
    )


def _last_attempt(path: Path) -> list[list[PhaseLine]]:
    """Return the phases of each rank in the last attempt of a run."""
    try:
        phases = read_phases([path], RANK, (PhaseLine,))
    except TimelineError as error:
        raise PlanError(f"`--run` is an `output_dir`: {error}") from None
    last = max(phases.attempts(), default=0)
    return list(phases.of_attempt(last).values())


def _measured_steps(ranks: list[list[PhaseLine]], folder: str) -> list[int]:
    """Return the steps of a run without those of its warm-up."""
    steps = sorted({line.step for lines in ranks for line in lines if line.phase == "train"})
    kept = steps[max(1, int(WARM_UP * len(steps))) :]
    if not kept:
        raise PlanError(
            f"`--run` needs two steps at least (got {len(steps)} in {folder!r}): wait for more."
        )
    return kept


def _slowest(ranks: list[list[PhaseLine]], phase: str, steps: list[int]) -> float:
    """Return the seconds of a phase in a step on the rank on which it takes longest, without evaluations."""
    sums = []
    for lines in ranks:
        found = [
            line
            for line in lines
            if line.phase == phase and line.step in steps and not line.evaluation
        ]
        sums.append(sum(line.seconds for line in found))
    return max(sums) / len(steps)


def _check_nodes(path: Path, nodes: Counter[int]) -> None:
    """Raise `PlanError` if nodes of the run have no files here: their GPUs would look like reserved ones."""
    settings = read_settings([path])
    count = settings[-1].get("nodes", 0) if settings else 0
    if missing := sorted({*range(count)} - nodes.keys()):
        raise PlanError(
            f"`--run` needs the files of all {count} nodes (got none of node {', '.join(map(str, missing))} for the "
            f"last start in {path}): copy their _multinode/phases into one folder."
        )


def _reserved(logs: list[dict[str, Any]], nodes: int, training: int, folder: str) -> int | None:
    rates = [
        (log.get("perf/tokens_per_s"), log.get("perf/tokens_per_s_per_device")) for log in logs
    ]
    devices = [all_ / each for all_, each in rates if all_ and each]
    if not devices:
        return None
    reserved = round(fmean(devices) / nodes) - training
    if reserved == 0:
        raise PlanError(
            f"`--run` needs GPUs that only generate (got {folder!r}, whose engines share GPUs with training): its "
            "seconds cannot be divided between splits. Leave --run out, or run some steps with a split."
        )
    return reserved


def mean_of(logs: list[dict[str, Any]], name: str) -> float | None:
    """Return the mean of a metric over the logs that have it."""
    found = [log[name] for log in logs if name in log]
    return fmean(found) if found else None
