"""This rank's piece of a sharded tensor, whether ZeRO-3 or FSDP2 cuts it. No collective."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..wire.messages import TensorRange
from .even_pieces import all_of, evened


@dataclass(frozen=True)
class Shard:
    """One rank's piece of a flattened tensor. The pieces of all ranks, in rank order, form the padded tensor."""

    data: torch.Tensor  # (elements,) or fewer: the last ranks' pieces may be short or empty
    shape: tuple[int, ...]  # shape of the full tensor
    cut: TensorRange  # all of the tensor, in pieces of which `data` is one
    part: TensorRange | None = None  # range of the tensor to send; `None`: all of it

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """Shape of what is sent: that of the full tensor, or the length of the range."""
        return self.shape if self.part is None else (self.part.count(self.numel),)

    def sent_as(self, itemsize: int) -> TensorRange:
        """Return the pieces in which it is sent. If they are not those of `cut`, the ranks pass elements on."""
        return self.part or evened(self.cut, self.numel, itemsize)


def shard_of(tensor: torch.Tensor) -> Shard | None:
    """Return this rank's piece if all ranks hold equal pieces of the tensor in rank order, otherwise `None`.

    ZeRO-3 (also with parameters offloaded to host memory) and FSDP2 shard this way. Frozen weights that ZeRO++ stores
    quantized, MiCS, hybrid sharding, experts on a mesh of their own, tensor parallelism and parameters offloaded to
    NVMe do not.
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
    piece, world = tensor.ds_tensor, dist.get_world_size()
    equal = piece.ds_numel == math.ceil(tensor.ds_numel / world)
    in_memory = getattr(piece.final_location, "name", None) != "nvme"
    if not equal or not in_memory or is_quantized(tensor):
        return None
    return Shard(piece.detach().view(-1), tuple(tensor.ds_shape), all_of(world, piece.ds_numel))


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
        tuple(tensor.shape),
        all_of(mesh.size(), rows * math.prod(tensor.shape[1:])),
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
        mine = tensor.ds_numel - dist.get_rank() * shard.cut.elements
        return shard.data[: max(0, mine)]
    if hasattr(tensor, "to_local"):
        return tensor.detach().to_local()
    return tensor.detach() if sends_whole else torch.empty(0)


def has_own_part(tensor: Any) -> bool:
    """Return whether `own_part` can tell which part of a tensor this rank answers for."""
    return not hasattr(tensor, "ds_tensor") or shard_of(tensor) is not None
