"""Sizes of a model from its config alone: parameters are counted on the meta device, and no weight is read."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import PlanError

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")  # names in the configs of transformers
NO_CACHE = ("linear", "mamba", "conv", "recurrent")  # parts of the names of layers without a cache that grows


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a causal language model. Counts are of parameters or tensor elements, never of bytes."""

    name: str
    parameters: int
    largest_layer: int  # parameters of the module that holds most itself, as DeepSpeed's estimator counts
    expert_parameters: int  # in all experts
    expert_share: float  # of them, that a token uses
    operations: float  # floating-point operations of training per token, without attention
    square_operations: float  # of attention, per squared length of a row
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_width: int  # of the parts of a layer that a token uses
    routed: int  # experts per token; 0 in a dense model
    head_norms: bool  # queries and keys have norms of their own
    cached_layers: int
    latent: int = 0  # of multi-head latent attention: elements per token and layer, the same on every worker
    max_length: int | None = None  # tokens
    loader_calls: int = 0  # tensors and matrices of experts, which vLLM's loaders take one by one

    @property
    def active(self) -> float:
        """Parameters that a token uses, without the input embedding."""
        return self.operations / 6

    def cache_elements(self, tensor_parallel: int) -> int:
        """Return the elements of cache per token on one of an engine's GPUs, which split the key-value heads."""
        if self.latent:
            return self.cached_layers * self.latent
        return 2 * self.cached_layers * max(1, self.kv_heads // tensor_parallel) * self.head_size

    def splits_into(self, tensor_parallel: int) -> bool:
        """Return whether vLLM divides the attention heads between so many GPUs."""
        whole = self.kv_heads % tensor_parallel == 0 or tensor_parallel % self.kv_heads == 0
        return self.heads % tensor_parallel == 0 and (whole or bool(self.latent))


def model_size(name: str, trust_remote_code: bool = False) -> ModelSize:
    """Count a model's parameters and read its dimensions.

    Args:
        name (`str`):
            Name on the Hub, a folder with a `config.json`, or such a file.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Run the model's own code, if it has some.

    Raises:
        `PlanError`: if there is no such config, or it is not of a causal language model.
    """
    config = load_config(name, trust_remote_code)
    model = build(config, name, trust_remote_code)
    try:
        size = size_of(model)
    except (AttributeError, TypeError) as error:  # no attention, or another number of heads in each layer
        raise PlanError(
            f"a model of this kind cannot be planned (got {config.model_type!r}: {error}). Expected a transformer "
            "with equal layers; layers without attention may be among them."
        ) from error
    return replace(size, name=Path(name).stem if Path(name).is_file() else name)


def load_config(name: str, trust_remote_code: bool) -> Any:
    """Read a config with transformers, which raises errors of many classes."""
    from transformers import AutoConfig

    try:
        path = Path(name)
        if path.is_file():
            entries = json.loads(path.read_text())
            return AutoConfig.for_model(entries.pop("model_type"), **entries)
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PlanError(
            f"the config of the model cannot be read (got {name!r}: {first}). Expected a name on the Hub, a folder "
            "with a config.json, or such a file; without a network the Hub's name works only if its config is cached."
        ) from error


def build(config: Any, name: str, trust_remote_code: bool) -> Any:
    """Build the model on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    reasons = []
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        try:
            with torch.device("meta"):
                return kind.from_config(config, dtype=torch.bfloat16, trust_remote_code=trust_remote_code)
        except (ValueError, ImportError, AttributeError) as error:
            reasons.append(str(error).splitlines()[0])
    raise PlanError(
        f"no language model can be built from the config of {name!r} (got model_type "
        f"{getattr(config, 'model_type', None)!r}: {reasons[0]}). Expected a causal language model."
    )


def size_of(model: Any) -> ModelSize:
    """Read the sizes of a model on any device."""
    from ...reporting.flops import model_flops

    text = model.config.get_text_config()
    named = dict(model.named_parameters())  # a tied weight once
    parameters = sum(parameter.numel() for parameter in named.values())
    flops = model_flops(model)
    experts = next((n for key in EXPERT_COUNTS if (n := getattr(text, key, None))), 0)
    routed = (getattr(text, "num_experts_per_tok", None) or experts) if experts else 0
    heads = text.num_attention_heads
    return ModelSize(
        name=type(model).__name__,
        parameters=parameters,
        largest_layer=max(sum(p.numel() for p in each.parameters(recurse=False)) for each in model.modules()),
        expert_parameters=sum(p.numel() for key, p in named.items() if ".experts." in key),
        expert_share=routed / experts if experts else 1.0,
        operations=flops.per_token if flops else 6.0 * parameters,
        square_operations=flops.per_square if flops else 0.0,
        vocabulary=text.vocab_size,
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
        mlp_width=_mlp_width(text, routed),
        routed=routed,
        head_norms=any("q_norm" in key for key in named),
        cached_layers=_cached_layers(text),
        latent=(getattr(text, "kv_lora_rank", None) or 0) and text.kv_lora_rank + text.qk_rope_head_dim,
        max_length=getattr(text, "max_position_embeddings", None),
        loader_calls=sum(_calls(key, parameter) for key, parameter in named.items()),
    )


def _calls(name: str, parameter: Any) -> int:
    """Count the matrices in a tensor: fused experts have one or, where gate and up are fused too, two each."""
    if ".experts." not in name or parameter.ndim < 3:
        return 1
    return int(parameter.shape[0]) * (2 if "gate_up" in name else 1)


def _mlp_width(text: Any, routed: int) -> int:
    if not routed:
        return getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    each = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    return each * (routed + (getattr(text, "n_shared_experts", None) or 0)) + shared


def _cached_layers(text: Any) -> int:
    """Count the layers with keys and values. Those with a window count in full, so this is an upper bound."""
    kinds = getattr(text, "layer_types", None)
    if not kinds:
        return int(text.num_hidden_layers)
    return sum(not any(word in kind for word in NO_CACHE) for kind in kinds)
