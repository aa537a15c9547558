"""Additions to vLLM's layer-wise reload, in a worker: CPU packing, experts in few calls, a check of every layer."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from .loading import SKIP_LOAD_TENSORS, DirectWrites

LOADABLE = "weight_loader_numel"  # attribute of a padded parameter: the number of its elements in a checkpoint


def begin_reload(
    model: torch.nn.Module, device: torch.device, before: DirectWrites | None = None
) -> DirectWrites:
    """Start a reload: from now on the loaders of `model` collect their weights layer by layer.

    Args:
        model (`torch.nn.Module`), device (`torch.device`):
            vLLM's model, and the worker's device.
        before (`DirectWrites`, *optional*):
            Watch of the previous reload, which this function returned.

    Returns:
        `DirectWrites`: watch of this reload, for [`load_tensors`] and [`end_reload`].
    """
    if device.type == "cpu":
        forget_packed_experts(model)
        allocate_released(model)
    renew_derived(model)
    load_experts_together(model)
    initialize_layerwise_reload(model)
    return DirectWrites(model, before)


def end_reload(
    model: torch.nn.Module, model_config: ModelConfig, writes: DirectWrites
) -> str | None:
    """
    Finish a reload after the last bucket.

    Returns:
        `str`, *optional*: an error message if layers did not get all their weights. This function does not raise it,
        because vLLM accepts no further update after one whose end failed.
    """
    tied = getattr(model_config.hf_text_config, "tie_word_embeddings", False)
    lacking = [f"{name} ({reason})" for name, reason in incomplete_layers(model, tied)]
    lacking += [f"{name} (nothing came)" for name in writes.missing.values()]
    finalize_layerwise_reload(model, model_config)
    lacking += [
        f"{name} (derived from a weight, and not derived again)" for name in stale_derived(model)
    ]
    repack_vocabulary_layers(model)
    writes.complete = not lacking
    if writes.complete:
        return None
    return (
        f"{len(lacking)} layers of vLLM's {type(model).__name__} did not get all their weights, and would keep old or "
        f"random ones: {', '.join(lacking[:5])}. The trainer's model has other names, or other tensors, than vLLM "
        "expects for this architecture: use versions of transformers and vLLM that agree on it."
    )


def allocate_released(model: torch.nn.Module) -> None:
    """Give the weights that the attention of DeepSeek has packed and released memory again. CPU only.

    A reload copies into the parameters that it finds, and one of no elements cannot take the new weight. The attention
    packs and releases it again at the end.
    """
    for attention in model.modules():
        if getattr(attention, "is_amx_bmm_enabled", False):
            layer = attention.kv_b_proj
            recorded = get_layerwise_info(layer).restore_metadata[0]["weight"]
            weight = torch.empty_like(recorded, device="cpu")
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)


# ---- tensors that a model derives from a weight ---------------------------------------------------------------------


@dataclass(frozen=True)
class Derived:
    """A buffer that was a view of a weight, and the layers and parameters of which it may have been one."""

    name: str
    buffer: torch.Tensor
    sources: list[tuple[torch.nn.Module, str]]


_renewals: WeakKeyDictionary[torch.nn.Module, list[tuple[str, torch.Tensor]]] = WeakKeyDictionary()
_renewed: set[int] = set()  # storages that this reload has written


def derived_buffers(model: torch.nn.Module) -> list[Derived]:
    """Return the buffers that were views of a parameter when the model was built, and share no storage with one now.

    vLLM leaves such views out of what it records for a reload, because the parameter renews them. On a CPU it then
    packs the parameter, and a view keeps the values from before. `conv_weights` of Mamba 2 is one: Granite 4 hybrid
    sampled 0.4 to 2.9 nats off after each sync.
    """
    found = []
    for path, layer in model.named_modules():
        recorded = get_layerwise_info(layer).restore_metadata[1]
        buffers = dict(layer.named_buffers(recurse=False))
        names = layer._non_persistent_buffers_set & buffers.keys() - recorded.keys()
        if not names:
            continue
        storages = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
        for name in sorted(names):
            # none: a buffer of another kind, which vLLM added later
            sources = parameters_like(buffers[name], layer)
            if sources and buffers[name].untyped_storage().data_ptr() not in storages:
                found.append(Derived(f"{path}.{name}".lstrip("."), buffers[name], sources))
    return found


def parameters_like(
    buffer: torch.Tensor, layer: torch.nn.Module
) -> list[tuple[torch.nn.Module, str]]:
    """Return the parameters below `layer` that had as many elements as a buffer, and its dtype, before any packing."""
    return [
        (child, name)
        for child in layer.modules()
        for name, parameter in get_layerwise_info(child).restore_metadata[0].items()
        if parameter.numel() == buffer.numel() > 1 and parameter.dtype == buffer.dtype
    ]


def renew_derived(model: torch.nn.Module) -> None:
    """Let this reload copy each weight into the buffers that were views of it, before the weight is packed."""
    _renewals.clear()
    _renewed.clear()
    for derived in derived_buffers(model):
        if len(derived.sources) > 1:  # `stale_derived` names it
            continue
        layer, name = derived.sources[0]
        if (method := getattr(layer, "quant_method", None)) is not None:
            _renewals.setdefault(layer, []).append((name, derived.buffer))
            copy_before_packing(method)


def copy_before_packing(method: object) -> None:
    """Replace a layer's method that packs its weights with one that copies them first."""
    pack = method.process_weights_after_loading  # type: ignore[attr-defined]
    if hasattr(pack, "packs"):
        return

    @wraps(pack)
    def copied(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        for name, buffer in _renewals.get(layer, ()):
            buffer.data.copy_(getattr(layer, name).data.view(buffer.shape))
            _renewed.add(buffer.untyped_storage().data_ptr())
        return pack(layer, *args, **kwargs)

    copied.packs = pack  # type: ignore[attr-defined]
    method.process_weights_after_loading = copied  # type: ignore[attr-defined]


def stale_derived(model: torch.nn.Module) -> list[str]:
    """Return the names of the buffers that were views of a parameter, and that this reload has not renewed."""
    derived = derived_buffers(model)
    return [one.name for one in derived if one.buffer.untyped_storage().data_ptr() not in _renewed]


# ---- experts --------------------------------------------------------------------------------------------------------


class AllExperts(torch.Tensor):
    """Matrices of all experts of a layer, which vLLM loads in one call.

    vLLM calls its loader for each part that `unbind` returns; the loader also accepts all of them in one tensor. A
    layer of 128 small experts then loads in 5 ms of CPU time instead of 52, so the 94 layers of 235B save 4.4 s
    (`benchmarks/loader_calls.py`).
    """

    def unbind(self, dim: int = 0) -> tuple[torch.Tensor]:
        return (self.as_subclass(torch.Tensor),)


def load_experts_together(model: torch.nn.Module) -> None:
    """Let layers load all their experts in a call per matrix. vLLM loads quantized ones one by one, as before."""
    for layer in unquantized_experts(model):
        if hasattr(layer, "load_weights"):
            layer.load_weights = partial(load_experts, layer)


def load_experts(
    layer: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterable[str]:
    """Load weights with the method of the layer's class; return the names of its parameters."""
    marked = ((name, mark_all_experts(layer, weight)) for name, weight in weights)
    return type(layer).load_weights(layer, marked)


def mark_all_experts(layer: torch.nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """Return a fused tensor as `AllExperts` if its experts are exactly those of this worker, none of them twice."""
    numbers = {
        len(weight) if weight.ndim == 3 else 0,
        getattr(layer, "local_num_experts", None),
        getattr(layer, "global_num_experts", None),
    }
    return weight.as_subclass(AllExperts) if len(numbers) == 1 else weight


def unquantized_experts(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the layers of experts that vLLM has not quantized."""
    for layer in model.modules():
        if isinstance(getattr(layer, "quant_method", None), UnquantizedFusedMoEMethod):
            yield layer


# ---- layers without weights -----------------------------------------------------------------------------------------


def incomplete_layers(model: torch.nn.Module, tied: bool) -> list[tuple[str, str]]:
    """
    Return the layers that got too few elements in this reload, each with the reason.

    vLLM logs a line at most: a layer that got nothing keeps its old weights, and the missing part of a linear layer (a
    query without its key, experts without their second matrix) is uninitialized memory. The check leaves out quantized
    layers, whose scales need not be in a checkpoint, a tied head, and the padding of layers such as a vocabulary.
    """
    found = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        expected = num_elements(layer)
        is_tied_head = tied and isinstance(layer, ParallelLMHead)
        if not expected or not info.can_load() or is_quantized(layer) or is_tied_head:
            continue
        if info.load_numel == 0:
            found.append((name, "nothing came"))
        elif has_no_padding(layer) and info.load_numel < expected:
            found.append((name, f"{info.load_numel} of {expected} elements came"))
    return found


def has_no_padding(layer: torch.nn.Module) -> bool:
    """Return whether `num_elements(layer)` counts no padding.

    Linear layers have no padding, and vLLM 0.31 records how many elements of padded experts are not padding.
    """
    return isinstance(layer, LinearBase) or any(
        hasattr(p, LOADABLE) for p in layer.parameters(recurse=False)
    )


def num_elements(layer: torch.nn.Module) -> int:
    """Return the number of elements that a checkpoint has for the layer's own parameters."""
    return sum(
        getattr(parameter, LOADABLE, parameter.numel())
        for name, parameter in layer.named_parameters(recurse=False)
        if name not in SKIP_LOAD_TENSORS
    )


def is_quantized(layer: torch.nn.Module) -> bool:
    """Return whether vLLM has quantized the layer."""
    method = getattr(layer, "quant_method", None)
    return method is not None and not type(method).__name__.startswith("Unquantized")


def forget_packed_experts(model: torch.nn.Module) -> None:
    """Drop the experts' kernels, so that vLLM builds new ones after the reload and packs the new weights. CPU only.

    vLLM 0.31 packs experts on a CPU only while it builds their kernel. With the old kernel, reloaded weights stayed
    unpacked (log-probs 0.04 to 0.9 from the trainer's). On GPUs it stays: captured graphs hold its tensors.
    """
    for layer in unquantized_experts(model):
        layer.quant_method.moe_kernel = None


def repack_vocabulary_layers(model: torch.nn.Module) -> None:
    """Rebuild the packed copy that a head tied to the embedding has on a CPU.

    vLLM's reload does not rebuild it (log-probs -5.16 where the trainer had -6.01). On GPUs the call has no effect. A
    quantized head is left out: processing it twice could replace a parameter that a captured graph reads.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, VocabParallelEmbedding) and isinstance(
            method, UnquantizedEmbeddingMethod
        ):
            method.process_weights_after_loading(module)
