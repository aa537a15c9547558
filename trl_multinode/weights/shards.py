"""Shards of a bucket to whole tensors on the local main process of every node: one collective across nodes a bucket.

DeepSpeed's `GatheredParameters(list)` launches an all-gather per parameter and materializes the bucket on every rank;
`DTensor.full_tensor()` does the same. Here a rank packs its pieces of all tensors of a bucket into one buffer, in the
dtype that travels, and the buffers meet in two steps:

1. ranks with the same local rank all-gather across nodes: a node receives every other node's pieces once, `(N-1)/N` of
   the bucket, where an all-gather of the world brings it `(W-1)/W`;
2. inside each node the local main process collects the rest through the node's own memory, while the next bucket is on
   the network already.

`ShardGather` makes collectives; `tests/test_architecture.py` lists who else does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

PIECE_ALIGNMENT = 16  # bytes between tensors in a packed buffer: a multiple of every dtype's size


@dataclass(frozen=True)
class Shard:
    """One rank's piece of a flattened tensor. Pieces of all ranks in rank order are the tensor, the end padded."""

    data: torch.Tensor  # (elements,) or fewer: the last ranks' pieces may be short or empty
    elements: int  # of every rank's piece, padding included
    shape: tuple[int, ...]  # of the full tensor


@dataclass(frozen=True)
class Pieces:
    """A gathered tensor as its ranks' pieces; where nothing was sharded, as one."""

    data: torch.Tensor  # (nodes, ranks of a node, elements); empty on ranks that are not local main processes
    shape: tuple[int, ...]  # of the full tensor

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> "Pieces":
        return cls(tensor.detach().reshape(1, 1, -1), tuple(tensor.shape))

    def copy_to(self, target: torch.Tensor) -> None:
        """
        Write the tensor's elements into `target`, flat and contiguous, which leaves the padding out; casts.

        Copies from a GPU are queued on the current stream, so that hundreds of small ones do not wait for each other
        (10 us each); the caller synchronizes before it reads `target` on the host.
        """
        nodes, ranks, elements = self.data.shape
        if nodes * ranks == 1 or target.numel() == 0:
            target.copy_(self.data.reshape(-1)[: target.numel()], non_blocking=True)
            return
        full_nodes = target.numel() // (ranks * elements)
        if full_nodes:
            done = full_nodes * ranks * elements
            whole = target[:done].view(full_nodes, ranks, elements)
            whole.copy_(self.data[:full_nodes], non_blocking=True)
        for piece in range(full_nodes * ranks, math.ceil(target.numel() / elements)):
            part = target[piece * elements : (piece + 1) * elements]
            part.copy_(self.data[piece // ranks, piece % ranks, : part.numel()], non_blocking=True)

    def full(self) -> torch.Tensor:
        """The tensor, on its device and in its dtype."""
        if self.data.shape[:2] == (1, 1):
            return self.data.view(self.shape)
        tensor = torch.empty(math.prod(self.shape), dtype=self.data.dtype, device=self.data.device)
        self.copy_to(tensor)
        return tensor.view(self.shape)


def shard_of(tensor: torch.Tensor) -> Shard | None:
    """This rank's piece, if all ranks hold equal pieces of the tensor in rank order; otherwise `None`.

    True for ZeRO-3 (also with parameters offloaded to host memory) and for FSDP2. Not for ZeRO++ (pieces are shared
    within smaller groups or quantized), hybrid sharding, tensor parallelism, and parameters that lie on an NVMe.
    """
    if hasattr(tensor, "ds_tensor"):
        return _zero3_shard(tensor)
    if hasattr(tensor, "placements"):
        return _fsdp2_shard(tensor)
    return None


def _zero3_shard(tensor) -> Shard | None:
    piece = tensor.ds_tensor
    equal = piece.ds_numel == math.ceil(tensor.ds_numel / dist.get_world_size())
    plain = getattr(tensor, "ds_secondary_tensor", None) is None and not hasattr(piece, "ds_quant_scale")
    in_memory = getattr(piece.final_location, "name", None) != "nvme"
    if not (equal and plain and in_memory):
        return None
    return Shard(piece.detach().view(-1), piece.ds_numel, tuple(tensor.ds_shape))


def _fsdp2_shard(tensor) -> Shard | None:
    mesh, placements = tensor.device_mesh, tensor.placements
    if mesh.ndim != 1 or mesh.size() != dist.get_world_size() or not placements[0].is_shard(0):
        return None
    rows = math.ceil(tensor.shape[0] / mesh.size())  # torch.chunk gives every rank so many, the last ones fewer
    return Shard(tensor.to_local().detach().reshape(-1), rows * math.prod(tensor.shape[1:]), tuple(tensor.shape))


class ShardGather:
    """The two process groups of this rank. Built by all training ranks at the same point.

    Args:
        ranks_per_node (`int`):
            Training ranks of every node.
        device (`torch.device`):
            What the process group's backend sends from; shards in host memory are copied there first.
    """

    def __init__(self, ranks_per_node: int, device: torch.device):
        self.buffers = Buffers(device)
        distributed = dist.is_available() and dist.is_initialized()
        world: int = dist.get_world_size() if distributed else 1
        rank: int = dist.get_rank() if distributed else 0
        self._ranks = min(ranks_per_node, world)
        self._nodes = world // self._ranks
        self._node, self._local_rank = divmod(rank, self._ranks)
        peers = [list(range(local, world, self._ranks)) for local in range(self._ranks)]
        nodes = [list(range(node * self._ranks, (node + 1) * self._ranks)) for node in range(self._nodes)]
        self._across = _own_group(peers, self._local_rank) if self._nodes > 1 else None
        self._within = _own_group(nodes, self._node) if self._ranks > 1 else None

    @property
    def num_collectives(self) -> tuple[int, int]:
        """Collectives of one `Gathering`: across nodes, within a node."""
        return int(self._nodes > 1), int(self._ranks > 1)

    def extremes(self, value: int) -> tuple[int, int]:
        """The lowest and the highest of all training ranks' numbers; a collective, for the set-up."""
        both = torch.tensor([-value, value], device=self.buffers.device)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(both, dist.ReduceOp.MAX)
        return -int(both[0]), int(both[1])

    def start(self, shards: Sequence[Shard], dtypes: Sequence[torch.dtype]) -> "Gathering":
        """Begin to gather a bucket; at most two may be under way. All training ranks, with shards of the same tensors.

        Args:
            shards (`Sequence[Shard]`):
                Of this rank.
            dtypes (`Sequence[torch.dtype]`):
                In which each tensor travels: a cast before the network, not after it.
        """
        return Gathering(self, shards, dtypes)

    def pack(self, shards: Sequence[Shard], dtypes: Sequence[torch.dtype], offsets: list[int], size: int):
        """This rank's buffer, `(size,)`."""
        mine = self.buffers.take("mine", size)
        for shard, dtype, offset in zip(shards, dtypes, offsets, strict=True):
            part = mine[offset : offset + shard.data.numel() * dtype.itemsize]
            part.view(dtype).copy_(shard.data)
        return mine

    def cross(self, mine: torch.Tensor):
        """Buffers of the ranks with this local rank, `(nodes, size)`, once the returned work is done."""
        if self._across is None:
            return mine.view(1, -1), None
        peers = self.buffers.take("peers", self._nodes * mine.numel())
        return peers.view(self._nodes, -1), dist.all_gather_into_tensor(peers, mine, self._across, async_op=True)

    def collect(self, peers: torch.Tensor) -> torch.Tensor | None:
        """Buffers of all ranks, `(nodes, ranks of a node, size)`, on the local main process.

        Sends and receives, because gloo's gather makes a copy of everything on the way.
        """
        if self._within is None:
            return peers.unsqueeze(1)
        first = self._node * self._ranks
        if self._local_rank > 0:
            _exchange([dist.P2POp(dist.isend, peers, first, self._within)])
            return None
        every = self.buffers.take("every", self._ranks * peers.numel()).view(self._ranks, *peers.shape)
        _exchange([dist.P2POp(dist.irecv, every[i], first + i, self._within) for i in range(1, self._ranks)])
        every[0].copy_(peers)
        return every.transpose(0, 1)


def _exchange(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations):
        work.wait()


class Gathering:
    """A bucket on its way to the local main processes. `wait` is a collective of all training ranks."""

    def __init__(self, gather: ShardGather, shards: Sequence[Shard], dtypes: Sequence[torch.dtype]):
        self._gather, self._shards, self._dtypes = gather, shards, dtypes
        self._offsets, size = _layout(shards, dtypes)
        self._mine = gather.pack(shards, dtypes, self._offsets, size)
        self._peers, self._work = gather.cross(self._mine)
        self._taken = [("mine", self._mine)] if self._work is None else [("mine", self._mine), ("peers", self._peers)]

    def wait(self) -> list[Pieces]:
        """With data on the local main process of every node, without on the others."""
        if self._work is not None:
            self._work.wait()
        every = self._gather.collect(self._peers)
        if self._gather.num_collectives[1]:
            self.close()  # what came across nodes was copied, or sent on
            self._taken = [("every", every)] if every is not None else []
        if every is None:
            return [Pieces(self._mine.new_empty(0, 0, 0), shard.shape) for shard in self._shards]
        return [
            Pieces(_view(every[..., offset : offset + shard.elements * dtype.itemsize], dtype), shard.shape)
            for shard, dtype, offset in zip(self._shards, self._dtypes, self._offsets, strict=True)
        ]

    def close(self) -> None:
        """The pieces are not read any more; their memory serves another bucket."""
        while self._taken:
            self._gather.buffers.give_back(*self._taken.pop())


class Buffers:
    """Memory that is used again from bucket to bucket: on a CPU fresh memory for each cost 12 buckets at the peak, by
    fragmentation, and a page fault per page.

    Args:
        device (`torch.device`):
            Where it is.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._spare: dict[str, list[torch.UntypedStorage]] = {}
        self._largest: dict[str, int] = {}

    def take(self, name: str, num_bytes: int) -> torch.Tensor:
        """`(num_bytes,)` of `uint8`, with whatever is in it."""
        self._largest[name] = max(num_bytes, self._largest.get(name, 0))
        while spare := self._spare.get(name):
            if (storage := spare.pop()).nbytes() >= num_bytes:
                return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)[:num_bytes]
        return torch.empty(self._largest[name], dtype=torch.uint8, device=self.device)[:num_bytes]

    def give_back(self, name: str, tensor: torch.Tensor) -> None:
        """`tensor` is, or is a view of, what was taken."""
        self._spare.setdefault(name, []).append(tensor.untyped_storage())

    def clear(self) -> None:
        self._spare.clear()


def _own_group(groups: list[list[int]], index: int):
    """Every rank makes every group, in the same order."""
    return [dist.new_group(ranks) for ranks in groups][index]


def _layout(shards: Sequence[Shard], dtypes: Sequence[torch.dtype]) -> tuple[list[int], int]:
    """Where each tensor's piece begins in a rank's buffer, and the buffer's size, in bytes."""
    offsets, total = [], 0
    for shard, dtype in zip(shards, dtypes, strict=True):
        offsets.append(total)
        total += -(-shard.elements * dtype.itemsize // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
    return offsets, max(total, PIECE_ALIGNMENT)


def _view(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """torch cannot view nothing as another dtype."""
    return data.view(dtype) if data.numel() else torch.empty(data.shape, dtype=dtype, device=data.device)
