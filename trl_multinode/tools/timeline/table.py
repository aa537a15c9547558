"""The table that the command prints: seconds of each phase by node, and how busy the engines were."""

import sys
import time
from collections import defaultdict

from rich.console import Console

from ..text import count, rich_table
from .lanes import STEP_PHASES, Lane
from .reading import Run


def title(run: Run) -> str:
    """Return one line about a part of a run."""
    steps = run.steps()
    ranks = sum(lane.kind == "rank" for lane in run.lanes)
    parts = [
        count(len(run.nodes), "node"),
        count(ranks, "rank"),
        count(len(run.lanes) - ranks, "engine"),
        f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}",
    ]
    if len(run.attempts) > 1:
        parts.append(f"attempt {run.attempt} of {run.attempts[-1]}")
    return ", ".join(parts)


def print_table(run: Run) -> None:
    """Print a row per node: seconds of a step by phase, as means over ranks, and what its engines did; then the agents
    that joined or left."""
    rows = []
    for node in run.nodes:
        ranks = run.of(node, "rank")
        sums: dict[str, float] = defaultdict(float)
        for (_, phase), took in step_seconds(ranks).items():
            sums[phase] += took
        seconds = [f"{sums[phase] / len(run.starts):.2f}" for phase in STEP_PHASES]
        rows.append(
            [str(node), *seconds, *_engine_cells(run.of(node, "engine"), run.end - run.begin)]
        )
    phases = [f"{phase} s" for phase in STEP_PHASES]
    table = rich_table(
        title(run), ("node", *phases, "engines busy", "swaps", "restarts"), rows, justify="right"
    )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    marks = [mark for lane in run.lanes for mark in lane.marks if mark.kind == "agent"]
    for mark in sorted(marks, key=lambda mark: mark.at):
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(mark.at))}: {mark.text}")


def _engine_cells(engines: list[Lane], seconds: float) -> list[str]:
    if not engines:
        return ["-", "-", "-"]
    busy = sum(lane.seconds().get("generate", 0.0) for lane in engines) / seconds / len(engines)
    marks = [mark.kind for lane in engines for mark in lane.marks]
    return [f"{100 * busy:.0f} %", str(marks.count("swap")), str(marks.count("restart"))]


def step_seconds(ranks: list[Lane]) -> dict[tuple[int, str], float]:
    """Return the seconds by step and phase, outside of evaluations: means over ranks."""
    found: dict[tuple[int, str], float] = defaultdict(float)
    for piece in (piece for lane in ranks for piece in lane.pieces()):
        if not piece.evaluation:
            found[piece.step, piece.phase] += (piece.end - piece.start) / len(ranks)
    return found
