"""Gathering of sharded buckets into whole tensors on every local main process: one collective across nodes per bucket.

DeepSpeed's `GatheredParameters(list)` launches an all-gather per parameter and materializes the bucket on every rank;
`DTensor.full_tensor()` does the same. Here a rank packs its pieces of all tensors of a bucket into one buffer, cast to
the dtype they are sent in, and two steps gather the buffers of W ranks on N nodes:

1. Ranks with the same local rank all-gather across nodes: a node receives every other node's pieces once, `(N-1)/N` of
   the bucket, whereas an all-gather over all ranks sends `(W-1)/W` of it to each node. Where the smallest node has
   fewer ranks, only as many of each node take part; the others of the node first send them their pieces.
2. Inside each node one rank receives the other ranks' buffers through the node's own memory, while the next bucket is
   already on the network: the local main process, or by turns each rank, so that all PCIe links of a node copy.

Before both steps, `even_pieces.py` spreads tensors of few rows that FSDP2 shards, such as fused experts.

`ShardGather` issues collectives; `tests/test_architecture.py` lists every module that does.
"""

from bisect import bisect
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from ..transports.pieces import Pieces
from ..wire.messages import TensorRange
from .even_pieces import pass_on
from .shards import Shard

PIECE_ALIGNMENT = (
    16  # bytes: alignment of tensors in a packed buffer, a multiple of every dtype's size
)


class ShardGather:
    """Process groups of this rank, across nodes and within its node. All training ranks construct it together.

    Args:
        device (`torch.device`):
            Device that the process group's backend sends from; shards in host memory are copied to it first.
        nodes (`Sequence[int]`, *optional*):
            Number of training ranks of each node. Default: each rank is a node.

    Attributes:
        place (`str`):
            Node and rank, for a message.
    """

    def __init__(self, device: torch.device, nodes: Sequence[int] = ()):
        self.buffers = Buffers(device)
        self.across = self.within = 0  # collectives so far, across nodes and within a node
        rank, self.world = 0, 1
        if dist.is_initialized():
            rank, self.world = dist.get_rank(), dist.get_world_size()
        counts = list(nodes) or [1] * self.world
        starts = [0, *accumulate(counts)]
        node = bisect(starts, rank) - 1
        self.place = f"node {node}, rank {rank}"
        self._first, self.ranks = starts[node], counts[node]
        self.local_rank = rank - self._first
        self._nodes, largest = len(counts), max(counts)
        # ranks of each node that all-gather, and the pieces of each: those of the node with the most ranks
        self._crossing = min(counts)
        self._carried = [-(-(largest - local) // self._crossing) for local in range(self._crossing)]
        # rows of all pieces in the order of the ranks, if they do not arrive in it
        self._order: torch.Tensor | None = None
        if largest > self._crossing:
            self._order = self._rank_order(counts).to(device)
        peers = [[start + local for start in starts[:-1]] for local in range(self._crossing)]
        ranks = [list(range(*ends)) for ends in pairwise(starts)]
        # every rank creates every group, in the same order
        self._across = dist.new_subgroups_by_enumeration(peers)[0] if self._nodes > 1 else None
        self._within = dist.new_subgroups_by_enumeration(ranks)[0] if largest > 1 else None

    def _rank_order(self, counts: list[int]) -> torch.Tensor:
        """Return where each rank's piece is among those of all groups across nodes, as `collect` receives them."""
        starts = [0, *accumulate(carried * self._nodes for carried in self._carried)]
        order = []
        for node, count in enumerate(counts):
            for local in range(count):
                turn, group = divmod(local, self._crossing)
                order.append(starts[group] + node * self._carried[group] + turn)
        return torch.tensor(order)

    @property
    def num_carried(self) -> int:
        """Number of pieces that this rank sends across nodes; 1 if another rank of its node sends its piece."""
        return self._carried[self.local_rank] if self.local_rank < self._crossing else 1

    @property
    def is_local_main(self) -> bool:
        return self.local_rank == 0

    @property
    def gathers_within(self) -> bool:
        """Return whether any node has several ranks."""
        return self._within is not None

    @property
    def buckets_at_peak(self) -> float:
        """Largest memory of a rank, in buckets, while the sync has one under way, gathers one and copies one.

        The last two are whole on the local main process. Of the first two it has the pieces of all ranks with its
        local rank, which are the whole bucket with one rank per node, and its own, from which the all-gather sends.
        gloo gathers both into another copy; NCCL takes nothing. PyTorch copies pieces that do not follow each other
        from a GPU to host memory by way of another copy on the GPU (read in its `Copy.cu`). Pieces of uneven nodes are
        copied into the order of the ranks.
        """
        carried = (
            self._carried[0] / self.world
        )  # the most of any rank, because all ranks plan the same buckets
        peers = self._nodes * carried
        under_way = 2 * carried if self._nodes > 1 else 0.0
        if self._nodes > 1 and dist.get_backend() == "gloo":
            under_way += 2 * peers
        temporary = 1.0 if self.buffers.device.type == "cuda" and self.world > 1 else 0.0
        if self._order is not None:
            temporary += 1
        return under_way + temporary + (2 + 2 * peers if self.gathers_within else 3)

    def extremes(self, value: int) -> tuple[int, int]:
        """Return the lowest and the highest `value` of all training ranks. A collective, for the set-up only."""
        both = torch.tensor([-value, value], device=self.buffers.device)
        if self.world > 1:
            dist.all_reduce(both, dist.ReduceOp.MAX)
        return -int(both[0]), int(both[1])

    def cross(self, pieces: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Gather pieces across nodes, which is under way on return.

        Args:
            pieces (`torch.Tensor` of shape `(num_carried, size)`):
                Memory for the pieces that this rank sends, with its own piece in the first row.

        Returns:
            The pieces of this rank's group, `(nodes * num_carried, size)`, empty if it is in none, and the work to
            wait for, if any.
        """
        if self._order is not None:
            self._pass_within(pieces)
        if self._across is None:
            return (pieces if self._nodes == 1 else pieces[:0]), None
        self.across += 1
        peers = self.buffers.take("peers", self._nodes * pieces.numel())
        return peers.view(-1, pieces.shape[1]), dist.all_gather_into_tensor(
            peers, pieces.view(-1), self._across, async_op=True
        )

    def _pass_within(self, pieces: torch.Tensor) -> None:
        """Send the piece of a rank that is in no group across nodes to one of its node that is."""
        self.within += 1
        group = self.local_rank % self._crossing
        if self.local_rank != group:
            self._exchange(dist.isend, [(pieces[0], group)])
            return
        others = range(group + self._crossing, self.ranks, self._crossing)
        self._exchange(dist.irecv, list(zip(pieces[1:], others, strict=False)))

    def collect(self, peers: torch.Tensor, holder: int) -> torch.Tensor | None:
        """Return the pieces of all ranks, `(nodes, ranks of a node, size)`, on local rank `holder`; `None` elsewhere.

        Those of uneven nodes are `(1, world_size, size)`. It uses sends and receives, because gloo's gather makes an
        extra copy of all data.
        """
        if not self.gathers_within:
            return peers.unsqueeze(1)
        self.within += 1
        if self.local_rank != holder:
            if len(peers):
                self._exchange(dist.isend, [(peers, holder)])
            return None
        size = peers.shape[1]
        rows = [self._nodes * carried for carried in self._carried]
        name = "every" if self._order is None else "received"
        every = self.buffers.take(name, sum(rows) * size).view(-1, size)
        groups = every.split(rows)
        others = [(pieces, local) for local, pieces in enumerate(groups) if local != holder]
        self._exchange(dist.irecv, others)
        if holder < self._crossing:
            groups[holder].copy_(peers)
        if self._order is None:
            return every.view(self.ranks, self._nodes, size).transpose(0, 1)
        ordered = self.buffers.take("every", self.world * size).view(-1, size)
        torch.index_select(every, 0, self._order, out=ordered)
        self.buffers.give_back("received", every)
        return ordered.unsqueeze(0)

    def _exchange(self, operation: Callable, parts: list[tuple[torch.Tensor, int]]) -> None:
        """Send or receive parts, each to or from a local rank of this node, and wait for them."""
        operations = [
            dist.P2POp(operation, part, self._first + local, self._within) for part, local in parts
        ]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()

    def meet(self, *values: int) -> list[int]:
        """Return the local main process's `values`, once all ranks of the node call this with as many."""
        told = torch.tensor(values if self.is_local_main else [0] * len(values))
        told = told.to(self.buffers.device)
        if self._within is not None:
            dist.all_reduce(told, group=self._within)
        return told.tolist()

    def release(self) -> None:
        """Free the memory that buckets reuse, and count from zero."""
        self.across = self.within = 0
        self.buffers.clear()


class Gathering:
    """Gathering of one bucket to one rank of each node, which begins here; at most two may be in flight.

    All training ranks construct it for the same tensors. `wait` is a collective of them.

    Args:
        gather (`ShardGather`):
            Process groups of this rank.
        shards (`Sequence[Shard]`):
            Shards of this rank.
        dtypes (`Sequence[torch.dtype]`):
            Dtype to send each tensor in; the cast precedes the transfer.
        holder (`int`, *optional*, defaults to 0):
            Local rank that gets the tensors.
    """

    def __init__(
        self,
        gather: ShardGather,
        shards: Sequence[Shard],
        dtypes: Sequence[torch.dtype],
        holder: int = 0,
    ):
        self._gather = gather
        self._holder = holder
        # each shard with the dtype and the pieces in which it is sent, and its bytes in a rank's buffer
        self._parts: list[tuple[Shard, torch.dtype, TensorRange, slice]] = []
        size = 0
        for shard, dtype in zip(shards, dtypes, strict=True):
            sent = shard.sent_as(dtype.itemsize)
            end = size + (sent.end - sent.first) * dtype.itemsize
            self._parts.append((shard, dtype, sent, slice(size, end)))
            size = -(-end // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
        size = max(size, PIECE_ALIGNMENT)
        pieces = gather.buffers.take("mine", gather.num_carried * size).view(-1, size)
        self._mine = pieces[0]
        self._pack()
        self._peers, self._work = gather.cross(pieces)
        self._taken = {"mine": self._mine}
        if self._work is not None:
            self._taken["peers"] = self._peers

    def _pack(self) -> None:
        """Copy this rank's pieces into its buffer. A collective if a tensor is sent in other pieces than its own."""
        gather = self._gather
        for shard, dtype, sent, where in self._parts:
            target = self._mine[where].view(dtype)
            if sent.elements == shard.cut.elements:
                own = shard.data[sent.first : sent.end]
                target[: own.numel()].copy_(own)
                continue
            pass_on(shard.data, shard.numel, shard.cut, sent, target)
            if gather.world > gather.ranks:
                gather.across += 1
            else:
                gather.within += 1

    def wait(self) -> list[Pieces]:
        """Return the bucket's tensors: with data on the holder in every node, empty on the other ranks."""
        if self._work is not None:
            self._work.wait()
            self._gather.buffers.give_back("mine", self._taken.pop("mine"))  # it is in "peers" now
        every = self._gather.collect(self._peers, self._holder)
        if self._gather.gathers_within:
            self.close()  # `collect` has copied these buffers or sent them on
        if every is None:
            every = self._mine.new_empty(0, 0, 0)
        elif self._gather.gathers_within:
            self._taken["every"] = every
        return [
            Pieces(_view(every[..., where], dtype), shard.sent_shape)
            for shard, dtype, _, where in self._parts
        ]

    def close(self) -> None:
        """Free the memory of the pieces for another bucket; the caller must not read them afterwards."""
        while self._taken:
            self._gather.buffers.give_back(*self._taken.popitem())


class Buffers:
    """Pool of memory that buckets reuse. On a CPU, fresh memory for each bucket raised the peak to 12 buckets through
    fragmentation and cost a page fault per page.

    Args:
        device (`torch.device`):
            Device of the memory.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._spare: dict[str, list[torch.UntypedStorage]] = {}
        self._largest: dict[str, int] = {}

    def take(self, name: str, num_bytes: int) -> torch.Tensor:
        """Return an uninitialized `uint8` tensor, `(num_bytes,)`."""
        self._largest[name] = max(num_bytes, self._largest.get(name, 0))
        while spare := self._spare.get(name):
            if (storage := spare.pop()).nbytes() >= num_bytes:
                return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)[
                    :num_bytes
                ]
        return torch.empty(self._largest[name], dtype=torch.uint8, device=self.device)[:num_bytes]

    def give_back(self, name: str, tensor: torch.Tensor) -> None:
        """Return the memory of `tensor`, a result of `take` or a view of one, to the pool."""
        self._spare.setdefault(name, []).append(tensor.untyped_storage())

    def clear(self) -> None:
        self._spare.clear()


def _view(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View `data` as `dtype`; replace an empty tensor, because torch may refuse to view it."""
    return (
        data.view(dtype)
        if data.numel()
        else torch.empty(data.shape, dtype=dtype, device=data.device)
    )
