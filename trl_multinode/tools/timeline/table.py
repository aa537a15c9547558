"""The table that the command prints: seconds of each phase by node, and how busy the engines were."""

import sys

from rich.console import Console
from rich.table import Table

from .lanes import STEP_PHASES, Lane
from .reading import Run


def title(run: Run) -> str:
    """Return one line about a part of a run."""
    steps = run.steps()
    ranks = sum(lane.kind == "rank" for lane in run.lanes)
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    attempt = f", attempt {run.attempt} of {run.attempts[-1]}" if len(run.attempts) > 1 else ""
    engines = len(run.lanes) - ranks
    return f"{_count(len(run.nodes), 'node')}, {_count(ranks, 'rank')}, {_count(engines, 'engine')}, {which}{attempt}"


def print_table(run: Run) -> None:
    """Print a row per node: seconds of a step by phase, as means over ranks, and what its engines did."""
    table = Table(title=title(run), title_justify="left")
    table.add_column("node", justify="right")
    for name in (*(f"{phase} s" for phase in STEP_PHASES), "engines busy", "swaps", "restarts"):
        table.add_column(name, justify="right")
    for node in run.nodes:
        table.add_row(str(node), *cells([lane for lane in run.lanes if lane.node == node], run))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def cells(lanes: list[Lane], run: Run) -> list[str]:
    """Return the cells of a node's row."""
    ranks = [lane for lane in lanes if lane.kind == "rank"]
    engines = [lane for lane in lanes if lane.kind == "engine"]
    steps = len(run.starts)
    seconds = [phase_seconds(ranks, phase) / steps for phase in STEP_PHASES]
    whole = (run.end - run.begin) * len(engines)
    busy = f"{100 * sum(busy_seconds(lane) for lane in engines) / whole:.0f} %" if whole else "-"
    counts = [
        sum(mark.kind == kind for lane in engines for mark in lane.marks) if engines else "-"
        for kind in ("swap", "restart")
    ]
    return [*(f"{each:.2f}" for each in seconds), busy, *map(str, counts)]


def phase_seconds(ranks: list[Lane], phase: str) -> float:
    """Return the seconds of a phase outside of evaluations, as the log counts them: a mean over ranks."""
    found = [piece for lane in ranks for piece in lane.pieces() if piece.phase == phase and not piece.evaluation]
    return sum(piece.end - piece.start for piece in found) / max(1, len(ranks))


def busy_seconds(engine: Lane) -> float:
    """Return the seconds in which an engine generated."""
    return engine.seconds().get("generate", 0.0)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")
