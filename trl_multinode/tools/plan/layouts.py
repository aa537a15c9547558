"""One layout after the other: what fits on its GPUs, and the seconds of its step."""

from dataclasses import dataclass, replace
from itertools import groupby
from math import gcd

from .engine_memory import EngineMemory, engine_memory, parallel_degrees
from .rounds import Decoder, generate
from .sync_seconds import Rates, Sync, load_seconds, pause_seconds, projected, pull_seconds
from .task import Rows, Task
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
CLOSE = 1.05  # seconds that are as good as the fastest
WAYS = ("after", "beside", "in_flight")  # fields of `Seconds`


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
    """Ranks of each node, and engines with one tensor-parallel degree on the other GPUs.

    If all nodes are equal, rows and engines are those of one node, because each generates its own rows. If nodes
    differ, rows and engines are those of all nodes, which share them.
    """

    name: str
    ranks: tuple[int, ...]  # 0: the node only generates
    reserved: float  # GPUs per node, on average; 0: colocation
    memory: TrainingMemory
    micro_rows: int  # 0: training does not fit
    nodes_needed: int | None  # for one row per micro-batch; `None`: no number of nodes is enough
    rows: Rows  # that the engines share
    engine: EngineMemory
    full_rows: int  # of the longest length, at once, in the caches of these engines
    seconds: Seconds | None = None

    @property
    def fits(self) -> bool:
        """Return whether one of the longest rows fits on both sides."""
        return self.micro_rows > 0 and self.full_rows > 0

    @property
    def is_even(self) -> bool:
        """Return whether all nodes are equal."""
        return len({*self.ranks}) == 1

    @property
    def training(self) -> float:
        """Return the ranks per node, on average."""
        return sum(self.ranks) / len(self.ranks)

    @property
    def training_nodes(self) -> int:
        """Return the number of nodes with ranks."""
        return len(self.ranks) - self.ranks.count(0)

    @property
    def fewest(self) -> int:
        """Return the ranks of the smallest node that trains."""
        return min(filter(None, self.ranks))


def split_layouts(task: Task, ranks: tuple[int, ...]) -> list[Layout]:
    """Return the layouts with these ranks of each node, one for each tensor-parallel degree of the engines."""
    gpus = task.cluster.gpus
    reserved = [gpus - each for each in ranks]
    counts = [(len([*group]), each) for each, group in groupby(reversed(ranks))]
    if len(counts) == 1:
        name, engine_gpus, rows = f"{ranks[0]}+{reserved[0]}", reserved[0], task.rows
    else:
        name = "/".join(f"{count}x{each}+{gpus - each}" for count, each in counts)
        engine_gpus = sum(reserved)
        rows = replace(task.rows, number=task.rows.number * len(ranks))
    shared = replace(task, rows=rows)
    return [
        _layout(task, name, ranks, rows, engine_memory(shared, engine_gpus, degree))
        for degree in parallel_degrees(task.model, gcd(*reserved))
    ]


def mixed_layouts(task: Task, pairs: list[tuple[int, int]]) -> list[Layout]:
    """Return the fastest layouts with two kinds of nodes: uneven training nodes, and nodes that only generate.

    Args:
        pairs (`list[tuple[int, int]]`):
            Training and reserved GPUs of the nodes that have both.
    """
    gpus, nodes = task.cluster.gpus, task.cluster.nodes
    trainings = [training for training, _ in pairs]
    uneven = [(training, gpus) for training in trainings]
    engine_nodes = [(0, training) for training in (gpus, *trainings)]
    found = []
    for kinds in (uneven, engine_nodes):
        every = [
            layout
            for few, most in kinds
            for count in range(1, nodes)
            for layout in split_layouts(task, (few,) * count + (most,) * (nodes - count))
        ]
        timed = [layout for way in WAYS if (layout := fastest(every, way))]
        found += timed or sorted(every, key=_distance)[:1]
    return [*dict.fromkeys(found)]


def _distance(layout: Layout) -> tuple[int, float]:
    """Return in how many ways a layout does not fit, and the weights on an engine's GPU."""
    return (layout.micro_rows == 0) + (layout.full_rows == 0), layout.engine.weights


def colocated_layouts(task: Task) -> list[Layout]:
    """Return the layouts of colocation on all GPUs, with engines that sleep while the ranks train.

    While an engine generates, training keeps its states and what its process needs, but no gathered parameters and
    no activations.
    """
    gpus = task.cluster.gpus
    ranks = (gpus,) * task.cluster.nodes
    taken = (
        training_memory(task, ranks, 1).states + OTHER_BYTES + FREE_SHARE * task.cluster.gpu.total
    )
    return [
        _layout(task, "colocated", ranks, task.rows, engine_memory(task, gpus, degree, taken))
        for degree in parallel_degrees(task.model, gpus)
    ]


def _layout(
    task: Task, name: str, ranks: tuple[int, ...], rows: Rows, engine: EngineMemory
) -> Layout:
    micro = largest_micro_batch(task, ranks)
    layout = Layout(
        name=name,
        ranks=ranks,
        reserved=task.cluster.gpus - sum(ranks) / len(ranks),
        memory=training_memory(task, ranks, max(1, micro)),
        micro_rows=micro,
        nodes_needed=nodes_needed(task, ranks),
        rows=rows,
        engine=engine,
        full_rows=engine.rows(task.row_tokens),
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
    operations = rows.number * passes * model.flops.of(tokens, model.flops.squares(tokens))
    compute = operations / (layout.training * peak * MODEL_FLOPS_SHARE)
    micro_steps = max(
        1.0, rows.number / layout.training * tokens / (layout.micro_rows * task.row_tokens)
    )
    return max(compute, micro_steps * gathers * gather_seconds(task, layout))


def gather_seconds(task: Task, layout: Layout) -> float:
    """Return the seconds in which the whole model reaches every GPU that trains once."""
    num_bytes = 2 * task.model.parameters
    # share of the model that the node with the fewest ranks receives
    missing = 1 - layout.fewest / sum(layout.ranks)
    return max(missing * num_bytes / task.cluster.link, num_bytes / NODE_LINK)


def sync_seconds(task: Task, layout: Layout) -> float:
    """Return the projected seconds of a weight sync; with colocation, of a gather and of waking the engines."""
    if not layout.reserved:
        return gather_seconds(task, layout) + 2 * layout.engine.weights / HOST_LINK + WAKE_S
    return projected(weight_sync(task, layout), Rates(nic=task.cluster.link))


def weight_sync(task: Task, layout: Layout) -> Sync:
    """Return the weight sync of a layout with reserved GPUs, through host memory."""
    return Sync(
        num_bytes=2.0 * task.model.parameters,
        nodes=layout.training_nodes,
        ranks=layout.fewest,
        tensor_parallel=layout.engine.tensor_parallel,
        calls=task.model.loader_calls,
        gathering=0 if layout.fewest == max(layout.ranks) else sum(layout.ranks),
        agents=layout.ranks.count(0),
    )


def _timed(task: Task, layout: Layout) -> Seconds:
    """Return the seconds of a step: estimated, or those of a run, scaled to the GPUs of the layout."""
    sync = sync_seconds(task, layout)
    split, rates = weight_sync(task, layout), Rates(nic=task.cluster.link)
    pull = pull_seconds(split, rates)
    run = task.run
    if run is None:
        decoder = Decoder(task.model, task.cluster.gpu, layout.engine.tensor_parallel)
        one = generate(layout.rows, layout.engine, decoder, OPEN_ROUNDS + 1)
        took, tail, full = one.seconds, one.tail_s, one.full_s
        train = train_seconds(task, layout)
    else:
        reserved = run.reserved or max(1, task.cluster.gpus - run.training)
        gpus = (layout.reserved or layout.training) / reserved
        took, full = run.times.drained(gpus), run.times.in_flight(gpus)
        tail = min(run.times.tail_s, took)
        train = run.times.train_s * run.training / layout.training
        if layout.reserved:
            sync = run.sync_s + pull
    seconds = Seconds(sync, took, tail, train, after=sync + took + train)
    if not layout.reserved:
        return seconds
    pause = load = idle = sync - pull  # a run has measured one of them
    if run is None:
        pause, load = pause_seconds(split, rates), load_seconds(split, rates)
        idle = pause + load  # of engines that wait for new weights before they begin the next round
    return replace(
        seconds,
        pause=pause,
        beside=max(pause + train, idle + pull + took),
        # engines generate during the pause, and while their node pulls
        in_flight=max(pause + train, load + full, pull),
    )


def fastest(layouts: list[Layout], way: str) -> Layout | None:
    """Return the layout whose step takes the fewest seconds in one of the ways of [`Seconds`].

    Equal nodes win over others that are about as fast, because they are simpler to start and wait for no other node.
    """
    timed = [each for each in layouts if each.seconds and getattr(each.seconds, way) is not None]

    def rank(layout: Layout) -> tuple[float, int]:
        return getattr(layout.seconds, way) * (1 if layout.is_even else CLOSE), -layout.full_rows

    return min(timed, key=rank, default=None)
