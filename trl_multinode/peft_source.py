"""A model with LoRA adapters as a weight source: merged bucket by bucket, never the whole model at once (TRL does)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from .errors import ConfigurationError
from .weight_source import Bucket, ModuleSource, full, gather_zero3


class PeftSource(ModuleSource):
    """Base weights with their active LoRA adapters added (LoRA and rsLoRA), under the names of the base model.

    The model itself is not touched: the sum is made on copies while a bucket is gathered. That the result is right is
    proven by the probe after the first sync, whose forward runs through the adapters.

    Args:
        model (`nn.Module`):
            The base model that PEFT put its layers into (`peft_model.get_base_model()`).
        dtype (`torch.dtype`):
            The engine's.

    Raises:
        `ConfigurationError`: for adapters that are not LoRA, and for DoRA.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        from peft.tuners.lora import LoraLayer
        from peft.tuners.tuners_utils import BaseTunerLayer

        self._layers: dict[str, LoraLayer] = {}
        for name, module in model.named_modules():
            if isinstance(module, BaseTunerLayer):
                check_layer(name, module, LoraLayer)
                self._layers[f"{name}.weight"] = module
        super().__init__(model, dtype)
        adapters = [name for name in self._tensors if is_adapter(name)]
        self._tensors = {base_name(name): t for name, t in self._tensors.items() if name not in adapters}
        self._metadata = [
            type(meta)(base_name(meta.name), meta.dtype, meta.shape)
            for meta in self._metadata
            if meta.name not in adapters
        ]

    @contextmanager
    def gathered(self, bucket: Bucket) -> Iterator[Sequence[torch.Tensor]]:
        tensors = [self._tensors[meta.name] for meta in bucket]
        layers = [self._layers.get(meta.name) for meta in bucket]
        adapters = [p for layer in layers if layer is not None for p in adapter_parameters(layer)]
        with torch.no_grad(), gather_zero3([*tensors, *adapters]):
            yield [merged(layer, full(tensor)) for layer, tensor in zip(layers, tensors, strict=True)]


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


def merged(layer, weight: torch.Tensor) -> torch.Tensor:
    """`weight` plus the sum of the layer's active adapters, as PEFT would merge them, on a copy."""
    if layer is None or layer.disable_adapters or layer.merged:
        return weight
    for adapter in layer.active_adapters:
        if adapter in layer.scaling:
            weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)
    return weight
