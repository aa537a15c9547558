"""Gathering of sharded buckets into whole tensors on every local main process: one collective across nodes per bucket.

DeepSpeed's `GatheredParameters(list)` launches an all-gather per parameter and materializes the bucket on every rank;
`DTensor.full_tensor()` does the same. Here a rank packs its pieces of all tensors of a bucket into one buffer, cast to
the dtype they are sent in, and two steps gather the buffers of W ranks on N nodes:

1. Ranks with the same local rank all-gather across nodes: a node receives every other node's pieces once, `(N-1)/N` of
   the bucket, whereas an all-gather over all ranks sends `(W-1)/W` of it to each node.
2. Inside each node one rank receives the other ranks' buffers through the node's own memory, while the next bucket is
   already on the network: the local main process, or by turns each rank, so that all PCIe links of a node copy.

Before both steps, `even_pieces.py` spreads tensors of few rows that FSDP2 shards, such as fused experts.

`ShardGather` issues collectives; `tests/test_architecture.py` lists every module that does.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..transports.pieces import Pieces
from .even_pieces import Cut, pass_on
from .shards import Shard

PIECE_ALIGNMENT = (
    16  # bytes: alignment of tensors in a packed buffer, a multiple of every dtype's size
)


class ShardGather:
    """Process groups of this rank, across nodes and within its node. All training ranks construct it together.

    Args:
        ranks_per_node (`int`):
            Number of training ranks of every node.
        device (`torch.device`):
            Device that the process group's backend sends from; shards in host memory are copied to it first.
    """

    def __init__(self, ranks_per_node: int, device: torch.device):
        self.buffers = Buffers(device)
        self.across = self.within = 0  # collectives so far, across nodes and within a node
        distributed = dist.is_available() and dist.is_initialized()
        self.world: int = dist.get_world_size() if distributed else 1
        self.ranks = min(ranks_per_node, self.world)
        self._nodes = self.world // self.ranks
        self._rank: int = dist.get_rank() if distributed else 0
        self._node = self._rank // self.ranks
        self.local_rank = self._rank % self.ranks
        ranks = list(range(self.world))
        peers = [ranks[local :: self.ranks] for local in range(self.ranks)]
        nodes = [ranks[first : first + self.ranks] for first in ranks[:: self.ranks]]
        # every rank creates every group, in the same order
        self._across = dist.new_subgroups_by_enumeration(peers)[0] if self._nodes > 1 else None
        self._within = dist.new_subgroups_by_enumeration(nodes)[0] if self.ranks > 1 else None

    @property
    def place(self) -> str:
        """Node and rank, for a message."""
        return f"node {self._node}, rank {self._rank}"

    @property
    def is_local_main(self) -> bool:
        return self.local_rank == 0

    @property
    def buckets_at_peak(self) -> float:
        """Largest memory of a rank, in buckets, while the sync has one under way, gathers one and copies one.

        The last two are whole on the local main process. Of the first two it has the pieces of all ranks with its
        local rank, which are the whole bucket with one rank per node, and its own, from which the all-gather sends.
        gloo gathers both into another copy; NCCL takes nothing. PyTorch copies pieces that do not follow each other
        from a GPU to host memory by way of another copy on the GPU (read in its `Copy.cu`).
        """
        under_way = 2 / self.world if self._nodes > 1 else 0.0
        if self._nodes > 1 and dist.get_backend() == "gloo":
            under_way += 2 / self.ranks
        temporary = 1.0 if self.buffers.device.type == "cuda" and self.world > 1 else 0.0
        return under_way + temporary + (2 + 2 / self.ranks if self.ranks > 1 else 3)

    def extremes(self, value: int) -> tuple[int, int]:
        """Return the lowest and the highest `value` of all training ranks. A collective, for the set-up only."""
        both = torch.tensor([-value, value], device=self.buffers.device)
        if self.world > 1:
            dist.all_reduce(both, dist.ReduceOp.MAX)
        return -int(both[0]), int(both[1])

    def cross(self, mine: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the buffers of the ranks with this local rank, `(nodes, size)`, and the work to wait for, if any."""
        if self._across is None:
            return mine.view(1, -1), None
        self.across += 1
        peers = self.buffers.take("peers", self._nodes * mine.numel())
        return peers.view(self._nodes, -1), dist.all_gather_into_tensor(
            peers, mine, self._across, async_op=True
        )

    def collect(self, peers: torch.Tensor, holder: int) -> torch.Tensor | None:
        """Return the buffers of all ranks, `(nodes, ranks of a node, size)`, on local rank `holder`; `None` elsewhere.

        It uses sends and receives, because gloo's gather makes an extra copy of all data.
        """
        if self._within is None:
            return peers.unsqueeze(1)
        self.within += 1
        first = self._node * self.ranks
        if self.local_rank != holder:
            _exchange([dist.P2POp(dist.isend, peers, first + holder, self._within)])
            return None
        every = self.buffers.take("every", self.ranks * peers.numel()).view(
            self.ranks, *peers.shape
        )
        _exchange(
            [
                dist.P2POp(dist.irecv, every[i], first + i, self._within)
                for i in range(self.ranks)
                if i != holder
            ]
        )
        every[holder].copy_(peers)
        return every.transpose(0, 1)

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


def _exchange(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait()


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
        # each shard with the dtype and the cut in which it is sent, and its bytes in a rank's buffer
        self._parts: list[tuple[Shard, torch.dtype, Cut, slice]] = []
        size = 0
        for shard, dtype in zip(shards, dtypes, strict=True):
            cut = shard.cut(gather.world).for_sending(dtype.itemsize)
            end = size + cut.elements * dtype.itemsize
            self._parts.append((shard, dtype, cut, slice(size, end)))
            size = -(-end // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
        self._mine = gather.buffers.take("mine", max(size, PIECE_ALIGNMENT))
        self._pack()
        self._peers, self._work = gather.cross(self._mine)
        self._taken = {"mine": self._mine}
        if self._work is not None:
            self._taken["peers"] = self._peers

    def _pack(self) -> None:
        """Copy this rank's pieces into its buffer. A collective if a tensor's pieces become even ones."""
        gather = self._gather
        for shard, dtype, cut, where in self._parts:
            part = self._mine[where].view(dtype)
            old = shard.cut(gather.world)
            moved = shard.passed_on
            if moved is None and cut != old:
                moved = old, cut.whole()
            if moved is None:
                part[: shard.data.numel()].copy_(shard.data)
            else:
                pass_on(shard.data, *moved, part)
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
        if self._gather.ranks > 1:
            self.close()  # `collect` has copied these buffers or sent them on
        if every is None:
            empty = self._mine.new_empty(0, 0, 0)
            return [Pieces(empty, shard.shape) for shard, *_ in self._parts]
        if self._gather.ranks > 1:
            self._taken["every"] = every
        return [
            Pieces(_view(every[..., where], dtype), shard.shape)
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
