"""Tables of a plan, and the assumptions behind them."""

from collections.abc import Iterator, Sequence
from textwrap import fill

from .answers import answers
from .hardware import GIB
from .layouts import GATHERS, MODEL_FLOPS_SHARE, Layout, Task
from .rounds import CACHE_SHARE, MATRIX_SHARE, READ_SHARE, SPREAD
from .training import FREE_SHARE, OTHER_BYTES

WIDTH = 110  # of a line
TRAINING_HEAD = ("split", "ranks", "states", "gather", "activations", "other", "sum", "rows fit", "fits", "from nodes")
ENGINE_HEAD = ("split", "TP", "engines", "weights", "other", "cache", "tokens cached", "longest rows at once", "fits")
STEP_HEAD = ("split", "TP", "sync", "generate", "tail", "train", "staleness 0", "staleness 1", "in flight")


def text_of(task: Task, splits: list[Layout], colocated: list[Layout]) -> str:
    """Return the whole plan as text."""
    every = [*splits, *colocated]
    parts = [title(task), training_table(task, every), engine_table(task, every)]
    if any(each.seconds for each in every):
        parts.append(step_table(task, every))
    parts.append("\n".join(fill(each, WIDTH, subsequent_indent="  ") for each in answers(task, splits, colocated)))
    assumed = (fill(each, WIDTH, initial_indent="  - ", subsequent_indent="    ") for each in assumptions(task))
    parts.append("\n".join(["Assumed:", *assumed]))
    return "\n\n".join(parts)


def title(task: Task) -> str:
    """Describe model, cluster and rows."""
    model, cluster, rows = task.model, task.cluster, task.rows
    active = f", {model.active / 1e9:.1f} B used by a token" if model.routed else ""
    cached = 2 * model.cache_elements(1) / 1024
    return (
        f"{model.name}: {model.parameters / 1e9:.2f} B parameters{active}, {2 * model.parameters / GIB:.1f} GiB in "
        f"bfloat16, {cached:.0f} KiB of cache per token\n"
        f"{cluster.nodes} nodes x {cluster.gpus} {cluster.gpu.name} ({cluster.gpu.total / GIB:.1f} GiB each), "
        f"{cluster.link * 8 / 1e9:.0f} Gbit/s into a node\n"
        f"{rows.number} rows per node and round, prompts of {rows.prompt} tokens, completions of at most "
        f"{rows.longest} and {rows.mean:.0f} on average"
    )


def training_table(task: Task, layouts: Sequence[Layout]) -> str:
    """Return the memory of training, one row per split."""
    rows = []
    first = {layout.name: layout for layout in reversed(layouts)}
    for each in (first[name] for name in names(layouts)):
        memory = each.memory
        parts = (memory.states, memory.gather, memory.activations, memory.other, memory.total)
        needed = str(each.nodes_needed) if each.nodes_needed else "never"
        ranks = str(task.cluster.nodes * each.training)
        rows.append((each.name, ranks, *map(_gib, parts), str(each.micro_rows), _fits(each.micro_rows), needed))
    host = layouts[0].memory.host
    more = f", {host / GIB:.0f} GiB of host memory per node" if host else ""
    return f"Training: ZeRO-3, GiB per GPU{more}; rows fit: largest micro-batch\n{table(TRAINING_HEAD, rows)}"


def engine_table(task: Task, layouts: Sequence[Layout]) -> str:
    """Return the memory of the engines, one row per split and tensor-parallel degree."""
    rows = []
    for each in layouts:
        engine = each.engine
        sizes = map(_gib, (engine.weights, engine.other, engine.cache))
        held = (f"{engine.tokens:,}", str(each.full_rows), _fits(each.full_rows))
        rows.append((each.name, str(engine.tensor_parallel), str(engine.engines), *sizes, *held))
    return f"Engines: bfloat16, GiB per GPU; tokens and rows of a node\n{table(ENGINE_HEAD, rows)}"


def step_table(task: Task, layouts: Sequence[Layout]) -> str:
    """Return the seconds of a step, of the layouts that fit."""
    rows = []
    if task.run is not None:  # a measured time does not depend on the degree of tensor parallelism
        layouts = [
            max((one for one in layouts if one.name == name), key=lambda one: one.full_rows) for name in names(layouts)
        ]
    for each in layouts:
        if (took := each.seconds) is not None:
            parts = (took.sync, took.generate, took.tail, took.train, took.after, took.beside, took.in_flight)
            times = ["-" if part is None else f"{part:.1f}" for part in parts]
            rows.append((each.name, str(each.engine.tensor_parallel), *times))
    how = "estimated, not measured" if task.run is None else f"from the means of {task.run.steps} measured steps"
    return f"Seconds of a step, {how}\n{table(STEP_HEAD, rows)}"


def names(layouts: Sequence[Layout]) -> list[str]:
    """Return the splits of the layouts in their order, each once."""
    return list(dict.fromkeys(each.name for each in layouts))


def assumptions(task: Task) -> Iterator[str]:
    """Yield what the plan takes for granted."""
    cluster = task.cluster
    yield (
        "Training in bfloat16 with Adam, all parameters trained, gradient checkpointing, DeepSpeed's default buckets; "
        f"{OTHER_BYTES / GIB:.1f} GiB for CUDA and NCCL, and {_percent(FREE_SHARE)} of a GPU for fragmentation."
    )
    yield "Attention keeps no scores (flash attention). Layers with a window count in full in the cache."
    yield "A reserved GPU gives 90 % to vLLM. With colocation, engines sleep while the ranks train."
    if task.run is not None:
        yield from _measured_assumptions(task)
        return
    if not task.timed:
        yield f"No seconds: the tables have no rates of {cluster.gpu.name}."
        return
    yield (
        f"Lengths are log-normal (spread {SPREAD}) up to the longest; --mean sets the average. Nodes are equally fast."
    )
    yield (
        f"Engines reach {_percent(READ_SHARE)} of the memory rate for weights, {_percent(CACHE_SHARE)} for the cache, "
        f"{_percent(MATRIX_SHARE)} of the peak; prompts take no time."
    )
    yield (
        f"Training reaches {_percent(MODEL_FLOPS_SHARE)} of the peak, or the link: {GATHERS} passes of the model per "
        "micro-batch, hidden behind the computation; rows packed as with `micro_batch_tokens`."
    )
    if task.model.routed:
        yield "Experts train as fast as dense layers with as many operations, which is optimistic."
    yield "Syncs go through host memory and take the seconds of docs/operate/sizing.md."


def _measured_assumptions(task: Task) -> Iterator[str]:
    run = task.run
    assert run is not None
    reserved = f"{run.reserved}" if run.reserved else "as many reserved as the nodes here have left"
    yield (
        f"Measured with {run.training}+{reserved} on {run.nodes} nodes: sync {run.sync_s:.1f} s, generate "
        f"{run.times.generate_s:.1f} s, tail {run.times.tail_s:.1f} s, train {run.times.train_s:.1f} s"
        + (", generation ahead of training." if run.overlapped else ".")
    )
    yield "Rows per node as in that run. Reserved GPUs divide the generation, except for its tail; TP changes nothing."
    if run.in_flight:
        yield "Completions of that run were in flight, so its engines are taken as busy all the time: an upper bound."
    if not run.tail_known:
        yield "The tail is unknown, because no checkpoint of the run has a log with engine/tail_share; it counts as 0."


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align the columns: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    aligned = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in (head, *rows)
    ]
    return "\n".join(line.rstrip() for line in aligned)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f}"


def _fits(rows: int) -> str:
    return "yes" if rows else "NO"
