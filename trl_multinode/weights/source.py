"""Content of a weight sync: the tensors, their buckets, and the gathering of a bucket from the trainer's shards.

Gathering is one of the few collectives; `tests/test_architecture.py` lists them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import nn

from ..transports.base import check_shape
from ..transports.pieces import Pieces, joined
from .buckets import Bucket, WeightMeta, plan_buckets
from .finite import Weight, check_finite
from .gathering import Gathering, ShardGather
from .names import NamedWeight, is_zero3, named_weights, shape_of
from .shards import Shard, is_quantized, shard_of
from .tying import Owner, check_still_tied, tied_weights

Finish = Callable[[], Sequence[Pieces]]
# tensors that DeepSpeed or FSDP2 has gathered whole, while their ranges are sent
Held = dict[str, torch.Tensor]


class WeightSource(ABC):
    """Source of the weights that a sync sends.

    A tensor above the limit of a bucket is gathered in ranges if its metadata say that it is divisible.

    ```python
    source.check(source.metadata(), step, frozen=True)      # raises on the rank that has a NaN
    for bucket in source.buckets(limit):                    # the same list on every rank, no collective
        with source.gathering(bucket) as finish:            # starts the gathering on all ranks
            tensors = finish()                              # a collective; whole tensors on local main processes
    source.release()
    ```

    Every training rank calls it for the same buckets in the same order, on the default stream. Buckets may overlap: at
    most three contexts may be open, one starting, two gathering or in use. Exit them in order of entry.

    Args:
        gather (`ShardGather`, *optional*):
            `ShardGather` of this rank. Default: one for a world of one rank.

    Attributes:
        buckets_at_peak (`float`):
            Memory that a sync takes on a rank, in buckets.
    """

    def __init__(self, gather: ShardGather | None = None):
        self.gather = gather or ShardGather(torch.device("cpu"))
        self.buckets_at_peak = self.gather.buckets_at_peak

    def buckets(self, limit_bytes: int) -> list[Bucket]:
        """Plan buckets of which a sync holds at most three times `limit_bytes` in the memory of any rank.

        With NCCL, buckets are smaller than the limit by a tenth with seven ranks per node, by a third with two, and by
        up to 40 % with one.
        """
        limit_bytes = int(limit_bytes * min(1.0, 3.0 / self.buckets_at_peak))
        return plan_buckets(self.metadata(), limit_bytes, self.gather.world)

    @abstractmethod
    def metadata(self) -> list[WeightMeta]: ...

    @abstractmethod
    def check(self, weights: Sequence[WeightMeta], step: int, frozen: bool) -> None:
        """Check this rank's own part of `weights`, before a sync sends them. Not a collective.

        Args:
            weights (`Sequence[WeightMeta]`):
                Weights that the sync sends.
            step (`int`):
                Optimizer step, for the message.
            frozen (`bool`):
                `True` to check the parameters that are not trained, too.

        Raises:
            `WeightsNotFiniteError`: if a weight is NaN or infinite.
        """

    @abstractmethod
    def gathering(self, bucket: Bucket, holder: int = 0) -> AbstractContextManager[Finish]:
        """Gather the tensors or ranges of `bucket`, in its order. Only local rank `holder` of a node may read them."""

    def release(self) -> None:
        """Free the memory that buckets reuse, at the end of a sync."""
        self.gather.release()


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

    # names of the tensors that `as_sent` changes: they are gathered in the trainer's dtype
    _changed: Container[str] = ()

    def __init__(self, model: nn.Module, dtype: torch.dtype, gather: ShardGather | None = None):
        super().__init__(gather)
        self._held: Held = {}
        self._module = model
        self._tied = tied_weights(model)
        self._owners: dict[str, Owner] = {}
        self._metadata: list[WeightMeta] = []
        for weight in self.weights():
            name, tensor = weight.name, weight.tensor
            self._owners[name] = weight.owner
            casts = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
            self._metadata.append(
                WeightMeta(
                    name,
                    dtype if casts else tensor.dtype,
                    shape_of(tensor),
                    divisible=name not in self._changed,  # `as_sent` changes whole tensors
                    parts=weight.parts,
                )
            )

    def weights(self) -> Iterator[NamedWeight]:
        """Yield each tensor to send, as it is now."""
        return named_weights(self._module)

    def metadata(self) -> list[WeightMeta]:
        return self._metadata

    def check(self, weights: Sequence[WeightMeta], step: int, frozen: bool) -> None:
        check_still_tied(self._tied, self._module)
        bucket = tuple(weights)
        pairs = zip(bucket, self.tensors(bucket), strict=True)
        read: list[Weight] = [(meta.name, tensor, meta.dtype) for meta, tensor in pairs]
        read += [(name, parameter, parameter.dtype) for name, parameter in self.added(bucket)]
        check_finite(
            [entry for entry in read if frozen or changes(entry[1])],
            self.gather.place,
            step,
            sends_whole=self.gather.is_local_main,
        )

    def tensors(self, bucket: Bucket) -> list[torch.Tensor]:
        """Return the bucket's tensors as the model holds them now, sharded or not."""
        owners = [self._owners[meta.name] for meta in bucket]
        return [getattr(module, attribute) for module, attribute in owners]

    def release(self) -> None:
        super().release()
        self._held.clear()

    def as_sent(self, name: str, pieces: Pieces) -> Pieces:
        """Return what is sent of a gathered tensor. A collective under FSDP2 if the source adds other tensors."""
        return pieces

    def added(self, bucket: Bucket) -> list[tuple[str, nn.Parameter]]:
        """Return the names of further parameters that `as_sent` needs whole, and the parameters."""
        return []

    @contextmanager
    def gathering(self, bucket: Bucket, holder: int = 0) -> Iterator[Finish]:
        tensors = self.tensors(bucket)
        shards = shards_of(bucket, tensors)

        @torch.no_grad()
        def finish() -> list[Pieces]:
            together: dict[int, Pieces] = {}
            if under_way is not None:
                together = dict(zip(shards, under_way.wait(), strict=True))
            found = []
            for index, (meta, tensor) in enumerate(zip(bucket, tensors, strict=True)):
                pieces = together.get(index) or self._whole_or_range(meta, tensor, holder)
                found.append(self.as_sent(meta.name, pieces))
            return found

        # `no_grad` must not span the yield: the contexts of two buckets overlap, so gradients would stay off
        under_way: Gathering | None = None
        with torch.no_grad():
            if shards:
                dtypes = [
                    tensors[index].dtype
                    if bucket[index].name in self._changed
                    else bucket[index].dtype
                    for index in shards
                ]
                under_way = Gathering(self.gather, list(shards.values()), dtypes, holder)
        with self._gathered_by_deepspeed(bucket, tensors, shards):
            yield finish
        if under_way is not None:
            under_way.close()

    def _gathered_by_deepspeed(
        self, bucket: Bucket, tensors: Sequence[torch.Tensor], shards: Mapping[int, Shard]
    ) -> AbstractContextManager:
        """Gather the ZeRO-3 parameters that are no `shards`: DeepSpeed gathers each one, whole on every rank.

        A parameter that is sent in ranges is gathered with the first of them.
        """
        needed = []
        for index, meta in enumerate(bucket):
            if index not in shards and (meta.range is None or meta.range.is_first):
                needed.append(tensors[index])
        needed += [parameter for _, parameter in self.added(bucket)]
        sharded = [tensor for tensor in needed if is_zero3(tensor)]
        # quantized values and scales take a collective each
        self.gather.across += sum(1 + is_quantized(tensor) for tensor in sharded)
        if not sharded:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(sharded)

    def _whole_or_range(self, meta: WeightMeta, tensor: torch.Tensor, holder: int) -> Pieces:
        """Return what is sent of a tensor that this class does not gather itself. A collective under FSDP2.

        Every rank has the tensor whole until its last range, because the holders of its ranges may be all ranks.
        """
        if meta.range is None or meta.range.is_first:
            self.gather.across += hasattr(tensor, "full_tensor")
        if meta.range is None:
            return Pieces.whole(full(tensor))
        if meta.range.is_first:
            whole = full(tensor)
            if is_zero3(tensor):  # DeepSpeed frees its copy before the next range is read
                whole = whole.clone()
            self._held[meta.name] = whole.reshape(-1)
        flat = self._held[meta.name]
        if meta.range.is_last:
            del self._held[meta.name]
        if self.gather.local_rank != holder:
            return Pieces.whole(torch.empty(0))
        parts = [flat[first:end] for first, end in meta.range.intervals(flat.numel())]
        return Pieces.whole(joined(parts, meta.dtype, flat.device))


def shards_of(bucket: Bucket, tensors: Sequence[torch.Tensor]) -> dict[int, Shard]:
    """Return this rank's part of each sharded tensor or range of a bucket, by its index.

    Raises:
        `WeightSyncError`: if a tensor that is sent in ranges has another shape than when the trainer was built.
    """
    shards = {}
    for index, (meta, tensor) in enumerate(zip(bucket, tensors, strict=True)):
        if meta.range is not None:
            check_shape(meta.name, shape_of(tensor), meta.shape)
        if (shard := shard_of(tensor)) is not None:
            shards[index] = replace(shard, part=meta.range)
    return shards


def keep_head_during_backward(model: nn.Module) -> None:
    """Let ZeRO-3 gather an untied head for the whole backward of the model that uses it.

    TRL 1.16 reads `lm_head.weight` without calling the head, and gathers it for the forward only; with a sharded,
    untied head its backward then fails ("size of tensor a (0) must match"). This function registers the head's
    parameters as external parameters of the model, so that DeepSpeed gathers them with it. A no-op without ZeRO-3.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for parameter in head.parameters(recurse=False) if head else ():
        if is_zero3(parameter):
            import deepspeed

            deepspeed.zero.register_external_parameter(model, parameter)


def changes(tensor: torch.Tensor) -> bool:
    """Return whether training may change the tensor: a buffer, or a parameter that is not frozen."""
    return tensor.requires_grad or not isinstance(tensor, nn.Parameter)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Gather an FSDP2 shard (a collective) and return it whole; return any other tensor unchanged."""
    data = tensor.detach()
    return data.full_tensor() if hasattr(data, "full_tensor") else data
