"""Sizes of a model from its config alone: parameters are counted on the meta device, and no weight is read."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import PlanError

# names in the configs of transformers
EXPERT_COUNTS = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
)
# parts of the names of layers without a cache that grows
NO_CACHE = (
    "linear",
    "mamba",
    "conv",
    "recurrent",
)


@dataclass(frozen=True)
class Attention:
    """Attention of a model; counts are of heads, layers and tensor elements."""

    heads: int
    kv_heads: int
    head_size: int
    has_norms: bool  # queries and keys have norms of their own
    cached_layers: int
    latent: int = (
        0  # of multi-head latent attention: elements per token and layer, the same on every worker
    )

    def cache_elements(self, tensor_parallel: int) -> int:
        """Return the elements of cache per token on one of an engine's GPUs, which split the key-value heads."""
        if self.latent:
            return self.cached_layers * self.latent
        return 2 * self.cached_layers * max(1, self.kv_heads // tensor_parallel) * self.head_size

    def splits_into(self, tensor_parallel: int) -> bool:
        """Return whether vLLM divides the attention heads between so many GPUs."""
        whole = self.kv_heads % tensor_parallel == 0 or tensor_parallel % self.kv_heads == 0
        return self.heads % tensor_parallel == 0 and (whole or bool(self.latent))


@dataclass(frozen=True)
class Experts:
    """Experts of a model."""

    parameters: int = 0  # in all experts
    number: int = 1  # of a layer
    routed: int = 0  # that a token uses; 0 in a dense model


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a causal language model. Counts are of parameters or tensor elements, never of bytes."""

    name: str
    parameters: int
    largest_layer: (
        int  # parameters of the module that holds most itself, as DeepSpeed's estimator counts
    )
    operations: float  # floating-point operations of training per token, without attention
    square_operations: float  # of attention, per squared length of a row
    vocabulary: int
    hidden: int
    layers: int
    mlp_width: int  # of the parts of a layer that a token uses
    loader_calls: int  # of vLLM's loaders: one per tensor, two where experts' gate and up are fused
    attention: Attention
    experts: Experts

    @property
    def active(self) -> float:
        """Parameters that a token uses, without the input embedding."""
        return self.operations / 6


def model_size(name: str, trust_remote_code: bool = False, length: int = 0) -> ModelSize:
    """Count a model's parameters and read its dimensions.

    Args:
        name (`str`):
            Name on the Hub, a folder with a `config.json`, or such a file.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Run the model's own code, if it has some.
        length (`int`, *optional*, defaults to 0):
            Tokens of the longest row.

    Raises:
        `PlanError`: if there is no such config, it is not of a causal language model, or the row is too long for it.
    """
    config = _load_config(name, trust_remote_code)
    model = _build(config, name, trust_remote_code)
    try:
        size = size_of(model)
    # no attention, or another number of heads in each layer
    except (
        AttributeError,
        TypeError,
    ) as error:
        raise PlanError(
            f"a model of this kind cannot be planned (got {config.model_type!r}: {error}). Expected a transformer "
            "with equal layers; layers without attention may be among them."
        ) from error
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise PlanError(
            f"prompt and completion are longer than the model's context (got {length} tokens, expected {longest} at "
            "most): lower --prompt or --completion."
        )
    return replace(size, name=Path(name).stem if Path(name).is_file() else name)


def _load_config(name: str, trust_remote_code: bool) -> Any:
    """Read a config with transformers, which raises errors of many classes."""
    from transformers import AutoConfig

    try:
        path = Path(name)
        if path.is_file():
            entries = json.loads(path.read_text())
            return AutoConfig.for_model(entries.pop("model_type"), **entries)
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise PlanError(
            f"the config of the model cannot be read (got {name!r}: {first}). Expected a name on the Hub, a folder "
            "with a config.json, or such a file; without a network the Hub's name works only if its config is cached."
        ) from error


def _build(config: Any, name: str, trust_remote_code: bool) -> Any:
    """Build the model on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    reasons = []
    for kind in (AutoModelForCausalLM, AutoModelForImageTextToText):
        try:
            with torch.device("meta"):
                return kind.from_config(
                    config, dtype=torch.bfloat16, trust_remote_code=trust_remote_code
                )
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
    experts = _experts(text, named)
    return ModelSize(
        name=type(model).__name__,
        parameters=parameters,
        largest_layer=max(
            sum(p.numel() for p in each.parameters(recurse=False)) for each in model.modules()
        ),
        operations=flops.per_token if flops else 6.0 * parameters,
        square_operations=flops.per_square if flops else 0.0,
        vocabulary=text.vocab_size,
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        mlp_width=_mlp_width(text, experts.routed),
        loader_calls=sum(_calls(key, parameter) for key, parameter in named.items()),
        attention=_attention(text, any("q_norm" in key for key in named)),
        experts=experts,
    )


def _first(text: Any, *names: str) -> int:
    """Return the first entry of a config that is there and not 0; else 0."""
    return next((value for name in names if (value := getattr(text, name, None))), 0)


def _attention(text: Any, has_norms: bool) -> Attention:
    """Read the attention. Layers with a window count in full in the cache, so this is an upper bound."""
    heads, latent = text.num_attention_heads, _first(text, "kv_lora_rank")
    kinds = getattr(text, "layer_types", None) or [""] * text.num_hidden_layers
    return Attention(
        heads=heads,
        kv_heads=_first(text, "num_key_value_heads") or heads,
        head_size=_first(text, "head_dim") or text.hidden_size // heads,
        has_norms=has_norms,
        cached_layers=sum(not any(word in kind for word in NO_CACHE) for kind in kinds),
        latent=latent and latent + text.qk_rope_head_dim,
    )


def _experts(text: Any, named: dict[str, Any]) -> Experts:
    number = _first(text, *EXPERT_COUNTS)
    if not number:
        return Experts()
    parameters = sum(parameter.numel() for key, parameter in named.items() if ".experts." in key)
    return Experts(parameters, number, _first(text, "num_experts_per_tok") or number)


def _calls(name: str, parameter: Any) -> int:
    """Count the calls for a tensor: two for the fused gate and up matrices of experts, else one."""
    return 2 if ".experts." in name and "gate_up" in name and parameter.ndim == 3 else 1


def _mlp_width(text: Any, routed: int) -> int:
    if not routed:
        return _first(text, "intermediate_size") or 4 * text.hidden_size
    each = _first(text, "moe_intermediate_size", "intermediate_size")
    return each * (routed + _first(text, "n_shared_experts")) + _first(
        text, "shared_expert_intermediate_size"
    )
