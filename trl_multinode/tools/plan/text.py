"""Text of a plan: its tables; the template has the answers and the assumptions."""

from collections.abc import Iterator, Sequence
from textwrap import fill as wrap

from ..text import fill
from . import hardware, layouts, rounds, training
from .engine_memory import engine_memory
from .hardware import GIB
from .layouts import OPEN_ROUNDS, Layout, Task, fastest, split_layouts

WIDTH = 110  # of a line
CLOSE = 1.05  # seconds that are as good as the fastest
TRAINING_HEAD = ("split", "ranks", "states", "gather", "activations", "other", "sum", "rows fit", "fits", "from nodes")
ENGINE_HEAD = ("split", "TP", "engines", "weights", "other", "cache", "tokens cached", "longest rows at once", "fits")
STEP_HEAD = ("split", "TP", "sync", "generate", "tail", "train", "staleness 0", "staleness 1", "in flight")
WAYS = {
    "after": "with `max_staleness=0`",
    "beside": "with `max_staleness=1`",
    "in_flight": f"with `max_staleness={OPEN_ROUNDS}`",
}


def text_of(task: Task, splits: list[Layout], colocated: list[Layout]) -> str:
    """Return the whole plan as text."""
    every = [*splits, *colocated]
    fitting = [each for each in splits if each.fits]
    gpus = task.cluster.gpus
    best = best_of(fitting)
    filled = fill(
        "plan.txt",
        task=task,
        splits=splits,
        every=every,
        fitting=fitting,
        best=best,
        way=choice(best),
        ratio=[] if gpus % 4 else split_layouts(task, gpus // 4, gpus - gpus // 4),
        colocated=colocated,
        colocated_fits=[each for each in colocated if each.fits],
        awake=awake_rows(task, colocated),
        ways=WAYS,
        best_of=best_of,
        training_table=table(TRAINING_HEAD, training_rows(task, every)),
        engine_table=table(ENGINE_HEAD, engine_rows(every)),
        step_table=table(STEP_HEAD, step_rows(task, every)),
        rates=vars(rounds) | vars(layouts) | vars(training) | vars(hardware),
    )
    tables, answers, assumed = str(filled).split("\n====\n")
    lines = [wrap(" ".join(each.split()), WIDTH, subsequent_indent="  ") for each in answers.split("\n- ")[1:]]
    lines += ["", "Assumed:"]
    for each in assumed.split("\n- ")[1:]:
        lines.append(wrap(" ".join(each.split()), WIDTH, initial_indent="  - ", subsequent_indent="    "))
    return "\n".join([tables, *lines])


def best_of(layouts: list[Layout]) -> dict[str, Layout]:
    """Return the fastest layout in each way that has seconds."""
    return {way: layout for way in WAYS if (layout := fastest(layouts, way)) is not None}


def choice(best: dict[str, Layout]) -> str | None:
    """Return the least stale one of the ways that are about as fast as the fastest."""
    seconds = {way: float(getattr(layout.seconds, way)) for way, layout in best.items()}
    return next((way for way, took in seconds.items() if took <= CLOSE * min(seconds.values())), None)


def awake_rows(task: Task, colocated: list[Layout]) -> int:
    """Return the longest rows at once in the caches of engines that do not sleep, with micro-batches of one row."""
    gpus = task.cluster.gpus
    memory = training.training_memory(task, task.cluster.nodes, gpus, task.micro_rows or 1)
    taken = memory.total + training.FREE_SHARE * task.cluster.gpu.total
    degrees = [each.engine.tensor_parallel for each in colocated if each.fits]
    engines = [engine_memory(task, gpus, degree, taken) for degree in degrees]
    return max((engine.rows(task.row_tokens) for engine in engines), default=0)


def training_rows(task: Task, layouts: Sequence[Layout]) -> Iterator[tuple[str, ...]]:
    """Yield the memory of training, one row per split."""
    for each in {layout.name: layout for layout in layouts}.values():
        memory = each.memory
        sizes = (memory.states, memory.gather, memory.activations, memory.other, memory.total)
        ranks = str(task.cluster.nodes * each.training)
        needed = str(each.nodes_needed or "never")
        yield each.name, ranks, *map(_gib, sizes), str(each.micro_rows), _fits(each.micro_rows), needed


def engine_rows(layouts: Sequence[Layout]) -> Iterator[tuple[str, ...]]:
    """Yield the memory of the engines, one row per split and tensor-parallel degree."""
    for each in layouts:
        engine = each.engine
        sizes = map(_gib, (engine.weights, engine.other, engine.cache))
        held = (f"{engine.tokens:,}", str(each.full_rows), _fits(each.full_rows))
        yield each.name, str(engine.tensor_parallel), str(engine.engines), *sizes, *held


def step_rows(task: Task, layouts: Sequence[Layout]) -> Iterator[tuple[str, ...]]:
    """Yield the seconds of a step, of the layouts that fit."""
    if task.run is not None:  # a measured time does not depend on the degree of tensor parallelism
        most = {each.name: each for each in sorted(layouts, key=lambda each: each.full_rows)}
        layouts = [each for each in layouts if most[each.name] is each]
    for each in layouts:
        if each.seconds is not None:
            times = ("-" if part is None else f"{part:.1f}" for part in vars(each.seconds).values())
            yield each.name, str(each.engine.tensor_parallel), *times


def table(head: Sequence[str], rows: Iterator[tuple[str, ...]]) -> str:
    """Align the columns: the first to the left, the others to the right."""
    columns = list(zip(head, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    first = [cell.ljust(widths[0]) for cell in columns[0]]
    others = [[cell.rjust(width) for cell in column] for column, width in zip(columns[1:], widths[1:], strict=True)]
    return "\n".join("  ".join(cells).rstrip() for cells in zip(first, *others, strict=True))


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f}"


def _fits(rows: int) -> str:
    return "yes" if rows else "NO"
