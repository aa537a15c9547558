"""Tied weights: an engine has one tensor for a tied embedding and head, so the trainer must have one too."""

from typing import Any

import torch
from torch import nn

from ..errors import ConfigurationError, WeightSyncError

Owner = tuple[nn.Module, str]  # module and attribute of a parameter


def check_tied_head(model: nn.Module) -> None:
    """Check that PEFT's layers leave a tied embedding and head with one trained weight.

    PEFT ties `modules_to_save` with `ensure_weight_tying=True`: both modules then have the same parameter. With
    `target_modules` it gives the head parameters of its own that only share memory with those of the embedding. A
    move to another device or dtype makes them two adapters, and DeepSpeed 0.19 does not start with them, so they are
    refused.

    Args:
        model (`nn.Module`):
            Base model that PEFT put its layers into.

    Raises:
        `ConfigurationError`: if embedding and head would be trained apart.
    """
    modules = [
        getattr(model, getter, lambda: None)()
        for getter in ("get_input_embeddings", "get_output_embeddings")
    ]
    if None in modules or untrained(modules[0]).weight is not untrained(modules[1]).weight:
        return
    names = {module: name for name, module in model.named_modules()}
    embedding, head = (names[module] for module in modules)
    adapted = [names[module] for module in modules if hasattr(module, "get_base_layer")]
    if adapted:
        apart = (
            f"{' and '.join(adapted)} of the LoRA config's `target_modules` would be trained apart"
        )
    elif trained(modules[0]).weight is not trained(modules[1]).weight:
        apart = (
            "the LoRA config's `modules_to_save` names one of them or has separate copies of both"
        )
    else:
        return
    raise ConfigurationError(
        f"The model ties {head} to {embedding}, and an engine has one tensor for both, but {apart}: the "
        "log-probs of engines and trainer would drift apart.",
        setting="peft_config",
        got=apart,
        cure=f"Use `modules_to_save=[{embedding.split('.')[-1]!r}]` with `ensure_weight_tying=True`, which "
        "trains one tensor for both, or leave both out of `target_modules` and `modules_to_save`.",
    )


def untrained(module: Any) -> Any:
    """Return a layer as it is without PEFT's wrapper."""
    if hasattr(module, "original_module"):
        return module.original_module
    if hasattr(module, "get_base_layer"):
        return module.get_base_layer()
    return module


def trained(module: Any) -> Any:
    """Return the active copy of a layer in `modules_to_save`; any other layer unchanged."""
    copies = getattr(module, "modules_to_save", {})
    active = [name for name in copies if name in module.active_adapters]
    return copies[active[0]] if active else untrained(module)


def tied_weights(model: nn.Module) -> list[tuple[Owner, Owner]]:
    """Return the pairs of places in a model that share one parameter, which a sync sends once."""
    first: dict[nn.Parameter, Owner] = {}
    pairs = []
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            owner = first.setdefault(parameter, (module, attribute))
            if owner[0] is not module:
                pairs.append((owner, (module, attribute)))
    return pairs


def check_still_tied(pairs: list[tuple[Owner, Owner]], model: nn.Module) -> None:
    """Check that no wrapper or script has separated tied weights, of which a sync sends only the first.

    Raises:
        `WeightSyncError`: if it has; the message names both modules.
    """
    for (module, attribute), (other, its) in pairs:
        one: torch.Tensor = getattr(module, attribute)
        if one is not getattr(other, its):
            names = {owner: name for name, owner in model.named_modules()}
            raise WeightSyncError(
                f"{names.get(module)}.{attribute} and {names.get(other)}.{its} were one tensor when the engines "
                "started and are two now, so the engines would keep an old value of the second. Shard both in the "
                "same FSDP unit, or separate them before the trainer is built, with `tie_word_embeddings=False`."
            )
