"""The files of a run, from its `output_dir` or from those of its nodes: phases, states, settings, logs and endings."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from .completions import read_completions
from .lanes import STEP_PHASES, Lane, PhaseLine, State, engine_lane, nested

RANK = re.compile(r"rank(\d+)\.jsonl")
ENGINE = re.compile(r"node(\d+)_engine(\d+)\.jsonl")
# Of lines in which the page refuses NaN and infinity
PLAIN = partial(json.loads, parse_constant=str)


class TimelineError(Exception):
    """Something that the command cannot show; the message has what was given, what was expected, and the cure."""


@dataclass
class Run:
    """One attempt of a run: the lanes in the order of nodes, ranks before engines."""

    lanes: list[Lane]
    attempt: int
    attempts: list[int]
    notes: list[str] = field(default_factory=list)  # what is missing or was assumed
    settings: dict[str, Any] = field(default_factory=dict)
    logs: list[dict[str, Any]] = field(default_factory=list)  # of all attempts
    endings: dict[int, dict[str, Any]] = field(default_factory=dict)  # by node
    completions: dict[str, Any] = field(default_factory=dict)  # of the newest log that has them
    # by step of the log: begin on the first rank
    starts: dict[int, float] = field(default_factory=dict)

    @property
    def nodes(self) -> list[int]:
        return sorted({lane.node for lane in self.lanes})

    def of(self, node: int, kind: str) -> list[Lane]:
        """Return the lanes of the ranks or of the engines of a node."""
        return [lane for lane in self.lanes if (lane.node, lane.kind) == (node, kind)]

    @property
    def begin(self) -> float:
        return min(span.start for lane in self.lanes for span in lane.spans)

    @property
    def end(self) -> float:
        return max(span.end for lane in self.lanes for span in lane.spans)

    def steps(self) -> list[int]:
        """Return the numbers of the steps, as the log has them."""
        return sorted(self.starts)

    def cut(self, steps: range) -> "Run":
        """Return the run between the begin of the first and the end of the last of some steps.

        The phases of ranks are kept whole, and the states of engines are cut.
        """
        ranks = {lane.name: lane.of_steps(steps) for lane in self.lanes if lane.kind == "rank"}
        part = replace(self, lanes=[lane for lane in ranks.values() if lane.spans])
        lanes = [ranks.get(lane.name) or lane.within(part.begin, part.end) for lane in self.lanes]
        starts = {step: at for step, at in self.starts.items() if step in steps}
        return replace(
            self,
            lanes=[lane for lane in lanes if lane.spans or lane.kind == "engine"],
            starts=starts,
        )


def read_run(folders: Sequence[Path], attempt: int | None = None) -> Run:
    """Read a run.

    Args:
        folders (`Sequence[Path]`):
            `output_dir` of the run; those of its nodes if they do not share it.
        attempt (`int`, *optional*):
            Number of the attempt. Default: the last one.

    Raises:
        `TimelineError`: if a folder has no phases, or if the run has no such attempt.
    """
    every, broken = numbered_lines(folders, RANK, PhaseLine)
    attempts = sorted({line.attempt for lines in every.values() for line in lines})
    if not attempts:
        raise TimelineError(f"{folders[0]} has files of phases, but no line of them can be read.")
    chosen = attempts[-1] if attempt is None else attempt
    if chosen not in attempts:
        raise TimelineError(
            f"{folders[0]} has no attempt {chosen} (got --attempt {chosen}, expected one of {attempts})."
        )
    states, broken_states = numbered_lines(folders, ENGINE, State)
    ranks = of_attempt(every, chosen)
    offsets, notes = _offsets(ranks)
    lanes = _lanes(ranks, of_attempt(states, chosen), offsets)
    run = Run(lanes, chosen, attempts, notes, starts=_starts(lanes))
    if missing := {line.node for lines in every.values() for line in lines} - set(run.nodes):
        what = "it ended before its first phase, or was not part of it"
        run.notes.append(f"node {_listed(missing)} has no line of attempt {chosen}: {what}")
    if broken := broken + broken_states:
        run.notes.append(
            f"{broken} line(s) could not be read: those of a killed process may end in the middle"
        )
    run.settings = next(
        (line for line in reversed(read_settings(folders)) if line.get("attempt") == chosen), {}
    )
    run.logs = read_logs(folders)
    run.completions = read_completions(folders)
    if chosen == attempts[-1]:  # a launch deletes the endings before it
        run.endings = _endings(folders)
    return run


def _lanes(
    ranks: dict[Any, list[PhaseLine]], engines: dict[Any, list[State]], offsets: dict[int, float]
) -> list[Lane]:
    """Return the lanes by the clock of node 0, in the order of nodes, ranks before engines."""
    every: list[list[Any]] = [*ranks.values(), *engines.values()]
    for lines in every:
        for line in lines:
            line.start -= offsets.get(line.node, 0.0)
    lanes = [Lane(lines[0].node, "rank", rank, nested(lines)) for (rank,), lines in ranks.items()]
    end = max(span.end for lane in lanes for span in lane.spans)
    lanes += [engine_lane(node, number, lines, end) for (node, number), lines in engines.items()]
    return sorted(lanes, key=lambda lane: (lane.node, lane.kind != "rank", lane.number))


def numbered_lines(
    folders: Sequence[Path], name: re.Pattern, kind: type
) -> tuple[dict[tuple[int, ...], list], int]:
    """Return the lines of the files of phases with such names by the numbers in them, and the number of broken ones.

    Raises:
        `TimelineError`: if a folder has no files of phases.
    """
    decode: Callable = msgspec.json.Decoder(kind).decode
    found: dict[tuple[int, ...], list] = {}
    for folder in folders:
        phases = folder / "_multinode" / "phases"
        paths = sorted(phases.glob("*.jsonl"))
        if not paths:
            raise TimelineError(
                f"{folder} has no files of a run (expected {phases}/rank<r>.jsonl). Pass the `output_dir` of a run; "
                "if the nodes do not share it, pass that of each node."
            )
        for path in paths:
            if match := name.fullmatch(path.name):
                found.setdefault(tuple(map(int, match.groups())), list(_lines(path, decode)))
    whole = {
        numbers: [line for line in lines if line is not None]
        for numbers, lines in sorted(found.items())
    }
    return whole, sum(lines.count(None) for lines in found.values())


def of_attempt(files: dict[Any, list], attempt: int) -> dict[Any, list]:
    """Return the lines of an attempt, without files that have none."""
    found = {
        key: [line for line in lines if line.attempt == attempt] for key, lines in files.items()
    }
    return {key: lines for key, lines in found.items() if lines}


def _lines(path: Path, decode: Callable) -> Iterator[Any]:
    """Yield the lines of a file, the rotated part first; `None` for a line that cannot be read."""
    for part in (path.with_name(f"{path.name}.1"), path):
        if part.exists():
            for line in part.read_bytes().splitlines():
                try:
                    yield decode(line)
                except ValueError:
                    yield None


def _offsets(ranks: dict[Any, list[PhaseLine]]) -> tuple[dict[int, float], list[str]]:
    """Return the seconds by which the clock of each node is ahead of node 0's, and a note if one is not known.

    Lines before the first meeting of the ranks do not have it yet, so the last one of a node counts.
    """
    every = [line for lines in ranks.values() for line in lines]
    found = {line.node: line.clock_offset for line in every if line.clock_offset is not None}
    unknown = {line.node for line in every} - found.keys() - {0}
    if not unknown:
        return found, []
    return found, [
        f"the clock of node {_listed(unknown)} was not measured (no weight sync): its lanes may be shifted"
    ]


def _listed(nodes: set[int]) -> str:
    return ", ".join(map(str, sorted(nodes)))


def _starts(lanes: Sequence[Lane]) -> dict[int, float]:
    """Return the begin of each step on the first rank.

    The line of `train`, which is around the other phases, is written at its end. So it is missing in the step in which
    a process was killed, or that goes on: that step begins with its first finished phase.
    """
    train: dict[int, float] = {}
    others: dict[int, float] = {}
    for span in (span for lane in lanes for span in lane.spans):
        if span.step and not span.evaluation and span.phase in STEP_PHASES:
            found = train if span.phase == "train" else others
            found[span.step] = min(found.get(span.step, span.start), span.start)
    return dict(sorted((others | train).items()))


# ---- what the run said of itself


def read_settings(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the settings of each start."""
    return [
        line
        for folder in folders
        for line in _lines(folder / "_multinode" / "settings.jsonl", PLAIN)
        if line
    ]


def read_logs(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the logs: those of the run's own file, or else of the newest `trainer_state.json`."""
    if lines := [
        line
        for folder in folders
        for line in _lines(folder / "_multinode" / "log.jsonl", PLAIN)
        if line
    ]:
        return lines
    # One that is being written has no line that can be read
    paths = [path for folder in folders for path in folder.glob("**/trainer_state.json")]
    states = [state for path in paths for state in _whole(path)]
    newest: dict[str, Any] = max(states, key=lambda state: state.get("global_step", 0), default={})
    return newest.get("log_history", [])


def _endings(folders: Sequence[Path]) -> dict[int, dict[str, Any]]:
    paths = [
        path for folder in folders for path in (folder / "_multinode").glob("ending-node*.json")
    ]
    found = {ending["node"]: ending for path in paths for ending in _whole(path)}
    return dict(sorted(found.items()))


def _whole(path: Path) -> list[dict[str, Any]]:
    """Return the document of a file as a list; an empty one if the file is being written."""
    try:
        return [PLAIN(path.read_text())]
    except (OSError, ValueError):
        return []
