"""Metadata of the tensors to send, their division into buckets, and the layout of a bucket in its slot."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from ..wire.messages import TensorSpec

ALIGNMENT = 64  # bytes: a cache line, and a multiple of every dtype's size, so that tensors can be views of a slot


@dataclass(frozen=True)
class WeightMeta:
    """Metadata of one tensor to send, available without a collective."""

    name: str  # name in the checkpoint
    dtype: torch.dtype  # dtype in the slot: the engine's for floating-point parameters, otherwise the tensor's own
    shape: tuple[int, ...]  # full shape, unsharded
    frozen: bool = False  # constant during the run: sent by the first update, and after `send_everything`

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


Bucket = tuple[WeightMeta, ...]


def layer_key(name: str) -> str:
    """Return the name up to the outermost layer index (`model.layers.3`); an empty string outside the layers."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ""


def plan_buckets(metadata: Sequence[WeightMeta], limit_bytes: int) -> list[Bucket]:
    """Cut the model into buckets of one or more whole layers, at most `limit_bytes` each.

    A layer above the limit is split between tensors, and a tensor above it is a bucket of its own. No bucket mixes
    frozen weights with others. The order is that of `metadata`, so every rank makes the same plan.
    """
    buckets: list[list[WeightMeta]] = [[]]
    for (frozen, _), group in groupby(metadata, key=lambda meta: (meta.frozen, layer_key(meta.name))):
        layer = list(group)
        pieces = [layer] if _padded_bytes(layer) <= limit_bytes else [[meta] for meta in layer]
        for piece in pieces:
            last = buckets[-1]
            if last and (_padded_bytes(last + piece) > limit_bytes or last[0].frozen != frozen):
                buckets.append([])
            buckets[-1] += piece
    return [tuple(bucket) for bucket in buckets if bucket]


def slot_layout(bucket: Bucket) -> tuple[TensorSpec, ...]:
    """Return the spec of each tensor in a bucket, with its offset in the slot."""
    specs, offset = [], 0
    for meta in bucket:
        dtype = str(meta.dtype).removeprefix("torch.")
        specs.append(TensorSpec(meta.name, dtype, meta.shape, offset, meta.num_bytes))
        offset += _padded(meta.num_bytes)
    return tuple(specs)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _padded_bytes(bucket: Sequence[WeightMeta]) -> int:
    return sum(_padded(meta.num_bytes) for meta in bucket)


def slot_bytes(buckets: Sequence[Bucket]) -> int:
    """Return the size of a slot, in bytes, that fits every bucket."""
    return max(_padded_bytes(bucket) for bucket in buckets)
