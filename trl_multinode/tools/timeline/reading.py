"""The files of a run, from its `output_dir` or from those of its nodes: phases, states, settings, logs and endings."""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from .completions import read_completions
from .lanes import STEP_PHASES, Lane, Mark, MarkLine, PhaseLine, State, engine_lane, nested

RANK = re.compile(r"rank(\d+)\.jsonl")
ENGINE = re.compile(r"node(\d+)_engine(\d+)\.jsonl")
# Of lines in which the page refuses NaN and infinity
PLAIN = partial(json.loads, parse_constant=str)
# Bytes at the end of each file that are read first if some steps are asked for: 700 lines of a rank, or 6000
TAILS = (128 * 2**10, 2**20)


class TimelineError(Exception):
    """Something that the command cannot show; the message has what was given, what was expected, and the cure."""


@dataclass
class Run:
    """One attempt of a run: the lanes in the order of nodes, ranks before engines."""

    lanes: list[Lane]
    attempt: int
    attempts: list[int]
    folders: Sequence[Path] = ()
    notes: list[str] = field(default_factory=list)  # what is missing or was assumed
    settings: dict[str, Any] = field(default_factory=dict)
    # by step of the log: begin on the first rank
    starts: dict[int, float] = field(default_factory=dict)
    ends: list[Any] = field(default_factory=list)  # see `Lines`
    shifted: set[int] = field(default_factory=set)  # nodes whose clock is not known

    @cached_property
    def logs(self) -> list[dict[str, Any]]:
        """Logs of all attempts."""
        return read_logs(self.folders)

    @cached_property
    def completions(self) -> dict[str, Any]:
        """Columns and rows of the newest log with completions."""
        return read_completions(self.folders)

    @cached_property
    def endings(self) -> dict[int, dict[str, Any]]:
        """Endings by node; none of an earlier attempt, because a launch deletes the endings before it."""
        return _endings(self.folders) if self.attempt == self.attempts[-1] else {}

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

    def has(self, steps: range) -> bool:
        """Return whether the ends that were read have all of these steps, and the one before them.

        The first lines of an end may lack the phases inside them, so it must begin one step earlier still.
        """
        begin = self.starts.get(steps[0] - 2, float("-inf"))
        return not self.shifted and all(
            line is not None and (line.attempt, line.start) < (self.attempt, begin)
            for line in self.ends
        )

    def cut(self, steps: range) -> "Run":
        """Return the run between the begin of the first and the end of the last of some steps.

        The phases of ranks are kept whole, and the states of engines are cut.

        Raises:
            `TimelineError`: if no rank has one of the steps.
        """
        ranks = {lane.name: lane.of_steps(steps) for lane in self.lanes if lane.kind == "rank"}
        part = replace(self, lanes=[lane for lane in ranks.values() if lane.spans])
        if not part.lanes:
            raise TimelineError(
                f"no rank of node {_listed(set(self.nodes))} has one of the steps {steps[0]} to {steps[-1]}"
            )
        lanes = [ranks.get(lane.name) or lane.within(part.begin, part.end) for lane in self.lanes]
        starts = {step: at for step, at in self.starts.items() if step in steps}
        return replace(
            self,
            lanes=[lane for lane in lanes if lane.spans or lane.kind == "engine"],
            starts=starts,
        )


def read_run(folders: Sequence[Path], attempt: int | None = None, tail: int = sys.maxsize) -> Run:
    """Read a run.

    Args:
        folders (`Sequence[Path]`):
            `output_dir` of the run; those of its nodes if they do not share it.
        attempt (`int`, *optional*):
            Number of the attempt. Default: the last one.
        tail (`int`, *optional*):
            Bytes to read at the end of each file of phases. Default: all.

    Raises:
        `TimelineError`: if a folder has no phases, or if the run has no such attempt.
    """
    phases = read_phases(folders, RANK, (PhaseLine, MarkLine), tail)
    attempts = phases.attempts()
    if not attempts:
        raise TimelineError(f"{folders[0]} has files of phases, but no line of them can be read.")
    chosen = attempts[-1] if attempt is None else attempt
    if chosen not in attempts:
        raise TimelineError(
            f"{folders[0]} has no attempt {chosen} (got --attempt {chosen}, expected one of {attempts})."
        )
    states = read_phases(folders, ENGINE, (State,), tail)
    ranks = phases.of_attempt(chosen)
    offsets = _offsets(ranks)
    lanes = _lanes(ranks, states.of_attempt(chosen), offsets)
    run = Run(lanes, chosen, attempts, folders, starts=_starts(lanes))
    run.shifted = set(run.nodes) - offsets.keys() - {0}
    if run.shifted:
        what = "it has no step that node 0 has too: its lanes may be shifted"
        run.notes.append(f"the clock of node {_listed(run.shifted)} is not known, because {what}")
    run.ends = [*phases.ends, *states.ends]
    if missing := phases.nodes() - set(run.nodes):
        what = "it ended before its first phase, or was not part of it"
        run.notes.append(f"node {_listed(missing)} has no line of attempt {chosen}: {what}")
    if broken := phases.broken + states.broken:
        run.notes.append(
            f"{broken} line(s) could not be read: those of a killed process may end in the middle"
        )
    settings = [line for line in read_settings(folders) if line.get("attempt") == chosen]
    run.settings = settings[-1] if settings else {}
    return run


def _lanes(
    ranks: dict[Any, list[PhaseLine | MarkLine]],
    engines: dict[Any, list[State]],
    offsets: dict[int, float],
) -> list[Lane]:
    """Return the lanes by the clock of node 0, in the order of nodes, ranks before engines."""
    every: list[list[Any]] = [*ranks.values(), *engines.values()]
    for lines in every:
        for line in lines:
            line.start -= offsets.get(line.node, 0.0)
    lanes = [_rank_lane(rank, lines) for (rank,), lines in ranks.items()]
    end = max(span.end for lane in lanes for span in lane.spans)
    lanes += [engine_lane(node, number, lines, end) for (node, number), lines in engines.items()]
    return sorted(lanes, key=lambda lane: (lane.node, lane.kind != "rank", lane.number))


def _rank_lane(rank: int, lines: list[PhaseLine | MarkLine]) -> Lane:
    phases = [line for line in lines if isinstance(line, PhaseLine)]
    marks = [Mark("agent", line.start, line.mark) for line in lines if isinstance(line, MarkLine)]
    return Lane(lines[0].node, "rank", rank, nested(phases), marks)


@dataclass
class Lines:
    """Lines of the files of phases with some name, by the numbers in it."""

    files: dict[tuple[int, ...], list] = field(default_factory=dict)
    broken: int = 0  # lines that could not be read
    # of each file of which only the first line and the end were read: the first line of that end
    ends: list[Any] = field(default_factory=list)

    def attempts(self) -> list[int]:
        every = [line for lines in self.files.values() for line in lines]
        # a rank that ended in its set-up may have marks only
        return sorted({line.attempt for line in every if not isinstance(line, MarkLine)})

    def nodes(self) -> set[int]:
        return {line.node for lines in self.files.values() for line in lines}

    def of_attempt(self, attempt: int) -> dict[Any, list]:
        """Return the lines of an attempt, without files that have none."""
        found = {
            key: [line for line in lines if line.attempt == attempt]
            for key, lines in self.files.items()
        }
        return {key: lines for key, lines in found.items() if lines}


def read_phases(
    folders: Sequence[Path], name: re.Pattern, kinds: tuple[type, ...], tail: int = sys.maxsize
) -> Lines:
    """Read the files of phases with such names, or the first line and the last `tail` bytes of each.

    Raises:
        `TimelineError`: if a folder has no files of phases.
    """
    decoders: list[Callable] = [msgspec.json.Decoder(kind).decode for kind in kinds]
    paths: dict[tuple[int, ...], Path] = {}
    for path in _phase_paths(folders):
        if match := name.fullmatch(path.name):
            paths.setdefault(tuple(map(int, match.groups())), path)
    found = Lines()
    for numbers, path in sorted(paths.items()):
        texts, is_whole = _texts(path, tail)
        lines = list(_decoded(texts, *decoders))
        found.broken += lines.count(None)
        found.files[numbers] = [line for line in lines if line is not None]
        if not is_whole:
            found.ends.append(lines[1] if len(lines) > 1 else None)
    return found


def _phase_paths(folders: Sequence[Path]) -> Iterator[Path]:
    for folder in folders:
        phases = folder / "_multinode" / "phases"
        paths = sorted(phases.glob("*.jsonl"))
        if not paths:
            raise TimelineError(
                f"{folder} has no files of a run (expected {phases}/rank<r>.jsonl). Pass the `output_dir` of a run; "
                "if the nodes do not share it, pass that of each node."
            )
        yield from paths


def _texts(path: Path, tail: int = sys.maxsize) -> tuple[list[bytes], bool]:
    """Return the lines of a file, the rotated part first, and whether those are all."""
    parts = [part for part in (path.with_name(f"{path.name}.1"), path) if part.exists()]
    lines: list[bytes] = []
    is_whole = True
    for part in reversed(parts):
        start = max(0, part.stat().st_size - tail)
        with part.open("rb") as file:
            file.seek(start)
            text = file.read()
        # an end may begin in the middle of a line
        lines = text.splitlines()[start > 0 :] + lines
        tail -= len(text)
        is_whole = is_whole and start == 0
    if not is_whole:
        with parts[0].open("rb") as file:
            lines.insert(0, file.readline())
    return lines, is_whole


def _decoded(lines: Sequence[bytes], *decoders: Callable) -> Iterator[Any]:
    """Yield what the lines have, by the first decoder that can read it; `None` for a line that none can read."""
    for line in lines:
        found = None
        for decode in decoders:
            with suppress(ValueError):
                found = decode(line)
                break
        yield found


def _offsets(ranks: dict[Any, list[PhaseLine | MarkLine]]) -> dict[int, float]:
    """Return the seconds by which the clock of each node is ahead of node 0's, if they have a step in common.

    All ranks end a step at the same moment, but for the milliseconds after its last collective, which waits for each
    of them.
    """
    ends: dict[int, dict[int, float]] = defaultdict(dict)  # of each node, by step
    for line in (line for lines in ranks.values() for line in lines):
        of_node = ends[line.node]
        if isinstance(line, PhaseLine) and line.phase == "train":
            of_node[line.step] = max(line.start + line.total, of_node.get(line.step, 0.0))
    first = ends[0]
    return {
        node: median(of_node[step] - first[step] for step in common)
        for node, of_node in ends.items()
        if (common := of_node.keys() & first.keys())
    }


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
    return _records(folders, "settings.jsonl")


def read_logs(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the logs: those of the run's own file, or else of the newest `trainer_state.json`."""
    if lines := _records(folders, "log.jsonl"):
        return lines
    # One that is being written has no line that can be read
    paths = [path for folder in folders for path in folder.glob("**/trainer_state.json")]
    states = [state for path in paths for state in _whole(path)]
    newest: dict[str, Any] = max(states, key=lambda state: state.get("global_step", 0), default={})
    return newest.get("log_history", [])


def _records(folders: Sequence[Path], name: str) -> list[dict[str, Any]]:
    """Return the lines of a file of the run that can be read."""
    paths = [folder / "_multinode" / name for folder in folders]
    return [line for path in paths for line in _decoded(_texts(path)[0], PLAIN) if line]


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
