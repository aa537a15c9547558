"""Rollouts of one rank in a checkpoint: a safetensors file with tensors and JSON."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file


@dataclass(frozen=True)
class SavedRollouts:
    """Generation state of one rank, as a checkpoint stores it."""

    tensors: dict[str, torch.Tensor]  # names with a slash: "block0/prompt_ids", "ahead/tokens"
    notes: dict  # all other values, as plain JSON


def rollouts_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's rollouts in a checkpoint."""
    return folder / f"rollouts_rank{rank}.safetensors"


def save_rollouts(folder: Path, rank: int, saved: SavedRollouts) -> None:
    """Save a rank's rollouts; the rename from `.part` ensures that a killed run leaves no partial `.safetensors`."""
    path = rollouts_file(folder, rank)
    part = path.with_suffix(".part")
    # a copy of each, because safetensors refuses slices that share memory
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in saved.tensors.items()}
    save_file(tensors, part, metadata={"notes": json.dumps(saved.notes)})
    part.replace(path)


def load_rollouts(folder: Path, rank: int) -> SavedRollouts | None:
    """Load a rank's rollouts; `None` if the checkpoint has no such file of ours (from plain TRL, or fewer ranks)."""
    try:
        with safe_open(rollouts_file(folder, rank), framework="pt") as file:
            notes = json.loads((file.metadata() or {})["notes"])
            return SavedRollouts({name: file.get_tensor(name) for name in file.keys()}, notes)
    # missing, cut off, or written by something else
    except (
        OSError,
        SafetensorError,
        KeyError,
        ValueError,
    ):
        return None


def pack_block(slices: list[dict]) -> SavedRollouts:
    """Convert TRL's `_buffered_inputs`, a list of dicts of tensors, lists and `None`, into [`SavedRollouts`]."""
    tensors: dict[str, torch.Tensor] = {}
    lists: list[dict[str, list]] = []
    for index, part in enumerate(slices):
        lists.append({})
        for name, value in part.items():
            if isinstance(value, torch.Tensor):
                tensors[f"block{index}/{name}"] = value
            elif isinstance(value, list):
                lists[index][name] = value
    return SavedRollouts(tensors, {"block": lists})


def unpack_block(saved: SavedRollouts, device: torch.device | str = "cpu") -> list[dict]:
    """Invert [`pack_block`]; `None` entries stay absent, because TRL reads them with `get`."""
    slices = [dict(lists) for lists in saved.notes["block"]]
    for name, tensor in saved.tensors.items():
        group, _, key = name.partition("/")
        if group.startswith("block"):
            slices[int(group.removeprefix("block"))][key] = tensor.to(device)
    return slices
