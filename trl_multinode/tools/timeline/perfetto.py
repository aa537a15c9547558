"""A run as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing show."""

from collections.abc import Iterator
from typing import Any

from .lanes import Lane
from .reading import Run

ENGINES = 100_000  # thread ids of engines; those of ranks are their numbers
STEPS = 1_000_000  # process id of the lane of the steps
MICRO = 1e6


def trace(run: Run) -> dict[str, Any]:
    """Return the trace: a process per node, a thread per rank and engine, a counter of each engine's rows."""
    begin = run.begin
    events = list(_steps(run, begin))
    for lane in run.lanes:
        events += _lane(lane, begin)
    other = {"attempt": run.attempt, "start": begin, "notes": run.notes}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other | {"settings": run.settings}}


def _steps(run: Run, begin: float) -> Iterator[dict[str, Any]]:
    yield _name("process_name", STEPS, 0, "optimizer steps")
    yield {"ph": "M", "name": "process_sort_index", "pid": STEPS, "args": {"sort_index": -1}}
    starts = list(run.starts.items())
    for (step, start), (_, end) in zip(starts, [*starts[1:], (0, run.end)], strict=True):
        yield _complete(f"step {step}", STEPS, 0, start - begin, end - start, {})


def _lane(lane: Lane, begin: float) -> Iterator[dict[str, Any]]:
    pid, tid = lane.node, lane.number + ENGINES * (lane.kind == "engine")
    yield _name("process_name", pid, tid, f"node {lane.node}")
    yield _name("thread_name", pid, tid, lane.name)
    yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
    for span in lane.spans:
        args: dict[str, Any] = {"step": span.step} if lane.kind == "rank" else {"weights": span.note}
        if span.evaluation:
            args["evaluation"] = True
        yield _complete(span.phase, pid, tid, span.start - begin, span.end - span.start, args)
    for mark in lane.marks:
        yield {
            "ph": "i", "s": "t", "name": mark.kind, "pid": pid, "tid": tid, "ts": _micro(mark.at - begin),
            "args": {"what": mark.text},
        }  # fmt: skip
    for at, rows in lane.rows:
        yield {
            "ph": "C", "name": f"rows of {lane.name}", "pid": pid, "tid": tid, "ts": _micro(at - begin),
            "args": {"rows": rows},
        }  # fmt: skip


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(name: str, pid: int, tid: int, start: float, seconds: float, args: dict) -> dict[str, Any]:
    """Return a span. Both ends are rounded, so that spans that touch do not overlap."""
    at = _micro(start)
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": at, "dur": _micro(start + seconds) - at,
            "args": args}  # fmt: skip


def _micro(seconds: float) -> int:
    return round(seconds * MICRO)
