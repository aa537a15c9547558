"""A run as one HTML page that needs no network: scripts, styles and data are inside it."""

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from .lanes import COLORS, STEP_PHASES, Lane
from .reading import Run
from .table import step_seconds, title

FILES = Path(__file__).parent / "page_files"
MOST_PIECES = 40_000  # of the timeline: 1 MB of the page, and drawn in below 0.1 s
MOST_BARS = 100_000  # nodes x steps of the bars
PHASES = list(COLORS)
# to look at first, in the order of the questions in docs/operate/observe.md
CHARTS = {
    "reward": "reward",
    "groups of equal rewards": "frac_reward_zero_std",
    "completion tokens": "completions/mean_length",
    "clipped completions": "completions/clipped_ratio",
    "logprob difference": "sampling/sampling_logp_difference/mean",
    "seconds per step": "perf/step_s",
    "engines busy": "engine/busy",
    "ranks busy": "perf/rank_busy_share",
}
RUN = ("model", "nodes", "ranks_per_node", "engines_per_node", "engine_gpus")


def write_page(run: Run, steps: range, path: Path) -> list[str]:
    """Write the page.

    Args:
        run ([`Run`]):
            The whole attempt.
        steps (`range`):
            Steps of the timeline and of the bars; the reward has those of the whole run.
        path (`Path`):
            File to write.

    Returns:
        `list[str]`: lines for the user.
    """
    parts = {
        name: (FILES / name).read_text(encoding="utf-8")
        for name in ("page.css", "charts.js", "lanes.js", "page.js")
    }
    parts["DATA"] = json.dumps(page_data(run, steps), separators=(",", ":")).replace("<", "\\u003c")
    text = (FILES / "page.html").read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part)
    path.write_text(text, encoding="utf-8")
    return [
        f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB): open it in a browser, it needs no network"
    ]


def page_data(run: Run, steps: range) -> dict[str, Any]:
    """Return everything that the page shows."""
    shown = run.cut(_fitting(run, steps))
    begin = shown.begin
    return {
        "title": title(run),
        "phases": [[name, COLORS[name]] for name in PHASES],
        "notes": run.notes,
        "later": run.attempt < run.attempts[-1],
        "endings": [{"node": node, **ending} for node, ending in run.endings.items()],
        "losses": [
            {
                "node": lane.node,
                "lane": lane.name,
                "at": round(mark.at - run.begin, 1),
                "what": mark.text,
            }
            for lane in run.lanes
            for mark in lane.marks
            if mark.kind == "lost"
        ],
        "run": {name: run.settings[name] for name in RUN if run.settings.get(name)},
        "started": run.begin,
        "settings": run.settings.get("settings", {}),
        "defaults": run.settings.get("defaults", {}),
        "versions": run.settings.get("versions", {}),
        "metrics": metrics(run.logs),
        "overview": list(CHARTS.items()),
        "completions": run.completions,
        "bars": bars(run, steps),
        "timeline": {
            "seconds": round(shown.end - begin, 4),
            "offset": round(begin - run.begin, 1),
            "steps": [[step, round(at - begin, 4)] for step, at in shown.starts.items()],
            "lanes": [_lane(lane, begin) for lane in shown.lanes],
        },
    }


def _fitting(run: Run, steps: range) -> range:
    """Return the last of some steps whose pieces fit into the page, at least one; with the first one also set-up."""
    counts = dict.fromkeys(steps, 0)
    for lane in run.lanes:
        for span in lane.spans:
            if span.step in counts:
                counts[span.step] += (
                    2  # an outer span is a piece before and a piece after each one inside it
                )
    left, first = MOST_PIECES, steps[-1]
    for step in reversed(steps):
        left -= counts[step]
        if left < 0:
            break
        first = step
    if first == run.steps()[0]:
        first = 0  # the number of phases before the steps
    return range(first, steps[-1] + 1)


def _lane(lane: Lane, begin: float) -> dict[str, Any]:
    pieces = []
    for piece in lane.pieces():
        phase = PHASES.index(piece.phase if piece.phase in COLORS else "other")
        found = [
            round(piece.start - begin, 4),
            round(piece.end - piece.start, 4),
            phase,
            piece.step,
        ]
        pieces.append([*found, piece.note] if piece.note else found)
    return {
        "node": lane.node,
        "name": lane.name,
        "pieces": pieces,
        "rows": [[round(at - begin, 4), rows] for at, rows in lane.rows],
        "marks": [[mark.kind, round(mark.at - begin, 4), mark.text] for mark in lane.marks],
    }


def bars(run: Run, steps: range) -> dict[str, Any]:
    """Return the seconds of each phase by node and step, as means over the node's ranks, without evaluations."""
    most = max(1, MOST_BARS // max(1, len(run.nodes)))
    numbers = [step for step in run.steps() if step in steps][-most:]
    nodes = {}
    for node in run.nodes:
        seconds = step_seconds(run.of(node, "rank"))
        nodes[str(node)] = [
            [round(seconds[step, phase], 3) for phase in STEP_PHASES] for step in numbers
        ]
    return {
        "steps": numbers,
        "phases": [PHASES.index(phase) for phase in STEP_PHASES],
        "nodes": nodes,
    }


def metrics(logs: list[dict[str, Any]]) -> dict[str, list[list[float]]]:
    """Return steps and values of each logged number; of a step that was logged twice the later value."""
    found: dict[str, dict[float, float]] = defaultdict(dict)
    for line in logs:
        for name in line.keys() - {"step", "attempt", "time"}:
            value = line[name]
            if type(value) in (int, float) and math.isfinite(value) and "step" in line:
                found[name][line["step"]] = float(f"{value:.5g}")
    return {
        name: [[step, value] for step, value in sorted(values.items())]
        for name, values in sorted(found.items())
    }
