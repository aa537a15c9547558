"""Measured seconds of a run, from the files in its `output_dir`."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ...run.splits import StepTimes
from . import PlanError

WARM_UP = 0.2  # share of the steps, at least one, that is left out
OVERLAPPED = 0.01  # share of the time hidden behind training, above which a run generates ahead


@dataclass(frozen=True)
class MeasuredRun:
    """Seconds of a step of a run, and the split with which they were measured."""

    folder: str
    times: StepTimes
    sync_s: float
    training: int  # ranks of a node
    reserved: int | None  # GPUs of a node; `None` without a log
    nodes: int
    steps: int  # that the means are of
    overlapped: bool
    in_flight: bool
    tail_known: bool
    mean_length: float | None  # tokens of a completion


def read_run(folder: str) -> MeasuredRun:
    """Read the files of phases of the last attempt, and the newest `trainer_state.json`, which has the tail.

    Raises:
        `PlanError`: if the folder has no files of phases, or fewer than two steps in them.
    """
    path = Path(folder)
    lines = list(phase_lines(path / "_multinode" / "phases"))
    if not lines:
        raise PlanError(
            f"`--run` is the `output_dir` of a run (got {folder!r}, expected _multinode/phases/rank0.jsonl in it)."
        )
    attempt = max(line["attempt"] for line in lines)
    lines = [line for line in lines if line["attempt"] == attempt and line["phase"] in ("sync", "generate", "train")]
    lines = [line for line in lines if not line.get("evaluation")]  # no part of a training step
    steps = sorted({line["step"] for line in lines if line["phase"] == "train"})
    kept = set(steps[max(1, int(WARM_UP * len(steps))) :])
    if not kept:
        raise PlanError(f"`--run` needs two steps at least (got {len(steps)} in {folder!r}): wait for more.")
    sums: dict[tuple[int, str], float] = defaultdict(float)
    for line in lines:
        if line["step"] in kept:
            sums[line["rank"], line["phase"]] += line["seconds"] / len(kept)
    nodes: dict[int, set[int]] = defaultdict(set)
    for line in lines:
        nodes[line["node"]].add(line["rank"])
    _check_nodes(path, nodes)
    mean = {name: max(s for (_, phase), s in sums.items() if phase == name) for name in {key[1] for key in sums}}
    run = _with_logs(path, mean, nodes, kept)
    if run.reserved == 0:
        raise PlanError(
            f"`--run` needs GPUs that only generate (got {folder!r}, whose engines share GPUs with training): its "
            "seconds cannot be divided between splits. Leave --run out, or run some steps with a split."
        )
    return run


def _check_nodes(path: Path, nodes: Mapping[int, set[int]]) -> None:
    """Raise `PlanError` if nodes of the run have no files here: their GPUs would look like reserved ones."""
    count = 0
    with suppress(OSError, ValueError, KeyError, IndexError, TypeError):
        count = int(json.loads((path / "_multinode" / "settings.jsonl").read_text().splitlines()[-1])["nodes"])
    if missing := sorted({*range(count)} - nodes.keys()):
        raise PlanError(
            f"`--run` needs the files of all {count} nodes (got none of node {', '.join(map(str, missing))} for the "
            f"last start in {path}): copy their _multinode/phases into one folder."
        )


def _with_logs(path: Path, mean: dict[str, float], nodes: dict[int, set[int]], kept: set[int]) -> MeasuredRun:
    logs = [log for log in log_history(path) if log.get("step", 0) > min(kept) and "perf/step_s" in log]
    step_s, ranks = mean_of(logs, "perf/step_s") or 0.0, max(map(len, nodes.values()))
    hidden, tail = mean_of(logs, "perf/hidden_share") or 0.0, mean_of(logs, "engine/tail_share")
    in_flight = any("in_flight/mixed_rows" in log for log in logs)
    generate = step_s if in_flight else mean.get("generate", 0.0) + hidden * step_s  # in flight engines always work
    devices = [log["perf/tokens_per_s"] / log["perf/tokens_per_s_per_device"] for log in logs if _has_rate(log)]
    return MeasuredRun(
        folder=str(path),
        times=StepTimes(generate, mean["train"], min(generate, (tail or 0.0) * step_s)),
        sync_s=mean.get("sync", 0.0),
        training=ranks,
        reserved=round(fmean(devices) / len(nodes)) - ranks if devices else None,
        nodes=len(nodes),
        steps=len(kept),
        overlapped=in_flight or hidden > OVERLAPPED,
        in_flight=in_flight,
        tail_known=tail is not None,
        mean_length=mean_of(logs, "completions/mean_length"),
    )


def _has_rate(log: dict[str, Any]) -> bool:
    return bool(log.get("perf/tokens_per_s") and log.get("perf/tokens_per_s_per_device"))


def mean_of(logs: list[dict[str, Any]], name: str) -> float | None:
    """Return the mean of a metric over the logs that have it."""
    found = [log[name] for log in logs if name in log]
    return fmean(found) if found else None


def phase_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of all ranks, each with its rank. A killed run may have left half a line."""
    for file in sorted(folder.glob("rank*.jsonl*")):
        rank = int(file.name.partition(".")[0].removeprefix("rank"))
        for line in file.read_text().splitlines():
            try:
                yield json.loads(line) | {"rank": rank}
            except json.JSONDecodeError:
                continue


def log_history(folder: Path) -> list[dict[str, Any]]:
    """Return the log of the newest `trainer_state.json` of an `output_dir`; empty before the first checkpoint."""
    states = []
    for file in (folder / "trainer_state.json", *folder.glob("checkpoint-*/trainer_state.json")):
        try:
            states.append(json.loads(file.read_text()))
        except (OSError, json.JSONDecodeError):  # no file, or one that is being written
            continue
    newest: dict[str, Any] = max(states, key=lambda state: state.get("global_step", 0), default={})
    return list(newest.get("log_history", []))
