"""Tensors of a model: names as in the checkpoint, full shapes, and whether ZeRO-3 shards them. No collective."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..wire.messages import Parts
from .tying import Owner

SPLITS = {"Chunk", "SplitModulelist"}  # operations of transformers that cut a fused tensor


@dataclass(frozen=True)
class NamedWeight:
    """Tensor to send, with its names in a checkpoint."""

    name: str  # of a fused tensor: that in memory, renamed as its parts are
    parts: Parts | None  # what a checkpoint has in the place of a fused tensor
    owner: Owner
    tensor: torch.Tensor


def named_weights(model: nn.Module) -> Iterator[NamedWeight]:
    """Yield the parameters (tied ones once) and persistent buffers of a model."""
    modules = dict(model.named_modules())
    found = dict(model.named_parameters())
    for prefix, module in modules.items():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    names = checkpoint_names(model, found)
    fused = parts_of_fused(model, found)
    for name, tensor in found.items():
        prefix, _, attribute = name.rpartition(".")
        yield NamedWeight(names[name], fused.get(name), (modules[prefix], attribute), tensor)


def checkpoint_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """
    Map tensor names of `model` to their names in the checkpoint, which vLLM expects.

    transformers 5 renames tensors while it loads them (`language_model.model` -> `model.language_model`, no
    `vision_model` in CLIP and SigLIP) and records the renamings in the model.
    """
    renamings = [one for one in reversals(model) if not hasattr(one, "operations")]
    # some renamings apply only after another name was seen, and rely on this order
    return {name: renamed(without_wrappers(name), renamings) for name in sorted(names)}


def parts_of_fused(model: nn.Module, names: Iterable[str]) -> dict[str, Parts]:
    """
    Return, for each tensor that transformers fused while it loaded it, the tensors of the checkpoint.

    The experts of a layer are two tensors in memory; most checkpoints have one matrix of one expert each, and so do
    some loaders of vLLM.
    """
    reversed_ = reversals(model)
    renamings = [one for one in reversed_ if not hasattr(one, "operations")]
    splits = [one for one in reversed_ if is_split(one)]
    found = {}
    for name in sorted(names):
        for split in splits:
            first, matched = split.rename_source_key(without_wrappers(name))
            if matched is None:
                continue
            targets = split.target_patterns
            parts = [renamed(first.replace(targets[0], target), renamings) for target in targets]
            dims = [cut.dim for cut in split.operations if type(cut).__name__ == "Chunk"]
            found[name] = Parts(tuple(parts), *dims)
            break
    return found


def reversals(model: nn.Module) -> list[Any]:
    """Return the conversions that `save_pretrained` would apply to the tensors of `model`, in their order."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is not None:
        # Under ZeRO-3 transformers also records those that did not apply to this checkpoint
        conversions = [one for one in conversions if one.was_used()]
    elif hasattr(model, "base_model_prefix"):
        from transformers.conversion_mapping import get_model_conversion_mapping

        conversions = get_model_conversion_mapping(model, add_legacy=False)
        # without a load nothing tells whether a checkpoint has the prefix
        conversions = [one for one in conversions if type(one).__name__ != "PrefixChange"]
    return [one.reverse_transform() for one in reversed(conversions or ())]


def is_split(reversal: Any) -> bool:
    """Return whether a reversed conversion only cuts a tensor into equal parts."""
    cuts = getattr(reversal, "operations", ())
    known = {type(cut).__name__ for cut in cuts} <= SPLITS
    counted = any(getattr(cut, "num_shards_attribute", None) for cut in cuts)
    return bool(cuts) and known and not counted


def renamed(name: str, renamings: Iterable[Any]) -> str:
    """Return a tensor's name after all renamings."""
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name


def without_wrappers(name: str) -> str:
    """Remove the name of the wrapper module that FSDP's activation checkpointing inserts."""
    return name.replace("_checkpoint_wrapped_module.", "")


def is_zero3(tensor: torch.Tensor) -> bool:
    """Return whether ZeRO-3 manages the tensor."""
    return hasattr(tensor, "ds_numel")


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the full shape; a ZeRO-3 shard has `numel() == 0`, and its full shape is `ds_shape`."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))
