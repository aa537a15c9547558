"""Weight sources of a model with LoRA adapters: the adapter alone, or merged into the weights bucket by bucket (TRL
merges the whole model at once and runs out of memory).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..errors import ConfigurationError, WeightSyncError
from ..model_layers import experts_of
from ..transports.pieces import Pieces
from ..wire.messages import ADAPTER_TENSORS
from .buckets import Bucket, WeightMeta
from .gathering import ShardGather
from .names import NamedWeight, checkpoint_names, shape_of
from .source import ModuleSource, full
from .tying import check_tied_head

LARGEST_RANK = 512  # largest LoRA rank that vLLM serves
DORA = "DoraLinearVariant"  # class name of PEFT's DoRA variant


class PeftSource(ModuleSource):
    """Base weights with their active adapters merged (LoRA, rsLoRA, DoRA), under the names of the base model.

    The merge works on copies while a bucket is gathered and leaves the model unchanged. The probe after the first sync
    verifies the result, because its forward runs through the adapters.

    Args:
        model (`nn.Module`):
            Base model that PEFT put its layers into (`peft_model.get_base_model()`).
        dtype (`torch.dtype`):
            Dtype of the engine.
        gather (`ShardGather`, *optional*):
            `ShardGather` of this rank. Default: one for a world of one rank.

    Raises:
        `ConfigurationError`: for adapters other than LoRA, for LoRA variants other than DoRA, for an adapter of a
            layer without a weight, and if a tied embedding and head are trained apart.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, gather: ShardGather | None = None):
        check_tied_head(model)
        layers = {f"{name}.weight": layer for name, layer in lora_layers(model).items()}
        names = checkpoint_names(model, layers)
        self._changed = self._layers = {names[name]: layer for name, layer in layers.items()}
        super().__init__(model, dtype, gather)
        # two buckets are gathered in the trainer's dtype, and two have their merged weights beside them
        self.buckets_at_peak = self._widening() * (self.gather.buckets_at_peak + 2)
        self._check_owners()

    def weights(self) -> Iterator[NamedWeight]:
        active = active_adapters(self._layers.values())
        for weight in super().weights():
            if not is_adapter(weight.name, active):
                yield replace(weight, name=base_name(weight.name))

    def _check_owners(self) -> None:
        """Raise if an adapter is of no weight: a sync would silently omit it."""
        unknown = sorted(set(self._layers) - set(self._owners))
        if unknown:
            raise ConfigurationError(
                f"The LoRA adapter of {unknown[0].removesuffix('.weight')} does not belong to a layer with a "
                "weight (`target_parameters`, attention in one matrix?), so node mode cannot add it.",
                setting="peft_config",
                got=unknown[0],
                cure="Use `target_modules` that are layers, or vllm_mode='colocate' or 'server'.",
            )

    def _widening(self) -> float:
        """Return how many times as large a bucket is in the trainer's dtype as in the engine's, at most."""
        merged = tuple(meta for meta in self._metadata if meta.name in self._layers)
        pairs = zip(merged, self.tensors(merged), strict=True)
        return max([1.0, *(tensor.dtype.itemsize / meta.dtype.itemsize for meta, tensor in pairs)])

    def added(self, bucket: Bucket) -> list[tuple[str, nn.Parameter]]:
        return [
            (f"{meta.name.removesuffix('weight')}{name}", parameter)
            for meta in bucket
            if meta.name in self._layers
            for name, parameter in self._layers[meta.name].named_parameters()
            if "lora_" in name
        ]

    def as_sent(self, name: str, pieces: Pieces) -> Pieces:
        """Add the layer's active adapters on a copy, as PEFT would merge them. A collective under FSDP2."""
        layer = self._layers.get(name)
        if layer is None or layer.disable_adapters or layer.merged:
            return pieces
        # on every rank, because FSDP2 gathers A, B and their product; it takes milliseconds, on all ranks at once
        active = active_in(layer)
        deltas = [full(layer.get_delta_weight(name)) for name in active]
        # at most one is DoRA's (Liu et al. 2024, equation 5), which learns the row norms
        norms = layer.lora_magnitude_vector
        lengths = [full(norms[name].weight) for name in active if is_dora(layer, name)]
        if pieces.data.numel() == 0:
            return pieces
        weight = pieces.copy()
        for delta in deltas:
            weight += delta.to(weight.dtype)
        for length in lengths:
            weight *= (length / torch.linalg.norm(weight, dim=1)).to(weight.dtype).unsqueeze(1)
        return Pieces.whole(weight)


class AdapterSource(PeftSource):
    """Unmerged, frozen base weights, and beside them the one active LoRA adapter under vLLM's names.

    This source multiplies PEFT's scaling of each layer (alpha / r, rsLoRA, `alpha_pattern`) into B before the cast to
    the engine's dtype, so that the engine needs no scaling factor.

    Args:
        model (`nn.Module`), dtype (`torch.dtype`), gather (`ShardGather`, *optional*):
            Arguments of [`PeftSource`]; [`adapter_obstacles`] must have found none in the model.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, gather: ShardGather | None = None):
        super().__init__(model, dtype, gather)
        self._metadata = [replace(meta, frozen=True, divisible=True) for meta in self._metadata]
        layers, self._layers = self._layers, {}  # nothing is merged
        # layer by the name of its B tensor; the scaling precedes the cast
        self._changed = self._scaled = dict[str, nn.Module]()
        self.buckets_at_peak = self.gather.buckets_at_peak
        (self._adapter,) = active_adapters(layers.values())
        for name, layer in layers.items():
            if self._adapter in layer.scaling:
                name_a, name_b = (name.removesuffix(".weight") + end for end in ADAPTER_TENSORS)
                self._scaled[name_b] = layer
                self._add(name_a, layer.lora_A[self._adapter], dtype)
                self._add(name_b, layer.lora_B[self._adapter], dtype)

    def _add(self, name: str, linear: nn.Module, dtype: torch.dtype) -> None:
        self._owners[name] = linear, "weight"
        self._metadata.append(WeightMeta(name, dtype, shape_of(linear.weight)))

    def as_sent(self, name: str, pieces: Pieces) -> Pieces:
        if (layer := self._scaled.get(name)) is None:
            return pieces
        return replace(
            pieces,
            data=pieces.data * (0.0 if layer.disable_adapters else layer.scaling[self._adapter]),
        )

    def check(self, weights: Sequence[WeightMeta], step: int, frozen: bool) -> None:
        """Raise if the base was merged or unfrozen, or another adapter is active, too: engines keep the old state."""
        layers = lora_layers(self._module).values()
        if active_adapters(layers) != {self._adapter} or any(layer.merged for layer in layers):
            raise WeightSyncError(
                f"The LoRA adapter {self._adapter!r} was merged into the model, or taken out, or another made active, "
                "after the engines had started. Undo it before the next generation, or use `lora_sync='merged'`."
            )
        base = tuple(meta for meta in self._metadata if meta.frozen)
        for meta, tensor in zip(base, self.tensors(base), strict=True):
            if tensor.requires_grad:
                raise WeightSyncError(
                    f"{meta.name} is trained, but was frozen when the engines started, so they keep its first value. "
                    "Unfreeze it before the trainer is built, or use `lora_sync='merged'`."
                )
        super().check(weights, step, frozen)


def adapter_obstacles(model: nn.Module, dtype: torch.dtype, on_gpu: bool) -> Iterator[str]:
    """Yield each reason that this rank finds why vLLM cannot serve the adapters of `model` beside its weights.

    Args:
        model (`nn.Module`):
            Base model that PEFT put its layers into.
        dtype (`torch.dtype`), on_gpu (`bool`):
            Dtype of the engine, and `True` if the engine runs on a GPU.

    Raises:
        `ConfigurationError`: for adapters other than LoRA, and for LoRA variants other than DoRA.
    """
    layers = lora_layers(model)
    active = active_adapters(layers.values())
    if len(active) != 1:
        yield f"there are {len(active)} active adapters, and vLLM serves one per request"
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not is_adapter(name, active):
            yield f"{base_name(name)} is trained besides the adapter (modules_to_save, bias, an unfrozen parameter)"
    head = model.get_output_embeddings()
    for name, layer in layers.items():
        yield from _layer_obstacles(name, layer, layer is head, *active)
    if (rank := lora_rank(model)) > LARGEST_RANK:
        yield f"its rank is {rank}, and vLLM serves {LARGEST_RANK} at most"
    if on_gpu and dtype == torch.float32:
        yield "vLLM's LoRA kernels on a GPU take bfloat16 and float16 only, and the engine's dtype is float32"
    if any(experts_of(model.config.get_text_config())):
        yield "it has experts, and vLLM's loaders do not find all of them below its adapters"


def _layer_obstacles(name: str, layer: Any, is_head: bool, adapter: str) -> Iterator[str]:
    if is_head or not isinstance(layer.get_base_layer(), nn.Linear):
        reason = "not every model of vLLM supports adapters of other layers"
        yield f"{name} is not a linear layer below the head, and {reason}"
    if is_dora(layer, adapter):
        yield f"{name} is DoRA's, which has a magnitude besides A and B"


def lora_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return PEFT's layers by name. Raise `ConfigurationError` for adapters that node mode cannot merge."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)
    }
    for name, module in layers.items():
        check_layer(name, module, LoraLayer)
    return layers


def active_in(layer: Any) -> list[str]:
    """Return the names of the adapters that are active in a layer, in the same order on every rank."""
    return [name for name in layer.active_adapters if name in layer.scaling]


def active_adapters(layers: Iterable[Any]) -> set[str]:
    """Return the names of the adapters that are active in any of the layers."""
    return {name for layer in layers for name in active_in(layer)}


def lora_rank(model: nn.Module) -> int:
    """Return the largest rank of the active adapters in any layer."""
    layers = lora_layers(model).values()
    return max(layer.r[name] for layer in layers for name in active_in(layer))


def check_layer(name: str, module: Any, lora_layer: type[Any]) -> None:
    """Check that the adapter of one layer can be merged into its weight."""
    if isinstance(module, lora_layer):
        variants = {type(variant).__name__ for variant in module.lora_variant.values()}
        variants |= {"lora_bias"} if any(module.lora_bias.values()) else set()
        alone = not variants or len(module.active_adapters) == 1
        if variants <= {DORA} and alone and not (variants and module.fan_in_fan_out):
            return
    else:
        variants = {f"{type(module).__module__}.{type(module).__name__}"}
    raise ConfigurationError(
        f"Node mode sends LoRA, rsLoRA and (one at a time, on linear layers) DoRA adapters; {name} has "
        f"{', '.join(sorted(variants))}.",
        setting="peft_config",
        got=sorted(variants),
        cure="Use one of them, or vllm_mode='colocate' or 'server'.",
    )


def is_dora(layer: Any, adapter: str) -> bool:
    """Return whether the adapter of this layer is DoRA's."""
    return type(layer.lora_variant.get(adapter)).__name__ == DORA


def is_adapter(name: str, active: set[str]) -> bool:
    """Return whether a parameter exists only because of PEFT: an adapter, the untrained original of a module in
    `modules_to_save`, or the copy of such a module for an adapter that is not `active` (TRL's reference)."""
    copy = re.search(r"\.modules_to_save\.([^.]+)\.", name)
    return (
        ".lora_" in name
        or ".original_module." in name
        or (copy is not None and copy[1] not in active)
    )


def base_name(name: str) -> str:
    """Return the name of a tensor without PEFT's wrappers."""
    return re.sub(r"\.modules_to_save\.[^.]+\.", ".", name.replace(".base_layer.", "."))
