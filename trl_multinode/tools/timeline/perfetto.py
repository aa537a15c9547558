"""A run as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing show."""

import json
from collections.abc import Iterator
from typing import Any

from .lanes import Lane
from .reading import Run

ENGINES = 100_000  # thread ids of engines; those of ranks are their numbers
STEPS = 1_000_000  # process id of the lane of the steps
MICRO = 1e6

Event = dict[str, Any]


def trace(run: Run) -> Iterator[str]:
    """Yield the parts of the trace's text, because the events of a long run are larger than its lanes."""
    begin = run.begin
    before = '{"traceEvents": ['
    for event in _events(run, begin):
        yield before + json.dumps(event)
        before = ", "
    other = {"attempt": run.attempt, "start": begin, "notes": run.notes, "settings": run.settings}
    yield "], " + json.dumps({"displayTimeUnit": "ms", "otherData": other}).removeprefix("{")


def _events(run: Run, begin: float) -> Iterator[Event]:
    """Yield a process per node, a thread per rank and engine, a counter of each engine's rows."""
    yield _event("M", "process_name", STEPS, 0, name="optimizer steps")
    yield _event("M", "process_sort_index", STEPS, 0, sort_index=-1)
    ends = [*list(run.starts.values())[1:], run.end]
    for (step, start), end in zip(run.starts.items(), ends, strict=True):
        yield _event("X", f"step {step}", STEPS, 0) | _times(start - begin, end - begin)
    for lane in run.lanes:
        yield from _lane(lane, begin)


def _lane(lane: Lane, begin: float) -> Iterator[Event]:
    is_rank = lane.kind == "rank"
    place = lane.node, lane.number if is_rank else lane.number + ENGINES
    yield _event("M", "process_name", *place, name=f"node {lane.node}")
    yield _event("M", "thread_name", *place, name=lane.name)
    yield _event("M", "thread_sort_index", *place, sort_index=place[1])
    for span in lane.spans:
        args: Event = {"step": span.step} if is_rank else {"weights": span.note}
        if span.evaluation:
            args["evaluation"] = True
        yield _event("X", span.phase, *place, **args) | _times(span.start - begin, span.end - begin)
    for mark in lane.marks:
        yield _event("i", mark.kind, *place, what=mark.text) | {
            "s": "t",
            "ts": _micro(mark.at - begin),
        }
    for at, rows in lane.rows:
        yield _event("C", f"rows of {lane.name}", *place, rows=rows) | {"ts": _micro(at - begin)}


def _event(kind: str, title: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": kind, "name": title, "pid": pid, "tid": tid, "args": args}


def _times(start: float, end: float) -> Event:
    """Return begin and duration. Both ends are rounded, so that spans that touch do not overlap."""
    return {"ts": _micro(start), "dur": _micro(end) - _micro(start)}


def _micro(seconds: float) -> int:
    return round(seconds * MICRO)
