"""What a weight sync sends: which tensors, in which buckets, and how a bucket is gathered from the trainer's shards.

`gathered` is a collective, one of few: `tests/test_architecture.py` lists them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn

from .protocol import TensorSpec

ALIGNMENT = 64  # bytes: a cache line, and a multiple of every dtype's size, so that a slot can be viewed in place


@dataclass(frozen=True)
class WeightMeta:
    """One tensor to send, known without a collective."""

    name: str  # as in the checkpoint
    dtype: torch.dtype  # in which it travels: the engine's for parameters, its own for buffers
    shape: tuple[int, ...]  # full, unsharded
    frozen: bool = False  # does not change during the run: only the first update sends it

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


Bucket = tuple[WeightMeta, ...]


class WeightSource(ABC):
    """Where the weights come from.

    `metadata()` is the same list on every rank, frozen weights first, and needs no collective. `gathered(bucket)` is
    one: every training rank calls it for the same buckets in the same order, on the default stream, and blocks; inside
    the context the full tensors exist on this rank, and only there.
    """

    @abstractmethod
    def metadata(self) -> list[WeightMeta]: ...

    @abstractmethod
    def gathered(self, bucket: Bucket) -> AbstractContextManager[Sequence[torch.Tensor]]:
        """The full tensors of `bucket`, in its order, in the trainer's dtype."""


class ModuleSource(WeightSource):
    """Parameters and persistent buffers of a model under ZeRO-3, ZeRO-1/2, DDP, FSDP2 or no wrapper at all.

    Args:
        model (`nn.Module`):
            The unwrapped model.
        dtype (`torch.dtype`):
            The engine's dtype; floating-point parameters are cast to it. Buffers keep their own: routing biases and
            the like are float32 on purpose.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        self._tensors = dict(named_weights(model))
        self._metadata = [
            WeightMeta(name, dtype if isinstance(t, nn.Parameter) and t.is_floating_point() else t.dtype, shape_of(t))
            for name, t in self._tensors.items()
        ]

    def metadata(self) -> list[WeightMeta]:
        return self._metadata

    @contextmanager
    def gathered(self, bucket: Bucket) -> Iterator[Sequence[torch.Tensor]]:
        tensors = [self._tensors[meta.name] for meta in bucket]
        with torch.no_grad(), gather_zero3(tensors):
            yield [full(tensor) for tensor in tensors]


def gather_zero3(tensors: Sequence[torch.Tensor]) -> AbstractContextManager:
    """One coalesced all-gather for the ZeRO-3 shards in `tensors`; peak memory is twice their size on every rank."""
    sharded = [tensor for tensor in tensors if is_zero3(tensor)]
    if not sharded:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(sharded)


def is_zero3(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "ds_numel")


def keep_head_during_backward(model: nn.Module) -> None:
    """Let ZeRO-3 gather an untied head for the whole backward of the model that uses it.

    TRL 1.16 reads `lm_head.weight` without calling the head, and gathers it for the forward only; with a sharded,
    untied head its backward then fails ("size of tensor a (0) must match"). This is DeepSpeed's own way of saying that
    a module uses a parameter of another one. A no-op without ZeRO-3.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    sharded = [parameter for parameter in head.parameters(recurse=False) if is_zero3(parameter)] if head else []
    for parameter in sharded:
        import deepspeed

        deepspeed.zero.register_external_parameter(model, parameter)


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The full shape; a ZeRO-3 shard says `numel() == 0` and knows better in `ds_shape`."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def full(tensor: torch.Tensor) -> torch.Tensor:
    """An FSDP2 shard gathered (a collective); anything else as it is."""
    data = tensor.detach()
    return data.full_tensor() if hasattr(data, "full_tensor") else data


def named_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters (tied ones once) and persistent buffers, under checkpoint names."""
    for name, parameter in model.named_parameters():
        yield checkpoint_name(name), parameter
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield checkpoint_name(f"{prefix}.{name}" if prefix else name), buffer


def checkpoint_name(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "")


# ---- buckets --------------------------------------------------------------------------------------------------------


def layer_key(name: str) -> str:
    """Everything up to the outermost layer index: `model.layers.3`; outside the layers the empty string."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ""


def plan_buckets(metadata: Sequence[WeightMeta], limit_bytes: int) -> list[Bucket]:
    """Cut the model into buckets of whole layers, small ones merged, at most `limit_bytes` each.

    A layer above the limit is split between tensors; a tensor above it is a bucket of its own; frozen weights share
    none with others. The order is that of `metadata`, so every rank makes the same plan.
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


def place(bucket: Bucket) -> tuple[TensorSpec, ...]:
    """Where each tensor of a bucket lies in its slot."""
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
    """Size of a slot that every bucket fits in."""
    return max(_padded_bytes(bucket) for bucket in buckets)
