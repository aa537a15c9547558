"""Sizes of a model from its config alone: parameters are counted on the meta device, and no weight is read."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...model_layers import ModelLayers, experts_of, first_of, layers_of
from . import PlanError


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
    flops: Any  # of training, a `ModelFlops`
    vocabulary: int
    hidden: int
    layers: int
    mlp_width: int  # of the parts of a layer that a token uses
    loader_calls: int  # of vLLM's loaders: one per tensor, two where experts' gate and up are fused
    has_norms: bool  # queries and keys have norms of their own
    cache: ModelLayers
    experts: Experts

    @property
    def active(self) -> float:
        """Parameters that a token uses, without embeddings that only look rows up."""
        return self.flops.per_token / 6


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
        RuntimeError,
        TypeError,
    ) as error:
        raise PlanError(
            f"a model of this kind cannot be planned (got {config.model_type!r}: {error}). Expected a transformer "
            "with a number of heads; layers without attention may be among them."
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
    from ...reporting.flops import text_flops

    text = model.config.get_text_config()
    named = dict(model.named_parameters())  # a tied weight once
    parameters = sum(parameter.numel() for parameter in named.values())
    experts, layers = _experts(text, named), layers_of(text)
    if not layers.attention:
        raise TypeError("no attention")
    return ModelSize(
        name=type(model).__name__,
        parameters=parameters,
        largest_layer=max(
            sum(p.numel() for p in each.parameters(recurse=False)) for each in model.modules()
        ),
        flops=text_flops(model),
        vocabulary=text.vocab_size,
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        mlp_width=_mlp_width(text, experts.routed),
        loader_calls=sum(_calls(key, parameter) for key, parameter in named.items()),
        has_norms=any("q_norm" in key for key in named),
        cache=layers,
        experts=experts,
    )


def _experts(text: Any, named: dict[str, Any]) -> Experts:
    number, routed = experts_of(text)
    parameters = sum(parameter.numel() for key, parameter in named.items() if ".experts." in key)
    return Experts(parameters, number, routed) if number else Experts()


def _calls(name: str, parameter: Any) -> int:
    """Count the calls for a tensor: two for the fused gate and up matrices of experts, else one."""
    return 2 if ".experts." in name and "gate_up" in name and parameter.ndim == 3 else 1


def _mlp_width(text: Any, routed: int) -> int:
    shared = first_of(text, "shared_expert_intermediate_size", "shared_intermediate_size")
    if not routed:
        return shared or first_of(text, "intermediate_size") or 4 * text.hidden_size
    each = first_of(text, "moe_intermediate_size", "intermediate_size")
    return each * (routed + first_of(text, "n_shared_experts")) + shared
