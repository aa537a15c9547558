"""Metadata of the tensors to send, their division into buckets, and the layout of a bucket in its slot."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from ..wire.messages import Parts, TensorRange, TensorSpec

ALIGNMENT = 64  # bytes: a cache line, and a multiple of every dtype's size, so that tensors can be views of a slot
STEP = 32  # elements: a range of a piece begins at a multiple of it, so copies are of whole cache lines


@dataclass(frozen=True)
class WeightMeta:
    """Metadata of one tensor to send, or of a range of it, available without a collective."""

    name: str  # name in the checkpoint
    # dtype in the slot: the engine's for floating-point parameters, otherwise the tensor's own
    dtype: torch.dtype
    shape: tuple[int, ...]  # full shape, unsharded
    # constant during the run: sent by the first update, and after `send_everything`
    frozen: bool = False
    divisible: bool = False  # whether its source can gather it in ranges
    range: TensorRange | None = None  # `None`: the whole tensor
    parts: Parts | None = None  # of a fused tensor, which no checkpoint holds

    @property
    def num_bytes(self) -> int:
        numel = math.prod(self.shape)
        return self.dtype.itemsize * (numel if self.range is None else self.range.count(numel))


Bucket = tuple[WeightMeta, ...]


def layer_key(name: str) -> str:
    """Return the name up to the outermost layer index (`model.layers.3`); an empty string outside the layers."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ""


def plan_buckets(metadata: Sequence[WeightMeta], limit_bytes: int, world: int = 1) -> list[Bucket]:
    """Cut the model into buckets of one or more whole layers, at most `limit_bytes` each.

    A layer above the limit is split between tensors, and a tensor above it into ranges; one that is not divisible is a
    bucket of its own. No bucket mixes frozen weights with others. The order is that of `metadata`, so every rank makes
    the same plan.

    Args:
        metadata (`Sequence[WeightMeta]`):
            All tensors.
        limit_bytes (`int`):
            Largest size of a bucket, in bytes.
        world (`int`):
            Number of training ranks, which all contribute to each range of a sharded tensor.
    """
    buckets: list[list[WeightMeta]] = [[]]
    for (frozen, _), group in groupby(
        metadata, key=lambda meta: (meta.frozen, layer_key(meta.name))
    ):
        for piece in _pieces(list(group), limit_bytes, world):
            last = buckets[-1]
            if last and (_padded_bytes(last + piece) > limit_bytes or last[0].frozen != frozen):
                buckets.append([])
            buckets[-1] += piece
    return [tuple(bucket) for bucket in buckets if bucket]


def _pieces(layer: list[WeightMeta], limit_bytes: int, world: int) -> list[list[WeightMeta]]:
    """Return a layer whole if it is at most `limit_bytes`, else its tensors or their ranges, one by one."""
    if _padded_bytes(layer) <= limit_bytes:
        return [layer]
    return [[part] for meta in layer for part in cut_into_ranges(meta, limit_bytes, world)]


def cut_into_ranges(meta: WeightMeta, limit_bytes: int, world: int) -> list[WeightMeta]:
    """Cut a tensor into ranges of about equal size, at most `limit_bytes` each; a smaller one stays whole."""
    if meta.num_bytes <= limit_bytes or not meta.divisible:
        return [meta]
    elements = math.ceil(math.prod(meta.shape) / world)
    most = max(1, limit_bytes // (world * meta.dtype.itemsize))  # elements of a piece in a range
    num_ranges = math.ceil(elements / most)
    step = math.ceil(elements / num_ranges)
    if most >= STEP:
        step = min(most, math.ceil(step / STEP) * STEP)
    ranges = []
    for first in range(0, elements, step):
        end = min(first + step, elements)
        ranges.append(replace(meta, range=TensorRange(world, elements, first, end)))
    return ranges


def slot_layout(bucket: Bucket) -> tuple[TensorSpec, ...]:
    """Return the spec of each tensor or range in a bucket, with its offset in the slot."""
    specs = []
    offset = 0
    for meta in bucket:
        dtype = str(meta.dtype).removeprefix("torch.")
        size = meta.num_bytes
        specs.append(TensorSpec(meta.name, dtype, meta.shape, offset, size, meta.range, meta.parts))
        offset += _padded(size)
    return tuple(specs)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _padded_bytes(bucket: Sequence[WeightMeta]) -> int:
    return sum(_padded(meta.num_bytes) for meta in bucket)
