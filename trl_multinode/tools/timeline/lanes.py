"""Lanes of a timeline: one per rank and per engine, whose spans nest and whose pieces never overlap."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

# In the order of the legends. The colors can be told apart with every kind of color blindness (after Okabe and Ito).
COLORS = {
    "train": "#0072b2", "generate": "#e69f00", "sync": "#cc79a7", "reward": "#009e73", "wait": "#c9ccd1",
    "checkpoint": "#56b4e9", "push": "#8c6d46", "rehearse": "#7b68ae", "restart": "#d55e00", "start": "#f0b48a",
    "set-up": "#8f949c", "other": "#5c6066",
}  # fmt: skip
STEP_PHASES = ("sync", "generate", "reward", "train", "wait")  # those of a step, as in the log
ROUNDING_S = 1.1e-4  # files of earlier versions have four decimals


@dataclass(frozen=True)
class Span:
    """One phase of a rank or state of an engine. Times are seconds by the clock of node 0."""

    phase: str
    start: float
    end: float
    depth: int = 0  # number of phases around this one
    step: int = 0  # number of the optimizer step as in the log, from 1; 0 outside of steps and for engines
    evaluation: bool = False
    note: str = ""


@dataclass(frozen=True)
class Mark:
    """A moment in the lane of an engine: `swap` (weights replaced while rows run), `restart` or `lost`."""

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
    rows: list[tuple[float, int]] = field(default_factory=list)  # completions that run from that time on

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

    def within(self, start: float, end: float, steps: range | None = None) -> "Lane":
        """Return the part of a lane between two times. Spans of a rank are kept whole, if they are of `steps`."""
        if steps is not None and self.kind == "rank":
            spans = [span for span in self.spans if span.step in steps]
            kept = [replace(span, depth=depth) for span, depth in zip(spans, depths(spans), strict=True)]
        else:
            inside = [span for span in self.spans if span.end > start and span.start < end]
            kept = [replace(span, start=max(start, span.start), end=min(end, span.end)) for span in inside]
        marks = [mark for mark in self.marks if start <= mark.at <= end]
        before = [rows for at, rows in self.rows if at <= start][-1:]
        rows = [(start, number) for number in before] + [each for each in self.rows if start < each[0] < end]
        return replace(self, spans=kept, marks=marks, rows=rows)


@dataclass(frozen=True)
class Timed:
    """A phase as its line in a file has it: the lines of inner phases come before those around them."""

    phase: str
    start: float
    total: float  # seconds from begin to end
    own: float  # seconds without the phases inside it
    step: int = 0
    evaluation: bool = False


class _Tree:
    def __init__(self, timed: Timed, inner: "list[_Tree]"):
        self.timed = timed
        self.inner = inner
        self.total: float = timed.own + sum(each.total for each in inner)  # not that of the line, which is rounded


def nested(lines: Iterable[Timed]) -> list[Span]:
    """Return the spans of a rank's lines, given in the order of the file.

    The clock of a node may be set while a run goes on, so the order and the durations of the lines decide what is
    inside what; starts only decide where inside the outer phase. The spans never overlap, and the time of each one
    without those inside it is the `own` of its line.
    """
    open_: list[_Tree] = []  # those that no phase around them has taken yet
    for line in lines:
        rest, inner = line.total - line.own, list[_Tree]()
        while open_ and (timed := open_[-1].timed).total <= rest + ROUNDING_S * (1 + len(inner)):
            if rest <= ROUNDING_S and timed.start < line.start:  # too short to be told from a phase before this one
                break
            rest -= timed.total
            inner.insert(0, open_.pop())
        open_.append(_Tree(line, inner))
    found: list[Span] = []
    end = float("-inf")
    for tree in open_:
        end = _place(tree, max(tree.timed.start, end), 0, found)
    return found


def _place(tree: _Tree, start: float, depth: int, found: list[Span]) -> float:
    """Append the spans of a tree that begins at `start`, and return its end."""
    timed = tree.timed
    inside, end = tree.total - timed.own, start + tree.total
    found.append(Span(timed.phase, start, end, depth, timed.step, timed.evaluation))
    for each in tree.inner:
        latest = end - inside  # later ones still need this much
        start = _place(each, min(max(start, each.timed.start), latest), depth + 1, found)
        inside -= each.total
    return end


def depths(spans: Sequence[Span]) -> list[int]:
    """Return the depth of each span among the given ones."""
    found, open_ = list[int](), list[Span]()
    for span in spans:
        while open_ and open_[-1].depth >= span.depth:
            open_.pop()
        found.append(len(open_))
        open_.append(span)
    return found


def _pieces(spans: Sequence[Span]) -> Iterator[Span]:
    open_: list[Span] = []
    at = float("-inf")  # up to here, everything has been returned
    for span in spans:
        while open_ and open_[-1].depth >= span.depth:
            last = open_.pop()
            if last.end > at:
                yield replace(last, start=at)
                at = last.end
        if open_ and span.start > at:
            yield replace(open_[-1], start=at, end=span.start)
        open_.append(span)
        at = max(at, span.start)
    while open_:
        last = open_.pop()
        if last.end > at:
            yield replace(last, start=at)
            at = last.end


@dataclass(frozen=True)
class State:
    """A line of an engine's file: a state that begins, or the loss of its process."""

    phase: str
    at: float
    rows: int = 0
    update: int = 0
    process: int = 0
    cause: str = ""


def engine_lane(node: int, number: int, states: Iterable[State], end: float) -> Lane:
    """Return the lane of an engine. A state ends where the next one begins, and the last one at `end`."""
    lane, ordered = Lane(node, "engine", number), list(states)
    at = float("-inf")
    for state, following in zip(ordered, [*ordered[1:], None], strict=True):
        at = max(at, state.at)  # the clock may have been set back
        until = max(at, end if following is None else following.at)
        lane.rows.append((at, state.rows))
        if mark := _mark(state, at):
            lane.marks.append(mark)
        if state.phase not in ("idle", "end", "lost"):
            _extend(lane.spans, Span(state.phase, at, until, note=_note(state)))
    return lane


def _extend(spans: list[Span], span: Span) -> None:
    """Append a state, or let the one before go on if only its number of rows has changed."""
    last = spans[-1] if spans else None
    if last is not None and (last.phase, last.end) == (span.phase, span.start) and span.phase == "generate":
        spans[-1] = replace(last, end=span.end)
    elif span.end > span.start:
        spans.append(span)


def _note(state: State) -> str:
    if state.phase == "sync":
        return f"weights {state.update}" + (f", {state.rows} rows frozen" if state.rows else "")
    return f"weights {state.update}" if state.phase == "generate" else ""


def _mark(state: State, at: float) -> Mark | None:
    if state.phase == "sync" and state.rows:
        return Mark("swap", at, f"weights {state.update} replace those of {state.rows} rows in flight")
    if state.phase == "lost":
        return Mark("lost", at, state.cause)
    if state.phase == "start" and state.process:
        return Mark("restart", at, f"restart {state.process}")
    return None
