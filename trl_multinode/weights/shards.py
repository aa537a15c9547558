"""This rank's piece of a sharded tensor, whether ZeRO-3 or FSDP2 cuts it. No collective."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..wire.messages import TensorRange
from .even_pieces import Cut


@dataclass(frozen=True)
class Shard:
    """One rank's piece of a flattened tensor. The pieces of all ranks, in rank order, form the padded tensor."""

    data: torch.Tensor  # (elements,) or fewer: the last ranks' pieces may be short or empty
    elements: int  # size of every rank's piece, padding included
    shape: tuple[int, ...]  # shape of the full tensor, or the length of a range
    passed_on: tuple[Cut, TensorRange] | None = (
        None  # of a range of a tensor whose pieces `data` are not those of it
    )

    def cut(self, world: int) -> Cut:
        """Return how the full tensor, or its range, is cut over `world` ranks."""
        return Cut(math.prod(self.shape), self.elements, world)

    def of_range(self, part: TensorRange) -> "Shard":
        """Return this rank's part of a range. If FSDP2 cuts the tensor otherwise, the ranks pass its rows on."""
        length = part.end - part.first
        whole = self.cut(part.pieces)
        shape = (part.count(whole.numel),)
        if self.elements == part.elements:
            return Shard(self.data[part.first : part.end], length, shape)
        return Shard(self.data, length, shape, passed_on=(whole, part))


def shard_of(tensor: torch.Tensor) -> Shard | None:
    """Return this rank's piece if all ranks hold equal pieces of the tensor in rank order, otherwise `None`.

    ZeRO-3 (also with parameters offloaded to host memory) and FSDP2 shard this way. Frozen weights that ZeRO++ stores
    quantized, MiCS, hybrid sharding, tensor parallelism and parameters offloaded to NVMe do not.
    """
    if hasattr(tensor, "ds_tensor"):
        return _zero3_shard(tensor)
    if hasattr(tensor, "placements"):
        return _fsdp2_shard(tensor)
    return None


def _zero3_shard(tensor: Any) -> Shard | None:
    """Return the primary shard of a ZeRO-3 parameter.

    The optimizer writes only to the primary shard. ZeRO++'s secondary one (`zero_hpz_partition_size`) is a copy for
    forward and backward, which DeepSpeed drops after every optimizer step and makes again in the next forward.
    """
    piece = tensor.ds_tensor
    equal = piece.ds_numel == math.ceil(tensor.ds_numel / dist.get_world_size())
    in_memory = getattr(piece.final_location, "name", None) != "nvme"
    if not equal or not in_memory or is_quantized(tensor):
        return None
    return Shard(piece.detach().view(-1), piece.ds_numel, tuple(tensor.ds_shape))


def is_quantized(tensor: Any) -> bool:
    """Return whether ZeRO++ stores a frozen ZeRO-3 parameter quantized (`zero_quantized_nontrainable_weights`)."""
    return hasattr(tensor.ds_tensor, "ds_quant_scale")


def _fsdp2_shard(tensor: Any) -> Shard | None:
    mesh = tensor.device_mesh
    placements = tensor.placements
    if mesh.ndim != 1 or mesh.size() != dist.get_world_size() or not placements[0].is_shard(0):
        return None
    # torch.chunk gives each rank this many, the last ranks fewer
    rows = math.ceil(tensor.shape[0] / mesh.size())
    return Shard(
        tensor.to_local().detach().reshape(-1),
        rows * math.prod(tensor.shape[1:]),
        tuple(tensor.shape),
    )


@torch.no_grad()
def own_part(tensor: Any, sends_whole: bool) -> torch.Tensor:
    """Return the part of a tensor that this rank answers for, without padding; it may be empty.

    ZeRO-3's padding is uninitialized memory. Quantized shards of ZeRO++, shards of MiCS and parameters on an NVMe are
    left out, because they are no floats, their padding is not known or they are not in memory.
    """
    if hasattr(tensor, "ds_tensor"):
        shard = shard_of(tensor)
        if shard is None:
            return torch.empty(0)
        mine = tensor.ds_numel - dist.get_rank() * shard.elements
        return shard.data[: max(0, mine)]
    if hasattr(tensor, "to_local"):
        return tensor.detach().to_local()
    return tensor.detach() if sends_whole else torch.empty(0)


def has_own_part(tensor: Any) -> bool:
    """Return whether `own_part` can tell which part of a tensor this rank answers for."""
    return not hasattr(tensor, "ds_tensor") or shard_of(tensor) is not None
