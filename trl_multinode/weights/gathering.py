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
        world: int = dist.get_world_size() if distributed else 1
        rank: int = dist.get_rank() if distributed else 0
        self.ranks = min(ranks_per_node, world)
        self._nodes = world // self.ranks
        self._node, self.local_rank = divmod(rank, self.ranks)
        peers = [list(range(local, world, self.ranks)) for local in range(self.ranks)]
        nodes = [
            list(range(node * self.ranks, (node + 1) * self.ranks)) for node in range(self._nodes)
        ]
        self._across = _own_group(peers, self.local_rank) if self._nodes > 1 else None
        self._within = _own_group(nodes, self._node) if self.ranks > 1 else None

    @property
    def place(self) -> str:
        """Node and rank, for a message."""
        return f"node {self._node}, rank {self._node * self.ranks + self.local_rank}"

    @property
    def within_nodes(self) -> bool:
        """Whether a bucket crosses the memory of a node, because several ranks train on it."""
        return self._within is not None

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

    @property
    def world(self) -> int:
        return self._nodes * self.ranks

    def cut(self, shard: Shard, dtype: torch.dtype) -> Cut:
        """Return the cut in which a tensor is gathered: that of the shards, or an even one."""
        return shard.cut(self.world).for_sending(dtype.itemsize)

    def extremes(self, value: int) -> tuple[int, int]:
        """Return the lowest and the highest `value` of all training ranks. A collective, for the set-up only."""
        both = torch.tensor([-value, value], device=self.buffers.device)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(both, dist.ReduceOp.MAX)
        return -int(both[0]), int(both[1])

    def pack(
        self,
        shards: Sequence[Shard],
        dtypes: Sequence[torch.dtype],
        cuts: Sequence[Cut],
        offsets: list[int],
        size: int,
    ) -> torch.Tensor:
        """Copy this rank's pieces into one buffer, `(size,)` of `uint8`, and return it.

        A collective of all training ranks if a tensor's pieces become even ones.
        """
        mine = self.buffers.take("mine", size)
        for shard, dtype, cut, offset in zip(shards, dtypes, cuts, offsets, strict=True):
            old = shard.cut(self.world)
            moved = shard.passed_on
            if moved is None and cut != old:
                moved = old, cut.whole()
            elements = shard.data.numel() if moved is None else cut.elements
            part = mine[offset : offset + elements * dtype.itemsize].view(dtype)
            if moved is None:
                part.copy_(shard.data)
            else:
                pass_on(shard.data, *moved, part)
                self.count(self._nodes > 1)
        return mine

    def count(self, crosses_nodes: bool) -> None:
        """Count a collective."""
        if crosses_nodes:
            self.across += 1
        else:
            self.within += 1

    def cross(self, mine: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the buffers of the ranks with this local rank, `(nodes, size)`, and the work to wait for, if any."""
        if self._across is None:
            return mine.view(1, -1), None
        self.count(crosses_nodes=True)
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
        self.count(crosses_nodes=False)
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
        self._shards = shards
        self._dtypes = dtypes
        self._cuts = [gather.cut(shard, dtype) for shard, dtype in zip(shards, dtypes, strict=True)]
        self._offsets, size = _layout(self._cuts, dtypes)
        self._mine = gather.pack(shards, dtypes, self._cuts, self._offsets, size)
        self._peers, self._work = gather.cross(self._mine)
        self._taken = (
            [("mine", self._mine)]
            if self._work is None
            else [("mine", self._mine), ("peers", self._peers)]
        )

    def wait(self) -> list[Pieces]:
        """Return the bucket's tensors: with data on the holder in every node, empty on the other ranks."""
        if self._work is not None:
            self._work.wait()
            self._gather.buffers.give_back(*self._taken.pop(0))  # "mine" is in "peers" now
        every = self._gather.collect(self._peers, self._holder)
        if self._gather.within_nodes:
            self.close()  # `collect` has copied these buffers or sent them on
            self._taken = [("every", every)] if every is not None else []
        if every is None:
            return [Pieces(self._mine.new_empty(0, 0, 0), shard.shape) for shard in self._shards]
        found = []
        for shard, dtype, cut, offset in zip(
            self._shards, self._dtypes, self._cuts, self._offsets, strict=True
        ):
            end = offset + cut.elements * dtype.itemsize
            found.append(Pieces(_view(every[..., offset:end], dtype), shard.shape))
        return found

    def close(self) -> None:
        """Free the memory of the pieces for another bucket; the caller must not read them afterwards."""
        while self._taken:
            self._gather.buffers.give_back(*self._taken.pop())


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


def _own_group(groups: list[list[int]], index: int) -> dist.ProcessGroup | None:
    """Create every group, in the same order on every rank as `new_group` requires, and return this rank's."""
    return [dist.new_group(ranks) for ranks in groups][index]


def _layout(cuts: Sequence[Cut], dtypes: Sequence[torch.dtype]) -> tuple[list[int], int]:
    """Return the offset of each tensor's piece in a rank's buffer, and the buffer's size, in bytes."""
    offsets = []
    total = 0
    for cut, dtype in zip(cuts, dtypes, strict=True):
        offsets.append(total)
        total += -(-cut.elements * dtype.itemsize // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
    return offsets, max(total, PIECE_ALIGNMENT)


def _view(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View `data` as `dtype`; replace an empty tensor, because torch may refuse to view it."""
    return (
        data.view(dtype)
        if data.numel()
        else torch.empty(data.shape, dtype=dtype, device=data.device)
    )
