"""One layout after the other: what fits on its GPUs, and the seconds of its step."""

from dataclasses import dataclass, replace

from .engine_memory import EngineMemory, engine_memory, parallel_degrees
from .rounds import Decoder, generate
from .sync_seconds import Rates, Sync, load_seconds, pause_seconds, projected
from .task import Task
from .training import (
    FREE_SHARE,
    OTHER_BYTES,
    TrainingMemory,
    largest_micro_batch,
    nodes_needed,
    training_memory,
)

# Assumed: share of the peak rate in training; passes in units of forward and backward: these, and activations that are
# computed again, a third; gathers of the whole model per micro-batch: forward, backward, and the gradients
MODEL_FLOPS_SHARE, PASSES, GATHERS = 0.4, 4 / 3, 3
# TRL's colocation scores a round in one more pass, which node mode leaves out (`rollouts/loss_scores.py`)
SCORING_PASS = 1 / 3
NODE_LINK = 400e9  # assumed, bytes per second between the GPUs of a node
HOST_LINK = Rates().locked  # bytes per second of a GPU's link to host memory
WAKE_S = 1.0  # assumed, of a sleeping engine beside the copies
OPEN_ROUNDS = 3


@dataclass(frozen=True)
class Seconds:
    """Seconds of a step and of its parts."""

    sync: float  # with `max_staleness=0`
    generate: float
    tail: float
    train: float
    after: float  # generation, then training
    # `None` with colocation
    pause: float | None = None  # of training, for a sync with `max_staleness` above 0
    beside: float | None = None  # `max_staleness=1`
    in_flight: float | None = None


@dataclass(frozen=True)
class Layout:
    """A split or colocation with one tensor-parallel degree."""

    name: str
    training: int
    reserved: int  # 0: colocation
    memory: TrainingMemory
    micro_rows: int  # 0: training does not fit
    nodes_needed: int | None  # for one row per micro-batch; `None`: no number of nodes is enough
    engine: EngineMemory
    full_rows: int  # of the longest length, at once, in the caches of a node
    seconds: Seconds | None = None

    @property
    def fits(self) -> bool:
        """Return whether one of the longest rows fits on both sides."""
        return self.micro_rows > 0 and self.full_rows > 0


def split_layouts(task: Task, training: int, reserved: int) -> list[Layout]:
    """Return the layouts of a split, one for each tensor-parallel degree of its engines."""
    degrees = parallel_degrees(task.model, reserved)
    name = f"{training}+{reserved}"
    return [
        _layout(task, name, training, reserved, engine_memory(task, reserved, degree))
        for degree in degrees
    ]


def colocated_layouts(task: Task) -> list[Layout]:
    """Return the layouts of colocation on all GPUs, with engines that sleep while the ranks train.

    While an engine generates, training keeps its states and what its process needs, but no gathered parameters and
    no activations.
    """
    gpus = task.cluster.gpus
    states = training_memory(task, task.cluster.nodes, gpus, 1).states
    taken = states + OTHER_BYTES + FREE_SHARE * task.cluster.gpu.total
    degrees = parallel_degrees(task.model, gpus)
    return [
        _layout(task, "colocated", gpus, 0, engine_memory(task, gpus, degree, taken))
        for degree in degrees
    ]


def _layout(task: Task, name: str, training: int, reserved: int, engine: EngineMemory) -> Layout:
    micro = largest_micro_batch(task, training)
    memory = training_memory(task, task.cluster.nodes, training, max(1, micro))
    needed = nodes_needed(task, training)
    layout = Layout(
        name, training, reserved, memory, micro, needed, engine, engine.rows(task.row_tokens)
    )
    if layout.fits and task.timed:
        return replace(layout, seconds=_timed(task, layout))
    return layout


def train_seconds(task: Task, layout: Layout) -> float:
    """Return the seconds of training: the longer one of the operations and of the traffic of ZeRO-3.

    Rows are assumed to be packed into micro-batches of equal tokens, as `micro_batch_tokens` does.
    """
    model, rows, peak = task.model, task.rows, task.cluster.gpu.peak
    assert peak is not None  # the caller checks
    tokens = rows.prompt + rows.mean
    is_split = layout.reserved > 0
    passes = PASSES if is_split else PASSES + SCORING_PASS
    gathers = GATHERS if is_split else GATHERS + 1
    operations = (
        rows.number * passes * (model.operations * tokens + model.square_operations * tokens**2)
    )
    compute = operations / (layout.training * peak * MODEL_FLOPS_SHARE)
    micro_steps = max(
        1.0, rows.number / layout.training * tokens / (layout.micro_rows * task.row_tokens)
    )
    return max(compute, micro_steps * gathers * gather_seconds(task))


def gather_seconds(task: Task) -> float:
    """Return the seconds in which the whole model reaches every GPU once."""
    nodes, num_bytes = task.cluster.nodes, 2 * task.model.parameters
    return max((nodes - 1) / nodes * num_bytes / task.cluster.link, num_bytes / NODE_LINK)


def sync_seconds(task: Task, layout: Layout) -> float:
    """Return the projected seconds of a weight sync; with colocation, of a gather and of waking the engines."""
    if not layout.reserved:
        return gather_seconds(task) + 2 * layout.engine.weights / HOST_LINK + WAKE_S
    return projected(weight_sync(task, layout), Rates(nic=task.cluster.link))


def weight_sync(task: Task, layout: Layout) -> Sync:
    """Return the weight sync of a split, through host memory."""
    return Sync(
        num_bytes=2.0 * task.model.parameters,
        nodes=task.cluster.nodes,
        ranks=layout.training,
        workers=layout.reserved,
        tensor_parallel=layout.engine.tensor_parallel,
        calls=task.model.loader_calls,
    )


def _timed(task: Task, layout: Layout) -> Seconds:
    """Return the seconds of a step: estimated, or those of a run, scaled to the GPUs of the layout."""
    sync = sync_seconds(task, layout)
    run = task.run
    if run is None:
        decoder = Decoder(task.model, task.cluster.gpu, layout.engine.tensor_parallel)
        one = generate(task.rows, layout.engine, decoder, OPEN_ROUNDS + 1)
        took, tail, full = one.seconds, one.tail_s, one.full_s
        train = train_seconds(task, layout)
    else:
        reserved = run.reserved or max(1, task.cluster.gpus - run.training)
        gpus = (layout.reserved or layout.training) / reserved
        took, full = run.times.drained(gpus), run.times.in_flight(gpus)
        tail = min(run.times.tail_s, took)
        train = run.times.train_s * run.training / layout.training
        if layout.reserved:
            sync = run.sync_s
    seconds = Seconds(sync, took, tail, train, after=sync + took + train)
    if not layout.reserved:
        return seconds
    pause = load = idle = sync  # a run has measured one of them
    if run is None:
        split, rates = weight_sync(task, layout), Rates(nic=task.cluster.link)
        pause, load = pause_seconds(split, rates), load_seconds(split, rates)
        idle = pause + load  # of engines that wait for new weights before they begin the next round
    return replace(
        seconds,
        pause=pause,
        beside=max(pause + train, idle + took),
        in_flight=max(pause + train, load + full),  # engines generate during the pause
    )


def fastest(layouts: list[Layout], way: str) -> Layout | None:
    """Return the layout whose step takes the fewest seconds in one of the ways of [`Seconds`]."""
    timed = [each for each in layouts if each.seconds and getattr(each.seconds, way) is not None]
    return min(timed, key=lambda each: (getattr(each.seconds, way), -each.full_rows), default=None)
