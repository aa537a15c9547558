"""Lanes of a timeline: one per rank and per engine, whose spans nest and whose pieces never overlap."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
from msgspec.structs import replace as with_values

# In the order of the legends. The colors can be told apart with every kind of color blindness (after Okabe and Ito).
COLORS = {
    "train": "#0072b2", "generate": "#e69f00", "sync": "#cc79a7", "reward": "#009e73", "wait": "#c9ccd1",
    "checkpoint": "#56b4e9", "push": "#8c6d46", "rehearse": "#7b68ae", "restart": "#d55e00", "start": "#f0b48a",
    "set-up": "#8f949c", "other": "#5c6066",
}  # fmt: skip
STEP_PHASES = ("sync", "generate", "reward", "train", "wait")  # those of a step, as in the log
ROUNDING_S = 1.1e-4  # files of earlier versions have four decimals


class Span(msgspec.Struct, frozen=True, gc=False):
    """One phase of a rank or state of an engine. Times are seconds by the clock of node 0."""

    phase: str
    start: float
    end: float
    depth: int = 0  # number of phases around this one
    # number of the optimizer step as in the log, from 1; 0 outside of steps and for engines
    step: int = 0
    evaluation: bool = False
    note: str = ""


@dataclass(frozen=True)
class Mark:
    """A moment in a lane.

    In that of an engine it is a `swap` (weights replaced while rows run), `restart` or `lost`, in that of a rank the
    `agent` of other engines that joins or leaves.
    """

    kind: str
    at: float
    text: str


@dataclass
class Lane:
    """Spans of one rank or engine, in the order of their starts; a span follows those around it."""

    node: int
    kind: str  # "rank" or "engine"
    number: int
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    # completions that run from that time on
    rows: list[tuple[float, int]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.kind} {self.number}"

    def pieces(self) -> list[Span]:
        """Return the time of each span without the spans inside it, as pieces that do not overlap."""
        return list(_pieces(self.spans))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase, without the phases inside it."""
        found: dict[str, float] = {}
        for piece in self.pieces():
            found[piece.phase] = found.get(piece.phase, 0.0) + piece.end - piece.start
        return found

    def of_steps(self, steps: range) -> "Lane":
        """Return the whole spans of some steps, and the marks between their begin and end."""
        spans = [span for span in self.spans if span.step in steps]
        begin, end = spans[0].start if spans else 0.0, max((span.end for span in spans), default=0)
        marks = [mark for mark in self.marks if begin <= mark.at <= end]
        return replace(self, spans=spans, marks=marks)

    def within(self, start: float, end: float) -> "Lane":
        """Return the part of a lane between two times."""
        inside = [span for span in self.spans if span.end > start and span.start < end]
        spans = [
            with_values(span, start=max(start, span.start), end=min(end, span.end))
            for span in inside
        ]
        marks = [mark for mark in self.marks if start <= mark.at <= end]
        before = [(start, rows) for at, rows in self.rows if at <= start]
        rows = before[-1:] + [(at, rows) for at, rows in self.rows if start < at < end]
        return replace(self, spans=spans, marks=marks, rows=rows)


class PhaseLine(msgspec.Struct, gc=False):
    """A line of `rank<r>.jsonl`: the lines of inner phases come before those around them."""

    phase: str
    start: float
    seconds: float  # without the phases inside it
    total: float
    step: int  # number of steps done before the phase
    node: int
    attempt: int = 1
    evaluation: bool = False


class MarkLine(msgspec.Struct, gc=False):
    """A line of `rank<r>.jsonl` about an event of the run that is no phase."""

    mark: str
    start: float
    node: int
    attempt: int = 1


class State(msgspec.Struct, gc=False):
    """A line of `node<k>_engine<i>.jsonl`: a state that begins, or the loss of its process."""

    phase: str
    start: float
    rows: int = 0
    update: int = 0
    process: int = 0
    cause: str = ""
    node: int = 0
    attempt: int = 1


class _Tree(msgspec.Struct, gc=False):
    line: PhaseLine
    inner: "list[_Tree]"
    total: float  # not that of the line, which is rounded


def nested(lines: Iterable[PhaseLine]) -> list[Span]:
    """Return the spans of a rank's lines, given in the order of the file.

    The clock of a node may be set while a run goes on, so the order and the durations of the lines decide what is
    inside what; starts only decide where inside the outer phase. The spans never overlap, and the time of each one
    without those inside it is the `seconds` of its line.
    """
    open_: list[_Tree] = []  # those that no phase around them has taken yet
    for line in lines:
        rest, inner = line.total - line.seconds, list[_Tree]()
        while open_ and (last := open_[-1].line).total <= rest + ROUNDING_S * (1 + len(inner)):
            # too short to be told from a phase before this one
            if rest <= ROUNDING_S and last.start < line.start:
                break
            rest -= last.total
            inner.insert(0, open_.pop())
        open_.append(_Tree(line, inner, line.seconds + sum(each.total for each in inner)))
    found: list[Span] = []
    end = float("-inf")
    for tree in open_:
        end = _place(tree, max(tree.line.start, end), 0, found)
    return found


def _place(tree: _Tree, start: float, depth: int, found: list[Span]) -> float:
    """Append the spans of a tree that begins at `start`, and return its end."""
    line = tree.line
    inside, end = tree.total - line.seconds, start + tree.total
    step = 0 if line.phase == "set-up" else line.step + 1
    found.append(Span(line.phase, start, end, depth, step, line.evaluation))
    for each in tree.inner:
        latest = end - inside  # later ones still need this much
        start = _place(each, min(max(start, each.line.start), latest), depth + 1, found)
        inside -= each.total
    return end


def _pieces(spans: Sequence[Span]) -> Iterator[Span]:
    open_: list[Span] = []
    at = float("-inf")  # up to here, everything has been returned
    for span in [*spans, Span("", float("inf"), float("inf"))]:  # the last one closes all
        while open_ and open_[-1].depth >= span.depth:
            last = open_.pop()
            if last.end > at:
                yield with_values(last, start=at)
                at = last.end
        if open_ and span.start > at:
            yield with_values(open_[-1], start=at, end=span.start)
        open_.append(span)
        at = max(at, span.start)


def engine_lane(node: int, number: int, states: Sequence[State], end: float) -> Lane:
    """Return the lane of an engine. A state ends where the next one begins, and the last one at `end` or later."""
    lane = Lane(node, "engine", number)
    at = float("-inf")
    ends = [*(state.start for state in states[1:]), end]
    for state, until in zip(states, ends, strict=True):
        at = max(at, state.start)  # the clock may have been set back
        lane.rows.append((at, state.rows))
        note = f"weights {state.update}" if state.phase in ("generate", "sync") else ""
        if state.phase == "sync" and state.rows:
            text = f"{note} replace those of {state.rows} rows in flight"
            lane.marks.append(Mark("swap", at, text))
            note += f", {state.rows} rows frozen"
        elif state.phase == "lost":
            lane.marks.append(Mark("lost", at, state.cause))
        elif state.phase == "start" and state.process:
            lane.marks.append(Mark("restart", at, f"restart {state.process}"))
        if state.phase not in ("idle", "end", "lost"):
            _extend(lane.spans, Span(state.phase, at, max(at, until), note=note))
    return lane


def _extend(spans: list[Span], span: Span) -> None:
    """Append a state, or let the one before go on if only its number of rows has changed."""
    last = spans[-1] if spans else None
    if (
        last is not None
        and (last.phase, last.end) == (span.phase, span.start)
        and span.phase == "generate"
    ):
        spans[-1] = with_values(last, end=span.end)
    elif span.end > span.start:
        spans.append(span)
