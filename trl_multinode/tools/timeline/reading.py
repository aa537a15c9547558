"""The files of a run, from its `output_dir` or from those of its nodes: phases, states, settings, logs and endings."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from .lanes import STEP_PHASES, Lane, State, Timed, engine_lane, nested

RANK, ENGINE = re.compile(r"rank(\d+)\.jsonl"), re.compile(r"node(\d+)_engine(\d+)\.jsonl")
ENDING = re.compile(r"ending-node(\d+)\.json")
T = TypeVar("T")


class TimelineError(Exception):
    """Something that the command cannot show; the message has what was given, what was expected, and the cure."""


class PhaseLine(msgspec.Struct):
    """A line of `rank<r>.jsonl`. Earlier versions wrote fewer fields."""

    phase: str
    start: float
    seconds: float
    step: int
    total: float | None = None
    node: int | None = None
    attempt: int = 1
    clock_offset: float | None = None
    evaluation: bool = False


class StateLine(msgspec.Struct):
    """A line of `node<k>_engine<i>.jsonl`."""

    phase: str
    start: float
    node: int
    engine: int
    attempt: int = 1
    rows: int = 0
    update: int = 0
    process: int = 0
    cause: str = ""


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
    starts: dict[int, float] = field(default_factory=dict)  # by step of the log: begin on the first rank

    @property
    def nodes(self) -> list[int]:
        return sorted({lane.node for lane in self.lanes})

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
        """Return the run between the begin of the first and the end of the last of some steps."""
        spans = [span for lane in self.lanes if lane.kind == "rank" for span in lane.spans if span.step in steps]
        start, end = min(span.start for span in spans), max(span.end for span in spans)
        lanes = [lane.within(start, end, steps) for lane in self.lanes]
        starts = {step: at for step, at in self.starts.items() if step in steps}
        return replace(self, lanes=[lane for lane in lanes if lane.spans or lane.kind == "engine"], starts=starts)


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
    files = _files(folders)
    broken = [0]
    ranks = {int(found[1]): _lines(paths, PhaseLine, broken) for found, paths in _matching(files, RANK)}
    engines = {(int(found[1]), int(found[2])): _lines(paths, StateLine, broken) for found, paths in
               _matching(files, ENGINE)}  # fmt: skip
    attempts = sorted({line.attempt for lines in ranks.values() for line in lines})
    if not attempts:
        raise TimelineError(f"{folders[0]} has files of phases, but no line of them can be read.")
    chosen = attempts[-1] if attempt is None else attempt
    if chosen not in attempts:
        raise TimelineError(
            f"{folders[0]} has no attempt {chosen} (got --attempt {chosen}, expected one of {attempts})."
        )
    run = _build(_of(ranks, chosen), _of(engines, chosen), chosen, attempts)
    run.notes += _without_lines(ranks, run.nodes, chosen)
    if broken[0]:
        run.notes.append(f"{broken[0]} line(s) could not be read: those of a killed process may end in the middle")
    run.settings = _settings(folders, chosen)
    run.logs = _logs(folders)
    run.endings = _endings(folders) if chosen == attempts[-1] else {}  # a launch deletes those before it
    return run


def _files(folders: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the paths of each file of phases, the rotated one first."""
    found: dict[str, list[Path]] = {}
    for folder in folders:
        phases = folder / "_multinode" / "phases"
        paths = sorted(phases.glob("*.jsonl"))
        if not paths:
            raise TimelineError(
                f"{folder} has no files of a run (expected {phases}/rank<r>.jsonl). Pass the `output_dir` of a run; "
                "if the nodes do not share it, pass that of each node."
            )
        for path in paths:
            if path.name not in found:
                rotated = path.with_name(f"{path.name}.1")
                found[path.name] = [rotated, path] if rotated.exists() else [path]
    return found


def _matching(files: dict[str, list[Path]], pattern: re.Pattern) -> Iterator[tuple[re.Match, list[Path]]]:
    for name, paths in files.items():
        if found := pattern.fullmatch(name):
            yield found, paths


def _lines(paths: Iterable[Path], kind: type[T], broken: list[int]) -> list[T]:
    decoder, found = msgspec.json.Decoder(kind), []
    for path in paths:
        for line in path.read_bytes().splitlines():
            try:
                found.append(decoder.decode(line))
            except msgspec.DecodeError:
                broken[0] += 1
    return found


def _of(files: dict[Any, list], attempt: int) -> dict[Any, list]:
    found = {key: [line for line in lines if line.attempt == attempt] for key, lines in files.items()}
    return {key: lines for key, lines in found.items() if lines}


def _build(ranks: dict[int, list], engines: dict[tuple[int, int], list], attempt: int, attempts: list[int]) -> Run:
    offsets, notes = _offsets(ranks)
    lanes = []
    for rank, lines in sorted(ranks.items()):
        node = lines[0].node or 0
        lanes.append(Lane(node, "rank", rank, nested(_timed(line, offsets.get(node, 0.0)) for line in lines)))
    end = max((span.end for lane in lanes for span in lane.spans), default=0.0)
    for (node, number), lines in sorted(engines.items()):
        states = [_state(line, offsets.get(node, 0.0)) for line in lines]
        lanes.append(engine_lane(node, number, states, max(end, states[-1].at)))
    if not engines:
        notes.append("no lane of an engine: the run was made by a version that did not record their states")
    lanes.sort(key=lambda lane: (lane.node, lane.kind != "rank", lane.number))
    return Run(lanes, attempt, attempts, notes, starts=_starts(lanes))


def _without_lines(ranks: dict[int, list], nodes: Sequence[int], attempt: int) -> list[str]:
    """Return a note if nodes of other attempts have no line of this one."""
    missing = sorted({line.node or 0 for lines in ranks.values() for line in lines} - set(nodes))
    if not missing:
        return []
    named = ", ".join(map(str, missing))
    return [f"node {named} has no line of attempt {attempt}: it ended before its first phase, or was not part of it"]


def _timed(line: PhaseLine, offset: float) -> Timed:
    total = line.seconds if line.total is None else line.total
    step = 0 if line.phase == "set-up" else line.step + 1  # the line has the steps done before the phase
    return Timed(line.phase, line.start - offset, total, line.seconds, step, line.evaluation)


def _state(line: StateLine, offset: float) -> State:
    return State(line.phase, line.start - offset, line.rows, line.update, line.process, line.cause)


def _offsets(ranks: dict[int, list]) -> tuple[dict[int, float], list[str]]:
    """Return the seconds by which the clock of each node is ahead of node 0's, and a note if one is not known.

    Lines before the first meeting of the ranks do not have it yet, so the last one of a node counts.
    """
    found: dict[int, float | None] = {}
    for lines in ranks.values():
        node = lines[0].node or 0
        measured = [line.clock_offset for line in lines if line.clock_offset is not None]
        found[node] = measured[-1] if measured else found.get(node)
    unknown = sorted(node for node, offset in found.items() if offset is None and node)
    notes = []
    if unknown:
        named = ", ".join(map(str, unknown))
        notes.append(f"the clock of node {named} was not measured (no weight sync): its lanes may be shifted")
    return {node: offset or 0.0 for node, offset in found.items()}, notes


def _starts(lanes: Iterable[Lane]) -> dict[int, float]:
    """Return the begin of each step on the first rank.

    The line of `train`, which is around the other phases, is written at its end. So it is missing in the step in which
    a process was killed, or that goes on: that step begins with its first finished phase.
    """
    spans = [span for lane in lanes if lane.kind == "rank" for span in lane.spans if span.step and not span.evaluation]
    train, others = dict[int, float](), dict[int, float]()
    for span in spans:
        if span.phase in STEP_PHASES:
            found = train if span.phase == "train" else others
            found[span.step] = min(found.get(span.step, span.start), span.start)
    return dict(sorted((others | train).items()))


# ---- what the run said of itself


def _json_lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for each in (path.with_name(f"{path.name}.1"), path):
        if each.exists():
            for line in each.read_text(errors="replace").splitlines():
                try:
                    found.append(json.loads(line, parse_constant=str))  # the page refuses NaN and infinity
                except ValueError:
                    continue
    return [line for line in found if isinstance(line, dict)]


def _settings(folders: Sequence[Path], attempt: int) -> dict[str, Any]:
    lines = [line for folder in folders for line in _json_lines(folder / "_multinode" / "settings.jsonl")]
    return next((line for line in reversed(lines) if line.get("attempt") == attempt), {})


def _logs(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the logs: those of the run's own file, or else of the newest `trainer_state.json`."""
    lines = [line for folder in folders for line in _json_lines(folder / "_multinode" / "log.jsonl")]
    if lines:
        return lines
    states = [path for folder in folders for path in folder.glob("**/trainer_state.json")]
    for path in sorted(states, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            return json.loads(path.read_text())["log_history"]
        except (OSError, ValueError, LookupError):
            continue
    return []


def _endings(folders: Sequence[Path]) -> dict[int, dict[str, Any]]:
    found = {}
    for folder in folders:
        for path in sorted((folder / "_multinode").glob("ending-node*.json")):
            if name := ENDING.fullmatch(path.name):
                try:
                    found[int(name[1])] = json.loads(path.read_text(), parse_constant=str)
                except (OSError, ValueError):
                    continue
    return dict(sorted(found.items()))
