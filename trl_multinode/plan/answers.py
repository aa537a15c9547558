"""Sentences that answer: does it fit, which split, which tensor parallelism, and when is colocation better?"""

from collections.abc import Iterator

from .engine_memory import engine_memory
from .layouts import OPEN_ROUNDS, Layout, Task, fastest
from .training import FREE_SHARE, training_memory

LONG_TAIL = 0.05  # of a step; as in the advice of a run
WAYS = {
    "after": "with `max_staleness=0`",
    "beside": "with `max_staleness=1`",
    "in_flight": f'with `weight_update="in_flight"` and `open_rounds={OPEN_ROUNDS}`',
}


def answers(task: Task, splits: list[Layout], colocated: list[Layout]) -> Iterator[str]:
    """Yield one sentence or two per question."""
    yield _fit(task, splits)
    if any(each.fits for each in splits):
        yield from _split(task, [each for each in splits if each.fits])
    yield _colocation(task, splits, colocated)


def _fit(task: Task, splits: list[Layout]) -> str:
    fits = list(dict.fromkeys(each.name for each in splits if each.fits))
    trains = list(dict.fromkeys(each.name for each in splits if each.micro_rows))
    serves = list(dict.fromkeys(each.name for each in splits if each.full_rows))
    where = f"{task.cluster.nodes} x {task.cluster.gpus} {task.cluster.gpu.name}"
    if fits:
        return f"Fit: {task.model.name} fits on {where} with {', '.join(fits)}."
    reasons = []
    if not trains:
        needed = {each.name: each.nodes_needed for each in splits}
        from_nodes = ", ".join(f"{name} from {n} nodes" for name, n in needed.items() if n) or "no number of nodes helps"
        reasons.append(f"training does not fit ({from_nodes})")
    if not serves:
        weights = min(splits, key=lambda each: each.engine.weights).engine
        reasons.append(
            f"no engine fits (with tensor parallelism {weights.tensor_parallel} the weights alone take "
            f"{weights.weights / 2**30:.1f} of {task.cluster.gpu.total / 2**30:.1f} GiB)"
        )
    both = "; ".join(reasons) or f"training fits with {', '.join(trains)}, engines with {', '.join(serves)}"
    return f"Fit: {task.model.name} does not fit on {where}: {both}."


def _split(task: Task, fitting: list[Layout]) -> Iterator[str]:
    if not task.timed:
        yield "Split: no seconds, because the rates of this GPU are unknown; measure a few steps and pass --run."
        return
    found = [(way, best) for way in WAYS if (best := fastest(fitting, way)) is not None]
    parts = [f"{best.name} (TP {best.engine.tensor_parallel}) {WAYS[way]}, {_of(best, way):.1f} s" for way, best in found]
    way, best = min(found, key=lambda pair: _of(pair[1], pair[0]))
    yield f"Split: the fastest are {'; '.join(parts)}."
    seconds = best.seconds
    assert seconds is not None  # only timed layouts are the fastest
    if seconds.tail > LONG_TAIL * seconds.after:
        yield (
            f"Staleness: in {seconds.tail:.1f} of {seconds.generate:.1f} s of generation fewer than 10 % of the rows "
            "run, and no split shortens this; rows of later rounds fill it in flight."
        )
    elif (beside := fastest(fitting, "beside")) and _of(beside, "beside") < 0.95 * _of(fastest(fitting, "after"), "after"):
        yield "Staleness: there is no long tail, so `max_staleness=1` is enough to hide generation behind training."
    else:
        yield "Staleness: overlapping gains less than 5 %, so stay with `max_staleness=0`."
    smaller = [each for each in fitting if each.name == best.name and each is not best and each.seconds]
    if smaller:
        others = ", ".join(f"TP {each.engine.tensor_parallel} {_of(each, way):.1f} s" for each in smaller)
        yield f"Tensor parallelism: TP {best.engine.tensor_parallel} on {best.name} {_of(best, way):.1f} s; {others}."


def _of(layout: Layout | None, way: str) -> float:
    assert layout is not None and layout.seconds is not None  # only timed layouts are the fastest
    return float(getattr(layout.seconds, way))


def _colocation(task: Task, splits: list[Layout], colocated: list[Layout]) -> str:
    fitting = [each for each in colocated if each.fits]
    if not fitting:
        trains = any(each.micro_rows for each in colocated)
        side = "weights and cache do not fit beside the states of training" if trains else "training does not fit"
        return f"Colocation: it does not fit, not even with engines that sleep while the ranks train: {side}."
    sleep = "" if awake_rows(task, fitting) else ", and only if the engines sleep while the ranks train"
    best = fastest(fitting, "after")
    apart = {way: fastest([each for each in splits if each.fits], way) for way in WAYS}
    if best is None or apart["after"] is None:
        return f"Colocation: it fits{sleep}."
    own = _of(best, "after")
    line = f"Colocation: it fits (TP {best.engine.tensor_parallel}){sleep}, and takes {own:.1f} s. "
    slower = [WAYS[way] for way, layout in apart.items() if own < 0.95 * _of(layout, way)]
    if len(slower) == len(WAYS):
        return f"{line}It is the better use of these GPUs: every split is slower."
    if slower:
        return f"{line}It is the better use of these GPUs than any split {' or '.join(slower)}, not than the others."
    return f"{line}It is not the better use of these GPUs: the best splits are as fast or faster."


def awake_rows(task: Task, colocated: list[Layout]) -> int:
    """Return the longest rows at once in the caches of engines that do not sleep, with micro-batches of one row."""
    gpus, total = task.cluster.gpus, task.cluster.gpu.total
    rows = task.micro_rows or 1
    memory = training_memory(task.model, task.cluster.nodes, gpus, rows, task.row_tokens, task.offload)
    taken = memory.total + FREE_SHARE * total
    degrees = [each.engine.tensor_parallel for each in colocated]
    engines = [engine_memory(task.model, total, gpus, degree, task.rows.number, taken) for degree in degrees]
    return max(engine.rows(task.row_tokens) for engine in engines)
