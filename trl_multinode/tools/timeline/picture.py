"""A run as a picture: a lane per rank and per engine. Only this file imports matplotlib, and only when it draws."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .lanes import COLORS, Lane, Mark, Span
from .reading import Run, TimelineError

MOST_LANES = 48  # of a picture; with more, each node has its slowest rank and its engines
MISSING = "a picture needs matplotlib: `pip install 'trl-multinode[timeline]'`, or leave --png out"
MARKS = {"swap": ("v", "#111111", "weights replaced in flight"), "lost": ("X", "#c00000", "engine lost"),
         "restart": ("^", "#c00000", "engine started again")}  # fmt: skip
SMALLEST_SHARE = 1e-4  # of all seconds; a phase with less cannot be seen
WIDTH, LANE, MARGIN = 12.0, 0.3, 1.5  # inches


def draw(run: Run, path: Path, title: str) -> list[str]:
    """Write a PNG file.

    Args:
        run ([`Run`]):
            Run, cut to a few steps.
        path (`Path`):
            File to write.
        title (`str`):
            Line above the picture.

    Returns:
        `list[str]`: lines about what the picture leaves out.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise TimelineError(MISSING) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lanes, notes = chosen(run)
    figure, axes = pyplot.subplots(figsize=(WIDTH, MARGIN + LANE * len(lanes)))
    for row, lane in enumerate(lanes):
        _draw_lane(axes, row, lane, run.begin)
    _draw_axes(axes, run, lanes)
    axes.set_title(title, loc="left", fontsize=10, pad=22)
    _draw_legend(axes, lanes)
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)
    return notes


def chosen(run: Run) -> tuple[list[Lane], list[str]]:
    """Return the lanes of a picture, and a line about those that have no room."""
    if len(run.lanes) <= MOST_LANES:
        return run.lanes, []
    slowest: dict[int, tuple[Lane, float]] = {}
    for lane in run.lanes:
        if lane.kind == "rank":
            waits = lane.seconds().get("wait", 0.0)
            if waits < slowest.get(lane.node, (lane, float("inf")))[1]:
                slowest[lane.node] = (lane, waits)
    kept = {id(lane) for lane, _ in slowest.values()}
    lanes = [lane for lane in run.lanes if lane.kind == "engine" or id(lane) in kept]
    note = "of the ranks only the one of each node that waits least"
    if len(lanes) > MOST_LANES:
        note += f", and of {len(lanes)} lanes the first {MOST_LANES}; --nodes chooses others"
    return lanes[:MOST_LANES], [f"the picture has {note}"]


def _draw_lane(axes: Any, row: int, lane: Lane, begin: float) -> None:
    bars: dict[str, list[tuple[float, float]]] = {}
    for piece in lane.pieces():
        bars.setdefault(piece.phase, []).append((piece.start - begin, piece.end - piece.start))
    has_rows = any(rows for _, rows in lane.rows)
    for phase, found in bars.items():
        color = COLORS.get(phase, COLORS["other"])
        pale = has_rows and phase == "generate"
        axes.broken_barh(found, (row - 0.4, 0.8), color=color, alpha=0.35 if pale else 1.0, linewidth=0)
    if has_rows:
        _draw_rows(axes, row, lane, begin)
    for mark in lane.marks:
        shape, color, _ = MARKS[mark.kind]
        axes.plot(mark.at - begin, row - 0.4, shape, color=color, markersize=5, clip_on=False, zorder=5)


def _draw_rows(axes: Any, row: int, lane: Lane, begin: float) -> None:
    """Draw how many rows run, as the height of a darker area: a long tail of completions is a thin one."""
    most = max(rows for _, rows in lane.rows)
    for piece in lane.pieces():
        if piece.phase == "generate":
            times, heights = _during(piece, lane.rows)
            tops = [row + 0.4 - 0.8 * height / most for height in heights]
            axes.fill_between([at - begin for at in times], row + 0.4, tops, step="post",
                              color=COLORS["generate"], linewidth=0)  # fmt: skip


def _during(piece: Span, rows: Sequence[tuple[float, int]]) -> tuple[list[float], list[int]]:
    """Return the times and numbers of rows of a piece, from its begin to its end."""
    inside = [(at, number) for at, number in rows if piece.start <= at < piece.end]
    before = [number for at, number in rows if at <= piece.start][-1:]
    if before and (not inside or inside[0][0] > piece.start):
        inside.insert(0, (piece.start, before[0]))
    times, numbers = [at for at, _ in inside], [number for _, number in inside]
    return [*times, piece.end], [*numbers, *numbers[-1:]] or [0]


def _draw_axes(axes: Any, run: Run, lanes: Sequence[Lane]) -> None:
    axes.set_yticks(range(len(lanes)), [f"node {lane.node}  {lane.name}" for lane in lanes], fontsize=8)
    axes.set_ylim(len(lanes) - 0.5, -0.7)
    axes.set_xlim(0, run.end - run.begin)
    axes.set_xlabel("seconds")
    for row in range(1, len(lanes)):
        if lanes[row].node != lanes[row - 1].node:
            axes.axhline(row - 0.5, color="#888888", linewidth=0.6)
    evaluations: dict[int, float] = {}  # by step, because one follows a step
    for span in (span for lane in lanes for span in lane.spans if span.evaluation):
        evaluations[span.step] = min(span.start, evaluations.get(span.step, span.start))
    labels = [(at, f"step {step}") for step, at in run.starts.items()]
    labels += [(at, "evaluation") for at in evaluations.values()]
    for at, label in labels:
        axes.axvline(at - run.begin, color="#444444", linewidth=0.6, linestyle=":")
        axes.annotate(label, (at - run.begin, 1.0), xycoords=("data", "axes fraction"), fontsize=8,
                      xytext=(2, 3), textcoords="offset points")  # fmt: skip
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_legend(axes: Any, lanes: Sequence[Lane]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    seconds: dict[str, float] = {}
    for lane in lanes:
        for phase, each in lane.seconds().items():
            seconds[phase] = seconds.get(phase, 0.0) + each
    shown = {phase for phase, each in seconds.items() if each > SMALLEST_SHARE * sum(seconds.values())}
    handles: list[Any] = [Patch(color=color, label=phase) for phase, color in COLORS.items() if phase in shown]
    marks: list[Mark] = [mark for lane in lanes for mark in lane.marks]
    for kind, (shape, color, label) in MARKS.items():
        if any(mark.kind == kind for mark in marks):
            handles.append(Line2D([], [], marker=shape, color=color, linestyle="", label=label))
    axes.legend(handles=handles, ncols=min(8, len(handles)), loc="upper center", fontsize=8, frameon=False,
                bbox_to_anchor=(0.5, -0.55 / (LANE * len(lanes))))  # fmt: skip
