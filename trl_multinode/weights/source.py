"""What a weight sync sends: which tensors, in which buckets, and how a bucket is gathered from the trainer's shards.

Gathering is a collective, one of few: `tests/test_architecture.py` lists them.
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


Finish = Callable[[], Sequence[Pieces]]


class WeightSource(ABC):
    """Where the weights come from.

    ```python
    for bucket in plan_buckets(source.metadata(), limit):   # metadata: the same list on every rank, no collective
        with source.gathering(bucket) as finish:            # all ranks begin; the next bucket may begin before
            tensors = finish()                              # a collective; whole tensors on local main processes
    source.release()
    ```

    Every training rank calls it for the same buckets in the same order, on the default stream. At most two contexts
    whose `finish` was not called, or whose tensors are in use, may be open besides a third that is just beginning;
    they are left in the order in which they were entered.
    """

    @abstractmethod
    def metadata(self) -> list[WeightMeta]: ...

    @abstractmethod
    def gathering(self, bucket: Bucket) -> AbstractContextManager[Finish]:
        """The tensors of `bucket`, in its order; on ranks that are not local main processes nothing may be read."""

    @abstractmethod
    def collectives(self, bucket: Bucket) -> tuple[int, int]:
        """How many of them gathering `bucket` makes: across nodes, within a node. Not a collective itself."""

    @abstractmethod
    def release(self) -> None:
        """The sync is over: free what was kept from bucket to bucket."""


class ModuleSource(WeightSource):
    """Parameters and persistent buffers of a model under ZeRO-3, ZeRO-1/2, DDP, FSDP2 or no wrapper at all.

    Tensors are looked up in their modules at every sync: FSDP2 puts others in their place when training begins.

    Args:
        model (`nn.Module`):
            The unwrapped model.
        dtype (`torch.dtype`):
            The engine's dtype, in which floating-point parameters travel. Buffers keep their own: routing biases and
            the like are float32 on purpose.
        gather (`ShardGather`, *optional*):
            Of this rank; default: for a world of one.
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
        """As they lie in the model now, sharded or not."""
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
    """Whole tensors, gathered where they are sharded. A collective of all training ranks.

    Args:
        gather (`ShardGather`):
            Of this rank.
        tensors (`Sequence[torch.Tensor]`):
            Parameters and buffers of any kind.
        dtypes (`Sequence[torch.dtype]`):
            In which they travel.
    """
    shards = {index: shard for index, tensor in enumerate(tensors) if (shard := shard_of(tensor)) is not None}
    others = [tensor for index, tensor in enumerate(tensors) if index not in shards]

    @torch.no_grad()
    def finish() -> list[Pieces]:
        together = dict(zip(shards, under_way.wait(), strict=True)) if under_way else {}
        return [together.get(index) or Pieces.whole(full(tensor)) for index, tensor in enumerate(tensors)]

    # `no_grad` may not be held over the yield: contexts of two buckets overlap, and the second would restore "off"
    with torch.no_grad():
        under_way = gather.start(list(shards.values()), [dtypes[i] for i in shards]) if shards else None
    with gather_zero3(others):
        yield finish
    if under_way is not None:
        under_way.close()


def count_collectives(gather: ShardGather, tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Collectives of one `gather_pieces`: across nodes, within a node."""
    kinds = [(shard_of(tensor) is not None, is_zero3(tensor) or hasattr(tensor, "full_tensor")) for tensor in tensors]
    across, within = gather.num_collectives if any(sharded for sharded, _ in kinds) else (0, 0)
    return across + sum(wrapped and not sharded for sharded, wrapped in kinds), within


def gather_zero3(tensors: Sequence[torch.Tensor]) -> AbstractContextManager:
    """DeepSpeed's own way, for shards that are not `shard_of`'s: an all-gather per parameter, whole on every rank."""
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


def named_weights(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str], torch.Tensor]]:
    """Parameters (tied ones once) and persistent buffers: checkpoint name, where it lies, what lies there."""
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
    What the checkpoint calls the tensors of `model`, from which vLLM knows them.

    transformers 5 renames while it loads (`language_model.model` -> `model.language_model`, no `vision_model` in CLIP
    and SigLIP) and leaves in the model how. Fused experts stay fused: vLLM takes them so.
    """
    # Under ZeRO-3 it leaves there what did not apply to this checkpoint, too
    conversions = [used for used in getattr(model, "_weight_conversions", None) or () if used.was_used()]
    renamings = [
        renaming.reverse_transform() for renaming in reversed(conversions) if not hasattr(renaming, "operations")
    ]
    found = {}
    for name in sorted(names):  # a renaming may wait for another's name, and counts on this order
        found[name] = without_wrappers(name)
        for renaming in renamings:
            found[name], _ = renaming.rename_source_key(found[name])
    return found


def without_wrappers(name: str) -> str:
    """Activation checkpointing of FSDP puts a module between."""
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
