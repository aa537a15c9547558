"""Gathering of sharded buckets into whole tensors on every local main process: one collective across nodes per bucket.

DeepSpeed's `GatheredParameters(list)` launches an all-gather per parameter and materializes the bucket on every rank;
`DTensor.full_tensor()` does the same. Here a rank packs its pieces of all tensors of a bucket into one buffer, cast to
the dtype they are sent in, and two steps gather the buffers of W ranks on N nodes:

1. Ranks with the same local rank all-gather across nodes: a node receives every other node's pieces once, `(N-1)/N` of
   the bucket, whereas an all-gather over all ranks sends `(W-1)/W` of it to each node.
2. Inside each node one rank receives the other ranks' buffers through the node's own memory, while the next bucket is
   already on the network: the local main process, or by turns each rank, so that all PCIe links of a node copy.

If nodes have different numbers of ranks, some ranks have no counterpart on the smallest node. One all-gather over all
ranks then replaces both steps: every rank receives the bucket, and all but one of each node drop it.

Before that, `even_pieces.py` spreads tensors of few rows that FSDP2 shards, such as fused experts.

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

# bytes: alignment of tensors in a packed buffer, a multiple of every dtype's size
PIECE_ALIGNMENT = 16


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
        self.ranks, self.local_rank = counts[node], rank - starts[node]
        self.is_local_main = self.local_rank == 0
        # groups that gather across nodes: one for each local rank, or a single one of all ranks if nodes differ
        groups = self.ranks if len({*counts}) == 1 else 1
        self.gathers_within = groups > 1
        self._peers = self.world // groups  # ranks of such a group
        ranks = list(range(self.world))
        peers = [ranks[first::groups] for first in range(groups)]
        neighbours = [ranks[slice(*ends)] for ends in pairwise(starts)]
        # every rank creates every group, in the same order
        self._across = dist.new_subgroups_by_enumeration(peers)[0] if self._peers > 1 else None
        self._within = dist.new_subgroups_by_enumeration(neighbours)[0] if max(counts) > 1 else None

    @property
    def buckets_at_peak(self) -> float:
        """Largest memory of a rank, in buckets, while the sync has one under way, gathers one and copies one.

        The last two are whole on the local main process. Of the first two it has the pieces of all ranks with its
        local rank, which are the whole bucket with one rank per node or if nodes differ, and its own, from which the
        all-gather sends. gloo gathers both into another copy; NCCL takes nothing. PyTorch copies pieces that do not
        follow each other from a GPU to host memory by way of another copy on the GPU (read in its `Copy.cu`).
        """
        peers = self._peers / self.world
        under_way = 2 / self.world if self._across is not None else 0.0
        if self._across is not None and dist.get_backend() == "gloo":
            under_way += 2 * peers
        temporary = 1.0 if self.buffers.device.type == "cuda" and self.world > 1 else 0.0
        return under_way + temporary + (2 + 2 * peers if self.gathers_within else 3)

    def extremes(self, value: int) -> tuple[int, int]:
        """Return the lowest and the highest `value` of all training ranks. A collective, for the set-up only."""
        both = torch.tensor([-value, value], device=self.buffers.device)
        if self.world > 1:
            dist.all_reduce(both, dist.ReduceOp.MAX)
        return -int(both[0]), int(both[1])

    def cross(self, mine: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the buffers of this rank's group across nodes, `(peers, size)`, and the work to wait for, if any."""
        if self._across is None:
            return mine.view(1, -1), None
        self.across += 1
        peers = self.buffers.take("peers", self._peers * mine.numel())
        return peers.view(self._peers, -1), dist.all_gather_into_tensor(
            peers, mine, self._across, async_op=True
        )

    def collect(self, peers: torch.Tensor, holder: int) -> torch.Tensor | None:
        """Return the buffers of all ranks, `(peers, groups, size)`, on local rank `holder`; `None` elsewhere.

        It uses sends and receives, because gloo's gather makes an extra copy of all data.
        """
        if not self.gathers_within:
            return peers.unsqueeze(1) if self.local_rank == holder else None
        self.within += 1
        if self.local_rank != holder:
            self._exchange(dist.isend, {holder: peers})
            return None
        every = self.buffers.take("every", self.ranks * peers.numel()).view(
            self.ranks, *peers.shape
        )
        others = {local: part for local, part in enumerate(every) if local != holder}
        self._exchange(dist.irecv, others)
        every[holder].copy_(peers)
        return every.transpose(0, 1)

    def _exchange(self, operation: Callable, parts: dict[int, torch.Tensor]) -> None:
        """Send or receive the parts of local ranks of this node, to or from each, and wait for them."""
        operations = [
            dist.P2POp(operation, part, group=self._within, group_peer=local)
            for local, part in parts.items()
        ]
        for work in dist.batch_isend_irecv(operations):
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
        self._mine = gather.buffers.take("mine", max(size, PIECE_ALIGNMENT))
        self._pack()
        self._peers, self._work = gather.cross(self._mine)
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
