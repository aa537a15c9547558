"""Content of a weight sync: the tensors, their buckets, and the gathering of a bucket from the trainer's shards.

Gathering is one of the few collectives; `tests/test_architecture.py` lists them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn

from ..engine.protocol import TensorSpec
from .shards import Pieces, ShardGather, shard_of

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


Finish = Callable[[], Sequence[Pieces]]


class WeightSource(ABC):
    """Source of the weights that a sync sends.

    ```python
    for bucket in plan_buckets(source.metadata(), limit):   # metadata: the same list on every rank, no collective
        with source.gathering(bucket) as finish:            # starts the gathering on all ranks
            tensors = finish()                              # a collective; whole tensors on local main processes
    source.release()
    ```

    Every training rank calls it for the same buckets in the same order, on the default stream. Buckets may overlap: at
    most three contexts may be open, one starting, two gathering or in use. Exit them in order of entry.
    """

    @abstractmethod
    def metadata(self) -> list[WeightMeta]: ...

    @abstractmethod
    def gathering(self, bucket: Bucket) -> AbstractContextManager[Finish]:
        """Gather the tensors of `bucket`, in its order. Only local main processes may read them."""

    @abstractmethod
    def collectives(self, bucket: Bucket) -> tuple[int, int]:
        """Return how many collectives gathering `bucket` takes: across nodes, within a node. It makes none itself."""

    @abstractmethod
    def release(self) -> None:
        """Free the memory that buckets reuse, at the end of a sync."""


class ModuleSource(WeightSource):
    """Parameters and persistent buffers of a model under ZeRO-3, ZeRO-1/2, DDP, FSDP2 or no wrapper at all.

    Every sync looks the tensors up in their modules, because FSDP2 replaces them when training begins.

    Args:
        model (`nn.Module`):
            Unwrapped model.
        dtype (`torch.dtype`):
            Dtype of the engine, in which floating-point parameters are sent. Buffers keep their own dtype, because
            some, such as routing biases, are float32 on purpose.
        gather (`ShardGather`, *optional*):
            `ShardGather` of this rank. Default: one for a world of one rank.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, gather: ShardGather | None = None):
        self._gather = gather or ShardGather(1, torch.device("cpu"))
        self._places = {name: place for name, place, _ in named_weights(model)}
        self._metadata = [
            WeightMeta(name, dtype if isinstance(t, nn.Parameter) and t.is_floating_point() else t.dtype, shape_of(t))
            for name, _, t in named_weights(model)
        ]

    def metadata(self) -> list[WeightMeta]:
        return self._metadata

    def tensors(self, bucket: Bucket) -> list[torch.Tensor]:
        """Return the bucket's tensors as the model holds them now, sharded or not."""
        places = [self._places[meta.name] for meta in bucket]
        return [getattr(module, attribute) for module, attribute in places]

    @contextmanager
    def gathering(self, bucket: Bucket) -> Iterator[Finish]:
        dtypes = [meta.dtype for meta in bucket]
        with gather_pieces(self._gather, self.tensors(bucket), dtypes) as finish:
            yield finish

    def collectives(self, bucket: Bucket) -> tuple[int, int]:
        return count_collectives(self._gather, self.tensors(bucket))

    def release(self) -> None:
        self._gather.buffers.clear()


@contextmanager
def gather_pieces(
    gather: ShardGather, tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
) -> Iterator[Finish]:
    """Gather the sharded tensors; the yielded function returns all tensors whole. A collective of all training ranks.

    Args:
        gather (`ShardGather`):
            `ShardGather` of this rank.
        tensors (`Sequence[torch.Tensor]`):
            Parameters and buffers of any kind.
        dtypes (`Sequence[torch.dtype]`):
            Dtype to gather each tensor in.
    """
    shards = {index: shard for index, tensor in enumerate(tensors) if (shard := shard_of(tensor)) is not None}
    others = [tensor for index, tensor in enumerate(tensors) if index not in shards]

    @torch.no_grad()
    def finish() -> list[Pieces]:
        together = dict(zip(shards, under_way.wait(), strict=True)) if under_way else {}
        return [together.get(index) or Pieces.whole(full(tensor)) for index, tensor in enumerate(tensors)]

    # `no_grad` must not span the yield: contexts of two buckets overlap, so the second exit would restore "off"
    with torch.no_grad():
        under_way = gather.start(list(shards.values()), [dtypes[i] for i in shards]) if shards else None
    with gather_zero3(others):
        yield finish
    if under_way is not None:
        under_way.close()


def count_collectives(gather: ShardGather, tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Count the collectives of one `gather_pieces`: across nodes, within a node."""
    kinds = [(shard_of(tensor) is not None, is_zero3(tensor) or hasattr(tensor, "full_tensor")) for tensor in tensors]
    across, within = gather.num_collectives if any(sharded for sharded, _ in kinds) else (0, 0)
    return across + sum(wrapped and not sharded for sharded, wrapped in kinds), within


def gather_zero3(tensors: Sequence[torch.Tensor]) -> AbstractContextManager:
    """Gather ZeRO-3 parameters through DeepSpeed: an all-gather per parameter, whole on every rank.

    `PeftSource` uses it for adapters, `gather_pieces` for shards for which `shard_of` returns `None`.
    """
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
    untied head its backward then fails ("size of tensor a (0) must match"). This function registers the head's
    parameters as external parameters of the model, so that DeepSpeed gathers them with it. A no-op without ZeRO-3.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    sharded = [parameter for parameter in head.parameters(recurse=False) if is_zero3(parameter)] if head else []
    for parameter in sharded:
        import deepspeed

        deepspeed.zero.register_external_parameter(model, parameter)


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the full shape; a ZeRO-3 shard has `numel() == 0`, and its full shape is `ds_shape`."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return an FSDP2 shard gathered (a collective), and any other tensor as it is."""
    data = tensor.detach()
    return data.full_tensor() if hasattr(data, "full_tensor") else data


def named_weights(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str], torch.Tensor]]:
    """Yield parameters (tied ones once) and persistent buffers: checkpoint name, (module, attribute), tensor."""
    modules = dict(model.named_modules())
    found = dict(model.named_parameters())
    for prefix, module in modules.items():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    names = checkpoint_names(model, found)
    for name, tensor in found.items():
        prefix, _, attribute = name.rpartition(".")
        yield names[name], (modules[prefix], attribute), tensor


def checkpoint_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """
    Map tensor names of `model` to their names in the checkpoint, which vLLM expects.

    transformers 5 renames tensors while it loads them (`language_model.model` -> `model.language_model`, no
    `vision_model` in CLIP and SigLIP) and records the renamings in the model. Fused experts stay fused, because vLLM
    loads them fused.
    """
    # Under ZeRO-3 transformers also records renamings that did not apply to this checkpoint
    conversions = [used for used in getattr(model, "_weight_conversions", None) or () if used.was_used()]
    renamings = [
        renaming.reverse_transform() for renaming in reversed(conversions) if not hasattr(renaming, "operations")
    ]
    found = {}
    for name in sorted(names):  # some renamings apply only after another name was seen, and rely on this order
        found[name] = without_wrappers(name)
        for renaming in renamings:
            found[name], _ = renaming.rename_source_key(found[name])
    return found


def without_wrappers(name: str) -> str:
    """Remove the name of the wrapper module that FSDP's activation checkpointing inserts."""
    return name.replace("_checkpoint_wrapped_module.", "")


# ---- buckets --------------------------------------------------------------------------------------------------------


def layer_key(name: str) -> str:
    """Return the name up to the outermost layer index (`model.layers.3`), outside the layers the empty string."""
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


def place(bucket: Bucket) -> tuple[TensorSpec, ...]:
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
