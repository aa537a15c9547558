"""Nodes, ranks, training and reserved devices; every rank reads them from its environment once."""

import os
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

from ..errors import ConfigurationError
from .gpu_variables import CUDA, gpu_variable, visible_devices


@dataclass(frozen=True)
class NodeShape:
    """Numbers of one node, which may be others than those of the next."""

    ranks: int  # training ranks
    engines: int = 1
    # GPUs of the engines, none if one is a training GPU; on a CPU each engine is one device
    reserved: int = 1


@dataclass(frozen=True)
class Topology:
    """Topology of the calling rank. `accelerate launch` sets all of it; plain `python` is one rank on one node.

    Attributes:
        nodes (`list[NodeShape]`):
            Shape of each node. The ranks compare them before a model loads (`must_agree.py`); until then all nodes are
            assumed to be like this one.
    """

    rank: int  # 0..world_size-1, over all nodes
    world_size: int  # training ranks of the run
    local_rank: int  # 0..local_world_size-1
    local_world_size: int  # training ranks of *this* node
    node: int  # 0..num_nodes-1
    num_nodes: int
    launched: bool  # by torchrun or accelerate; the parent process is then the launcher
    nodes: list[NodeShape] = field(default_factory=list, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        self.assume(NodeShape(self.local_world_size))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> "Topology":
        rank, local_rank = int(environ.get("RANK", 0)), int(environ.get("LOCAL_RANK", 0))
        world, per_node = int(environ.get("WORLD_SIZE", 1)), int(environ.get("LOCAL_WORLD_SIZE", 1))
        if world > 1 and "LOCAL_WORLD_SIZE" not in environ:
            raise ConfigurationError(
                f"The launcher of these {world} ranks does not set LOCAL_WORLD_SIZE, the ranks of a node.",
                setting="LOCAL_WORLD_SIZE",
                cure="Write `deepspeed_multinode_launcher: standard` under `deepspeed_config` in the "
                "accelerate config, or start with torchrun.",
            )
        return cls(
            rank=rank,
            world_size=world,
            local_rank=local_rank,
            local_world_size=per_node,
            node=int(environ.get("GROUP_RANK", rank // per_node)),
            num_nodes=int(environ.get("GROUP_WORLD_SIZE", max(1, world // per_node))),
            launched="TORCHELASTIC_RUN_ID" in environ,
        )

    def assume(self, shape: NodeShape) -> None:
        """Assume that every node has the shape of this one."""
        self.nodes[:] = [shape] * self.num_nodes

    def learn(self, shapes: Mapping[int, NodeShape]) -> None:
        """Set the shape of every node, from that of the node of each rank."""
        nodes: list[NodeShape] = []
        first = 0
        while first < self.world_size:
            nodes.append(shapes[first])
            first += shapes[first].ranks
        self.nodes[:] = nodes

    @property
    def first_ranks(self) -> list[int]:
        """First global rank of each node: the only map between nodes and ranks."""
        return [0, *accumulate(node.ranks for node in self.nodes[:-1])]

    @property
    def ranks_per_node(self) -> str:
        """Number of ranks of each node as text."""
        return by_node([node.ranks for node in self.nodes])

    @property
    def engines_per_node(self) -> str:
        """Number of engines of each node as text."""
        return by_node([node.engines for node in self.nodes])

    @property
    def shares_engines(self) -> bool:
        """Return whether the ranks of a node without engines use those of other nodes."""
        return not all(node.engines for node in self.nodes)

    @property
    def num_devices(self) -> int:
        """Number of devices of the run, training and reserved ones."""
        return self.world_size + sum(node.reserved for node in self.nodes)

    @property
    def fits(self) -> bool:
        """Return whether the shapes of the nodes have all ranks; otherwise the assumption is wrong."""
        return sum(node.ranks for node in self.nodes) == self.world_size

    @property
    def is_local_main(self) -> bool:
        """`True` if this rank hosts the node's engines."""
        return self.local_rank == 0

    @property
    def local_ranks(self) -> range:
        """Global ranks of this node."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_world_size)

    def ranks_of(self, node: int) -> range:
        """Return the global ranks of a node."""
        first = self.first_ranks[node]
        return range(first, first + self.nodes[node].ranks)

    def node_of(self, rank: int) -> int:
        """Return the node of a global rank."""
        return bisect(self.first_ranks, rank) - 1

    def name_of(self, rank: int) -> str:
        """Return a global rank as text, with its node if that is known."""
        return f"rank {rank} (node {self.node_of(rank)})" if self.fits else f"rank {rank}"

    def __str__(self) -> str:
        return f"node {self.node}, rank {self.rank}"


@dataclass(frozen=True)
class EngineDevices:
    """GPUs of each engine of a node, by the names for CUDA_VISIBLE_DEVICES; empty tuples on a CPU."""

    per_engine: tuple[tuple[str, ...], ...]
    shared_with_training: bool  # an engine uses a GPU that a rank trains on
    sender: str | None = None  # the local main process's GPU; `None` on a CPU
    # GPUs that the ranks see, on which nothing trains and no engine runs
    idle: tuple[str, ...] = ()

    def seen_by(self, engine: int, with_sender: bool = False) -> tuple[str, ...]:
        """Return the GPUs that an engine sees: its own, then the sender's if the engine must open memory there."""
        own = self.per_engine[engine]
        return (
            own
            if not with_sender or self.sender is None or self.sender in own
            else (*own, self.sender)
        )


def by_node(numbers: Sequence[int]) -> str:
    """Return a number of each node as text: `7` if all are alike, otherwise `7, 3 x 8`."""
    runs = [(number, len(list(same))) for number, same in groupby(numbers)]
    if len(runs) == 1:
        return str(numbers[0])
    return ", ".join(f"{count} x {number}" if count > 1 else str(number) for number, count in runs)


def shape_of(topology: Topology, devices: EngineDevices) -> NodeShape:
    """Return the shape of the calling rank's node."""
    reserved = 0
    if not devices.shared_with_training:
        reserved = sum(map(len, devices.per_engine)) or len(devices.per_engine)
    return NodeShape(topology.local_world_size, len(devices.per_engine), reserved)


def assign_engines(
    topology: Topology,
    num_gpus: int,
    requested: Sequence[int] | None,
    num_engines: int | None,
    tensor_parallel_size: int,
    environ: Mapping[str, str] = os.environ,
) -> EngineDevices:
    """Assign GPUs to the engines of this node.

    Args:
        topology (`Topology`):
            Topology of the calling rank; all ranks of a node get the same result.
        num_gpus (`int`):
            Number of GPUs that the ranks of this node see; 0 on a CPU machine.
        requested (`Sequence[int]`, *optional*):
            Indices among the visible GPUs, training GPUs allowed. Default: all GPUs that no local rank trains on.
        num_engines (`int`, *optional*):
            Engines of the node. Default: as many as fit, none if no GPU is left, or one on a CPU machine.
        tensor_parallel_size (`int`):
            GPUs per engine.

    Raises:
        `ConfigurationError`: if the numbers do not fit; the message names the setting or numbers.
    """
    if num_gpus == 0:
        on_cpu = 1 if num_engines is None else num_engines
        return EngineDevices(((),) * on_cpu, shared_with_training=False)
    names = visible_devices(environ, num_gpus)
    # on AMD, torch counts ROCR_VISIBLE_DEVICES where CUDA_VISIBLE_DEVICES hides more
    num_gpus = len(names)
    training = range(min(topology.local_world_size, num_gpus))
    chosen = list(range(len(training), num_gpus) if requested is None else requested)
    _check_chosen(topology, chosen, names, environ)
    count = len(chosen) // tensor_parallel_size if num_engines is None else num_engines
    _check_counts(topology, chosen, count, tensor_parallel_size)
    groups = [
        chosen[i * tensor_parallel_size : (i + 1) * tensor_parallel_size] for i in range(count)
    ]
    return _devices(names, training, groups)


def _devices(names: list[str], training: range, groups: list[list[int]]) -> EngineDevices:
    for_engines = {index for group in groups for index in group}
    used = {*training, *for_engines}
    return EngineDevices(
        tuple(tuple(names[index] for index in group) for group in groups),
        shared_with_training=not for_engines.isdisjoint(training),
        sender=names[0],
        idle=tuple(name for index, name in enumerate(names) if index not in used),
    )


def _check_counts(
    topology: Topology, chosen: list[int], count: int, tensor_parallel_size: int
) -> None:
    """Check that the GPUs of the engines are enough for `count` engines, and divide into them."""
    if len(chosen) % tensor_parallel_size != 0:
        raise ConfigurationError(
            f"This node has {len(chosen)} GPUs for engines ({chosen}), not divisible by "
            f"`vllm_tensor_parallel_size` {tensor_parallel_size}.",
            setting="vllm_devices",
            got=chosen,
            node=topology.node,
            cure="Change one of the two; `num_processes` sets how many GPUs train.",
        )
    if count * tensor_parallel_size > len(chosen):
        raise ConfigurationError(
            f"{count} engines with `vllm_tensor_parallel_size` {tensor_parallel_size} need "
            f"{count * tensor_parallel_size} GPUs, and this node has {len(chosen)} for engines "
            f"({chosen}).",
            setting="num_engines",
            got=count,
            node=topology.node,
            cure="Lower `num_engines`, or `num_processes` so that fewer GPUs train.",
        )


def idle_gpus(devices: EngineDevices) -> str:
    """Return the reason and the cure for GPUs that do nothing; an empty text if there are none."""
    if not devices.idle:
        return ""
    names = f"GPU {', '.join(devices.idle)}"
    return (
        f"{names} would be idle: no rank trains there, and `vllm_devices` or `num_engines` leaves no engine there "
        f"(got {len(devices.idle)} idle, expected 0). Leave both settings out to generate there, or raise "
        "`num_processes` to train there."
    )


def _check_chosen(
    topology: Topology, chosen: list[int], names: list[str], environ: Mapping[str, str]
) -> None:
    outside = [index for index in chosen if not 0 <= index < len(names)]
    if outside:
        raise ConfigurationError(
            f"`vllm_devices` names GPU {outside}, but {_seen(names, environ)}, so 0 to {len(names) - 1} can be named.",
            setting="vllm_devices",
            got=outside,
            node=topology.node,
            cure="Use `gpu_ids: all`, or change `vllm_devices`.",
        )
    if len(set(chosen)) != len(chosen):
        raise ConfigurationError(
            f"`vllm_devices` names a GPU twice: {chosen}.",
            setting="vllm_devices",
            got=chosen,
            node=topology.node,
            cure="Name each once.",
        )


def check_engines(
    topology: Topology, num_gpus: int, environ: Mapping[str, str] = os.environ
) -> None:
    """Check that any node has an engine, once the shapes of all nodes are known.

    Raises:
        `ConfigurationError`: on every rank, if none has; the message has what the calling rank's node sees.
    """
    if any(node.engines for node in topology.nodes):
        return
    names = visible_devices(environ, num_gpus) if num_gpus else []
    left = max(1, len(names) - 1) * topology.num_nodes
    raise ConfigurationError(
        f"No GPU is left for the engine: {_seen(names, environ)} and trains on {topology.local_world_size}.",
        setting="num_processes",
        got=topology.world_size,
        node=topology.node,
        cure=f"Lower `num_processes` (now {topology.world_size}; {left} leaves one per node), use `gpu_ids: all`, "
        "raise `num_engines` if it is 0, or name a training GPU to share in `vllm_devices`.",
    )


def _seen(names: list[str], environ: Mapping[str, str]) -> str:
    seen = f"this node sees {len(names)} GPUs"
    variable = gpu_variable(environ)
    if variable in environ:
        by_accelerate = " or by `gpu_ids` in the YAML" if variable == CUDA else ""
        seen += f" ({variable}={environ[variable]}, set by you{by_accelerate})"
    return seen
