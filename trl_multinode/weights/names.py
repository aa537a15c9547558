"""Tensors of a model: names as in the checkpoint, full shapes, and whether ZeRO-3 shards them. No collective."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn


def named_weights(model: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str], torch.Tensor]]:
    """Yield parameters (tied ones once) and persistent buffers: checkpoint name, (module, attribute), tensor."""
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
    Map tensor names of `model` to their names in the checkpoint, which vLLM expects.

    transformers 5 renames tensors while it loads them (`language_model.model` -> `model.language_model`, no
    `vision_model` in CLIP and SigLIP) and records the renamings in the model. Fused experts stay fused, because vLLM
    loads them fused.
    """
    # Under ZeRO-3 transformers also records renamings that did not apply to this checkpoint
    renamings = []
    for conversion in reversed(getattr(model, "_weight_conversions", None) or ()):
        if conversion.was_used() and not hasattr(conversion, "operations"):
            renamings.append(conversion.reverse_transform())
    found = {}
    # some renamings apply only after another name was seen, and rely on this order
    for name in sorted(names):
        found[name] = without_wrappers(name)
        for renaming in renamings:
            found[name], _ = renaming.rename_source_key(found[name])
    return found


def without_wrappers(name: str) -> str:
    """Remove the name of the wrapper module that FSDP's activation checkpointing inserts."""
    return name.replace("_checkpoint_wrapped_module.", "")


def is_zero3(tensor: torch.Tensor) -> bool:
    """Return whether ZeRO-3 manages the tensor."""
    return hasattr(tensor, "ds_numel")


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the full shape; a ZeRO-3 shard has `numel() == 0`, and its full shape is `ds_shape`."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))
