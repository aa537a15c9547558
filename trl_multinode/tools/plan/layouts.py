"""One layout after the other: what fits on its GPUs, and the seconds of its step."""

from dataclasses import dataclass, replace

from ...run.splits import StepTimes
from .engine_memory import EngineMemory, engine_memory, parallel_degrees
from .hardware import Cluster
from .measured import MeasuredRun
from .model_size import ModelSize
from .rounds import Decoder, Rows, generate
from .sync_seconds import Rates, Sync, projected
from .training import FREE_SHARE, OTHER_BYTES, TrainingMemory, largest_micro_batch, training_memory

# Assumed: share of the peak rate in training; passes beside forward and backward, in units of these: activations that
# are computed again and the pass that scores a round, a third each
MODEL_FLOPS_SHARE, PASSES = 0.4, 5 / 3
GATHERS = 4  # of the whole model per micro-batch: scoring, forward, backward, and the gradients
NODE_LINK = 400e9  # assumed, bytes per second between the GPUs of a node
HOST_LINK = Rates().locked  # bytes per second of a GPU's link to host memory
WAKE_S = 1.0  # assumed, of a sleeping engine beside the copies
OPEN_ROUNDS = 3
MOST_NODES = 1024


@dataclass(frozen=True)
class Task:
    """Everything that a plan depends on: a model, a cluster, the rows of a round and the settings of training."""

    model: ModelSize
    cluster: Cluster
    rows: Rows
    offload: str = "none"
    micro_rows: int | None = None  # rows of a micro-batch; `None`: as many as fit
    run: MeasuredRun | None = None

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row."""
        return self.rows.prompt + self.rows.longest

    @property
    def timed(self) -> bool:
        """Return whether seconds can be given: they were measured, or the GPU's rates are known."""
        gpu = self.cluster.gpu
        return self.run is not None or (gpu.memory_rate is not None and gpu.peak is not None)


@dataclass(frozen=True)
class Seconds:
    """Seconds of a step and of its parts."""

    sync: float
    generate: float
    tail: float
    train: float
    after: float  # generation, then training
    beside: float | None  # `max_staleness=1`; `None` with colocation
    in_flight: float | None


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
    found = []
    for degree in parallel_degrees(task.model, reserved):
        engine = engine_memory(task.model, task.cluster.gpu.total, reserved, degree, task.rows.number)
        found.append(_layout(task, f"{training}+{reserved}", training, reserved, engine))
    return found


def colocated_layouts(task: Task) -> list[Layout]:
    """Return the layouts of colocation on all GPUs, with engines that sleep while the ranks train.

    While an engine generates, training keeps its states and what its process needs, but no gathered parameters and
    no activations.
    """
    gpus, found = task.cluster.gpus, []
    for degree in parallel_degrees(task.model, gpus):
        states = training_memory(task.model, task.cluster.nodes, gpus, 1, task.row_tokens, task.offload).states
        taken = states + OTHER_BYTES + FREE_SHARE * task.cluster.gpu.total
        engine = engine_memory(task.model, task.cluster.gpu.total, gpus, degree, task.rows.number, taken)
        found.append(_layout(task, "colocated", gpus, 0, engine))
    return found


def _layout(task: Task, name: str, training: int, reserved: int, engine: EngineMemory) -> Layout:
    model, cluster, length = task.model, task.cluster, task.row_tokens
    share = -(-task.rows.number // training)  # rows of a round per rank
    most = min(share, task.micro_rows or share)
    micro = largest_micro_batch(model, cluster.nodes, training, length, cluster.gpu.total, task.offload, most)
    if task.micro_rows and micro < most:
        micro = 0
    memory = training_memory(model, cluster.nodes, training, max(1, micro), length, task.offload)
    needed = nodes_needed(task, training)
    layout = Layout(name, training, reserved, memory, micro, needed, engine, engine.rows(length))
    if not (layout.fits and task.timed):
        return layout
    seconds = _measured(task, layout) if task.run else _estimated(task, layout)
    return replace(layout, seconds=seconds)


def nodes_needed(task: Task, training: int) -> int | None:
    """Return the fewest nodes on which a micro-batch of one row, or of the rows that were asked for, fits."""
    rows = task.micro_rows or 1
    limit = (1 - FREE_SHARE) * task.cluster.gpu.total

    def fits(nodes: int) -> bool:
        return training_memory(task.model, nodes, training, rows, task.row_tokens, task.offload).total <= limit

    return next((nodes for nodes in range(1, MOST_NODES + 1) if fits(nodes)), None)


def train_seconds(task: Task, layout: Layout) -> float:
    """Return the seconds of training: the longer one of the operations and of the traffic of ZeRO-3.

    Rows are assumed to be packed into micro-batches of equal tokens, as `micro_batch_tokens` does.
    """
    model, rows, peak = task.model, task.rows, task.cluster.gpu.peak
    assert peak is not None  # the caller checks
    tokens = rows.prompt + rows.mean
    operations = rows.number * PASSES * (model.operations * tokens + model.square_operations * tokens**2)
    compute = operations / (layout.training * peak * MODEL_FLOPS_SHARE)
    micro_steps = max(1.0, rows.number / layout.training * tokens / (layout.micro_rows * task.row_tokens))
    return max(compute, micro_steps * GATHERS * gather_seconds(task))


def gather_seconds(task: Task) -> float:
    """Return the seconds in which the whole model reaches every GPU once."""
    nodes, num_bytes = task.cluster.nodes, 2 * task.model.parameters
    return max((nodes - 1) / nodes * num_bytes / task.cluster.link, num_bytes / NODE_LINK)


def sync_seconds(task: Task, layout: Layout) -> float:
    """Return the projected seconds of a weight sync; with colocation, of a gather and of waking the engines."""
    if layout.reserved:
        sync = Sync(
            2.0 * task.model.parameters, task.cluster.nodes, layout.training, workers=layout.reserved,
            tensor_parallel=layout.engine.tensor_parallel, calls=task.model.loader_calls,
        )  # fmt: skip
        return projected(sync, Rates(nic=task.cluster.link))
    return gather_seconds(task) + 2 * layout.engine.weights / HOST_LINK + WAKE_S


def _estimated(task: Task, layout: Layout) -> Seconds:
    decoder = Decoder(task.model, task.cluster.gpu, layout.engine.tensor_parallel)
    one = generate(task.rows, layout.engine, decoder, OPEN_ROUNDS + 1)
    train = train_seconds(task, layout)
    return _seconds(layout, sync_seconds(task, layout), one.seconds, one.tail_s, train, one.full_s)


def _measured(task: Task, layout: Layout) -> Seconds:
    """Scale the measured seconds to the GPUs of a layout, as the advice of a run does."""
    run = task.run
    assert run is not None
    reserved = run.reserved or max(1, task.cluster.gpus - run.training)
    gpus = (layout.reserved or layout.training) / reserved
    train = run.times.train_s * run.training / layout.training
    sync = run.sync_s if layout.reserved else sync_seconds(task, layout)
    times: StepTimes = run.times
    tail = min(times.tail_s, times.drained(gpus))
    return _seconds(layout, sync, times.drained(gpus), tail, train, times.in_flight(gpus))


def _seconds(layout: Layout, sync: float, generate: float, tail: float, train: float, full: float) -> Seconds:
    apart = layout.reserved > 0
    return Seconds(
        sync, generate, tail, train,
        after=sync + generate + train,
        beside=sync + max(generate, train) if apart else None,
        in_flight=sync + max(full, train) if apart else None,
    )  # fmt: skip


def fastest(layouts: list[Layout], way: str) -> Layout | None:
    """Return the layout whose step takes the fewest seconds in one of the ways of [`Seconds`]."""
    timed = [each for each in layouts if each.seconds and getattr(each.seconds, way) is not None]
    return min(timed, key=lambda each: (getattr(each.seconds, way), -each.full_rows), default=None)
