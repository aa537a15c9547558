"""Check that the safetensors in a folder are the trained model: every key, full shapes, dtypes, no byte missing.

The check reads only headers and gathers nothing, so one rank can decide alone: a ZeRO-3 shard carries its full shape.
The names in a file are not the model's own (tied weights are written once, mixtures of experts are split, PEFT removes
its adapter's name). The module gets them from the functions that save a model, called on tensors without data.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict, str_to_torch_dtype
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..errors import SavedWeightsError
from ..run.values import listed
from ..weights.names import is_zero3, shape_of, without_wrappers

# name in the file -> dtype as named by safetensors, full shape
Weights = dict[str, tuple[str, tuple[int, ...]]]

NAMES = {dtype: name for name, dtype in str_to_torch_dtype.items()}
SHOWN = 3  # maximum tensors that a message names per kind of problem
CURES = {
    "empty": "Under ZeRO-3 set `zero3_save_16bit_model: true` in the YAML, or "
    '`"stage3_gather_16bit_weights_on_model_save": true` in the DeepSpeed file; under FSDP '
    "`fsdp_state_dict_type: FULL_STATE_DICT`.",
    "unreadable": "Check whether the disk is full, and save again with `trainer.save_model()`.",
    "other": "Only the trainer may write into this folder: empty it, and save again with `trainer.save_model()`.",
}


def check_saved(folder: Path, model: nn.Module) -> None:
    """
    Check the weights in `folder` against `model`. Not a collective; meant for the main process.

    Args:
        folder (`Path`):
            Folder with the files of `save_model`: `model.safetensors`, an index with its shards, or
            `adapter_model.safetensors`.
        model (`nn.Module`):
            Trained model, unwrapped; may be sharded. The check reads only names, dtypes and shapes.

    Raises:
        `SavedWeightsError`: if they differ; the message names the folder, the first wrong tensors, the expected
            values and the cure.
    """
    expected = expected_weights(model)
    problems = find_problems(read_folder(folder, is_adapter=has_adapter(model)), expected)
    if problems:
        raise wrong(
            folder, "; ".join(problems.values()), "empty" if "empty" in problems else "other"
        )


def wrong(folder: Path, what: str, cure: str) -> SavedWeightsError:
    """Build the error for saved weights that are not the trained model's."""
    return SavedWeightsError(
        f"The weights saved in {folder} are not the trained model: {what}. Nothing of it was pushed. {CURES[cure]}"
    )


# ---- expected weights -----------------------------------------------------------------------------------------------


def expected_weights(model: nn.Module) -> Weights:
    """Return the tensors that `save_pretrained` writes for `model`, with full shapes."""
    state = state_without_data(model)
    if has_adapter(model):
        from peft import get_peft_model_state_dict

        if any(map(is_zero3, model.parameters())):  # transformers then leaves out frozen parameters
            frozen = {
                name for name, parameter in model.named_parameters() if not parameter.requires_grad
            }
            state = {name: tensor for name, tensor in state.items() if name not in frozen}
        state = get_peft_model_state_dict(model, state_dict=state)
    else:
        for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
            state.pop(name, None)
        state = revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model))
    found = {}
    for name, tensor in state.items():
        dtype = NAMES.get(tensor.dtype, str(tensor.dtype))
        found[name] = dtype, tuple(tensor.shape)
    return found


def has_adapter(model: nn.Module) -> bool:
    """Return whether saving writes an adapter instead of the model."""
    from peft import PeftModel

    return isinstance(model, PeftModel)


def state_without_data(model: nn.Module) -> dict[str, torch.Tensor]:
    """Build the model's state dict on the meta device without calling `state_dict()`, which may gather."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return {
        without_wrappers(name): torch.empty(shape_of(tensor), dtype=tensor.dtype, device="meta")
        for name, tensor in tensors.items()
    }


# ---- saved weights --------------------------------------------------------------------------------------------------


def read_folder(folder: Path, is_adapter: bool = False) -> Weights:
    """
    Read dtype and shape of every tensor of a saved model, from the headers alone.

    Raises:
        `SavedWeightsError`: if there are no weights, a file is truncated, an index does not match its shards, or the
            folder holds two saves.
    """
    single = folder / (ADAPTER_SAFE_WEIGHTS_NAME if is_adapter else SAFE_WEIGHTS_NAME)
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if is_adapter or not index.is_file():
        if not single.is_file():
            raise wrong(folder, f"there is no {single.name}", "empty")
        return read_file(single)
    if single.is_file():
        raise wrong(
            folder,
            f"both {single.name} and {index.name} are there, and the first would be loaded",
            "other",
        )
    try:
        weight_map = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise wrong(
            folder, f"{index.name} cannot be read ({type(error).__name__}: {error})", "unreadable"
        ) from error
    return read_shards(folder, weight_map)


def read_shards(folder: Path, weight_map: Mapping[str, str]) -> Weights:
    """Read all shards of an index, and check that they hold exactly the tensors that it lists."""
    found: Weights = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            raise wrong(folder, f"the index names {shard}, which is missing", "other")
        weights = read_file(folder / shard)
        in_index = {name for name, file in weight_map.items() if file == shard}
        if strangers := sorted(in_index ^ weights.keys()):
            raise wrong(
                folder, f"{shard} and the index disagree about {listed(strangers, SHOWN)}", "other"
            )
        found |= weights
    return found


def read_file(path: Path) -> Weights:
    """Read a file's header; safetensors checks the offsets in it against dtypes, shapes and the size of the file."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return {
                name: (piece.get_dtype(), tuple(piece.get_shape()))
                for name, piece in slices.items()
            }
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise wrong(
            path.parent, f"{path.name} ({size} bytes) cannot be read ({error})", "unreadable"
        ) from error


def find_problems(found: Weights, expected: Weights) -> dict[str, str]:
    """Map each kind of problem to its description; the result is empty without problems."""
    empty, differing = [], []
    for name, wanted in expected.items():
        got = found.get(name, wanted)
        if 0 in got[1] and 0 not in wanted[1]:
            empty.append(f"{name} {got[1]}, expected {wanted[1]}")
        elif got != wanted:
            differing.append(f"{name} {got}, expected {wanted}")
    lists = {
        "empty": ("without data", empty),
        "missing": ("missing", sorted(expected.keys() - found.keys())),
        "extra": ("unknown to the model", sorted(found.keys() - expected.keys())),
        "differing": ("different", differing),
    }
    return {
        kind: f"{len(names)} of {len(expected)} tensors {how}: {listed(names, SHOWN)}"
        for kind, (how, names) in lists.items()
        if names
    }
