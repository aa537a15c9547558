"""A model with LoRA adapters as a weight source: merged bucket by bucket, never the whole model at once (TRL does)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .errors import ConfigurationError
from .shards import Pieces, ShardGather
from .weight_source import Bucket, Finish, ModuleSource, count_collectives, full, gather_pieces, gather_zero3, is_zero3


class PeftSource(ModuleSource):
    """Base weights with their active LoRA adapters added (LoRA and rsLoRA), under the names of the base model.

    The model itself is not touched: the sum is made on copies while a bucket is gathered. That the result is right is
    proven by the probe after the first sync, whose forward runs through the adapters.

    Args:
        model (`nn.Module`):
            The base model that PEFT put its layers into (`peft_model.get_base_model()`).
        dtype (`torch.dtype`):
            The engine's.
        gather (`ShardGather`, *optional*):
            Of this rank; default: for a world of one.

    Raises:
        `ConfigurationError`: for adapters that are not LoRA, and for DoRA.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, gather: ShardGather | None = None):
        from peft.tuners.lora import LoraLayer
        from peft.tuners.tuners_utils import BaseTunerLayer

        self._layers: dict[str, LoraLayer] = {}
        for name, module in model.named_modules():
            if isinstance(module, BaseTunerLayer):
                check_layer(name, module, LoraLayer)
                self._layers[f"{name}.weight"] = module
        super().__init__(model, dtype, gather)
        adapters = {name for name in self._places if is_adapter(name)}
        self._places = {base_name(name): place for name, place in self._places.items() if name not in adapters}
        self._metadata = [
            type(meta)(base_name(meta.name), meta.dtype, meta.shape)
            for meta in self._metadata
            if meta.name not in adapters
        ]

    @contextmanager
    def gathering(self, bucket: Bucket) -> Iterator[Finish]:
        tensors = self.tensors(bucket)
        dtypes = [tensor.dtype for tensor in tensors]  # the sum is made in the trainer's own, before any cast
        with gather_pieces(self._gather, tensors, dtypes) as finish, gather_zero3(self._adapters(bucket)):
            yield lambda: [self._merged(m.name, pieces) for m, pieces in zip(bucket, finish(), strict=True)]

    def collectives(self, bucket: Bucket) -> tuple[int, int]:
        across, within = count_collectives(self._gather, self.tensors(bucket))
        return across + sum(map(is_zero3, self._adapters(bucket))), within

    def _adapters(self, bucket: Bucket) -> list[nn.Parameter]:
        layers = [self._layers[meta.name] for meta in bucket if meta.name in self._layers]
        return [parameter for layer in layers for parameter in adapter_parameters(layer)]

    @torch.no_grad()
    def _merged(self, name: str, pieces: Pieces) -> Pieces:
        """With the layer's active adapters added, as PEFT would merge them, on a copy; FSDP2 makes it a collective."""
        layer = self._layers.get(name)
        if layer is None or layer.disable_adapters or layer.merged:
            return pieces
        deltas = [
            full(layer.get_delta_weight(adapter)) for adapter in layer.active_adapters if adapter in layer.scaling
        ]
        if pieces.data.numel() == 0:
            return pieces
        weight = pieces.full()
        for delta in deltas:
            weight = weight + delta.to(weight.dtype)
        return Pieces.whole(weight)


def check_layer(name: str, module: nn.Module, lora_layer: type) -> None:
    if not isinstance(module, lora_layer) or any(getattr(module, "use_dora", {}).values()):
        raise ConfigurationError(
            f"Node mode sends LoRA and rsLoRA adapters; {name} has a {type(module).__name__} of another kind (DoRA?). "
            "Use plain LoRA, or vllm_mode='colocate' or 'server'."
        )


def is_adapter(name: str) -> bool:
    """Parameters that exist for PEFT only: the adapters, and the untrained twin of a module in `modules_to_save`."""
    return ".lora_" in name or ".original_module." in name


def base_name(name: str) -> str:
    return name.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")


def adapter_parameters(layer: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in layer.named_parameters() if "lora_" in name]
