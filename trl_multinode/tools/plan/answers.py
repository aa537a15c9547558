"""Sentences that answer: does it fit, which split, which tensor parallelism, and when is colocation better?"""

from collections.abc import Iterator

from .engine_memory import engine_memory
from .layouts import OPEN_ROUNDS, Layout, Task, fastest, split_layouts
from .training import FREE_SHARE, training_memory

LARGE = 20e9  # parameters from which the answers look at three GPUs of tensor parallelism per data-parallel one
LONG_TAIL = 0.05  # of a step; as in the advice of a run
CLOSE = 1.05  # seconds that are as good as the fastest
FEW_ROWS = 0.1  # share of the rows of a round below which the cache is named as the bound
WAYS = {
    "after": "with `max_staleness=0`",
    "beside": "with `max_staleness=1`",
    "in_flight": f"with `max_staleness={OPEN_ROUNDS}`",
}


def answers(task: Task, splits: list[Layout], colocated: list[Layout]) -> Iterator[str]:
    """Yield one sentence or two per question."""
    yield _fit(task, splits)
    if any(each.fits for each in splits):
        yield from _split(task, [each for each in splits if each.fits])
    if task.model.parameters > LARGE:
        yield from _three_to_one(task, splits)
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
        enough = ", ".join(f"{name} from {n} nodes" for name, n in needed.items() if n)
        reasons.append(f"training does not fit ({enough or 'no number of nodes helps'})")
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
    best = {way: layout for way in WAYS if (layout := fastest(fitting, way)) is not None}
    parts = [f"{_name(layout)} {WAYS[way]}, {_of(layout, way):.1f} s" for way, layout in best.items()]
    yield f"Split: the fastest are {'; '.join(parts)}."
    way, chosen = choice(fitting)
    yield _staleness(chosen, way, best)
    if chosen.full_rows < FEW_ROWS * task.rows.number:
        yield (
            f"Cache: {_name(chosen)} holds {chosen.full_rows} of {task.rows.number} rows of the longest length at "
            "once; the others wait. Reserve more GPUs, or take GPUs with more memory."
        )
    others = [each for each in fitting if each.name == chosen.name and each is not chosen and each.seconds]
    if others and task.run is None:
        times = ", ".join(f"TP {each.engine.tensor_parallel} {_of(each, way):.1f} s" for each in others)
        yield f"Tensor parallelism: {_name(chosen)} takes {_of(chosen, way):.1f} s; {times}."


def choice(fitting: list[Layout]) -> tuple[str, Layout]:
    """Return the least stale one of the ways that are about as fast as the fastest, and its best layout."""
    best = [(way, layout) for way in WAYS if (layout := fastest(fitting, way)) is not None]
    limit = CLOSE * min(_of(layout, way) for way, layout in best)
    return next((way, layout) for way, layout in best if _of(layout, way) <= limit)


def _name(layout: Layout) -> str:
    return f"{layout.name} (TP {layout.engine.tensor_parallel})"


def _staleness(chosen: Layout, way: str, best: dict[str, Layout]) -> str:
    """Recommend the least stale way that is fast, and say why."""
    seconds = chosen.seconds
    assert seconds is not None  # only timed layouts are the fastest
    line = f"Staleness: take {chosen.name} {WAYS[way]}."
    if way == "after":
        return f"{line} To overlap generation and training gains less than 5 %."
    gain = _of(best["after"], "after") / _of(chosen, way)
    line += f" Its step is {gain:.1f} times as fast as the best one with `max_staleness=0`"
    if way == "beside":
        return f"{line}; rows in flight would gain less than 5 % more."
    if seconds.tail <= LONG_TAIL * seconds.after:
        return f"{line}, because more rows run at once."
    return (
        f"{line}: in {seconds.tail:.1f} of {seconds.generate:.1f} s of generation fewer than 10 % of the rows run, "
        "and only rows of later rounds fill this time."
    )


def _three_to_one(task: Task, splits: list[Layout]) -> Iterator[str]:
    """Judge the rule of three tensor-parallel GPUs for each data-parallel one, in its readings."""
    gpus = task.cluster.gpus
    engine = "divides" if task.model.splits_into(3) else "does not divide"
    line = f"3:1 TP/DP: an engine of TP 3 {engine} the {task.model.heads} attention heads"
    if gpus % 4:
        yield f"{line}; {gpus} GPUs have no 3:1 split."
        return
    training = gpus // 4
    ratio = split_layouts(task, training, gpus - training)
    name, inverse = f"{training}+{gpus - training}", f"{gpus - training}+{training}"
    fitting, own = [each for each in ratio if each.fits], [each for each in splits if each.fits]
    if not fitting:
        needed = f"training needs {ratio[0].nodes_needed or 'more than any number of'} nodes"
        side = "no engine fits" if ratio[0].micro_rows else needed
        line, verdict = f"{line}; with the split {name} {side}", "Refuted"
    else:
        found = [(way, a, b) for way in WAYS if (a := fastest(fitting, way)) and (b := fastest(own, way))]
        times = [f"{_of(a, way):.1f} s {WAYS[way]} ({b.name}: {_of(b, way):.1f} s)" for way, a, b in found]
        right = bool(found) and all(_of(a, way) <= _of(b, way) for way, a, b in found)
        verdict = "Accepted" if right else "Refuted" if found else "Undecided"
        line = f"{line}; the split {name} takes {', '.join(times) or 'unknown seconds'}"
    line = f"{line}. {verdict} for this model and cluster."
    if own and task.timed:
        fast = choice(own)[1].name
        judged = "is the one to take" if fast == inverse else f"is not the one to take either, but {fast}"
        line += f" The other way round, three training GPUs for each one of an engine, {inverse} {judged}."
    yield line


def _of(layout: Layout | None, way: str) -> float:
    assert layout is not None and layout.seconds is not None  # only timed layouts are the fastest
    return float(getattr(layout.seconds, way))


def _colocation(task: Task, splits: list[Layout], colocated: list[Layout]) -> str:
    fitting = [each for each in colocated if each.fits]
    if not fitting:
        trains = any(each.micro_rows for each in colocated)
        side = "weights and cache do not fit beside the states of training" if trains else "training does not fit"
        return f"Colocation: it does not fit, not even with engines that sleep while the ranks train: {side}."
    sleep = "" if awake_rows(task, fitting) else " if the engines sleep while the ranks train"
    best = fastest(fitting, "after")
    apart = {way: fastest([each for each in splits if each.fits], way) for way in WAYS}
    if best is None or apart["after"] is None:
        return f"Colocation: it fits{sleep}."
    own = _of(best, "after")
    line = f"Colocation: it fits{sleep}, and takes {own:.1f} s (TP {best.engine.tensor_parallel}). "
    slower = [WAYS[way] for way, layout in apart.items() if own < 0.95 * _of(layout, way)]
    if len(slower) == len(WAYS):
        return f"{line}It makes the best use of these GPUs: every split is slower."
    if slower:
        return (
            f"{line}It makes better use of these GPUs than any split {' or '.join(slower)}, but not than the others."
        )
    return f"{line}It is no better use of these GPUs: with every setting a split is as fast."


def awake_rows(task: Task, colocated: list[Layout]) -> int:
    """Return the longest rows at once in the caches of engines that do not sleep, with micro-batches of one row."""
    gpus, total = task.cluster.gpus, task.cluster.gpu.total
    rows = task.micro_rows or 1
    memory = training_memory(task.model, task.cluster.nodes, gpus, rows, task.row_tokens, task.offload)
    taken = memory.total + FREE_SHARE * total
    degrees = [each.engine.tensor_parallel for each in colocated]
    engines = [engine_memory(task.model, total, gpus, degree, task.rows.number, taken) for degree in degrees]
    return max(engine.rows(task.row_tokens) for engine in engines)
