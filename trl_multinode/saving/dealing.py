"""Rollouts of a checkpoint that another number of ranks wrote, dealt anew over the ranks of this launch.

This needs the same global batch: the rows of an optimizer step and of a generation round stay together, whichever rank
trains them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from ..rollouts.groups import Group
from ..rollouts.saved_groups import SavedGroups, decoded, encoded
from .saved_rollouts import SavedRollouts, load_rollouts, pack_block, unpack_block

OPEN = "open"  # name of the tensor and of the notes with open groups


@dataclass(frozen=True)
class Layout:
    """Sizes that fix rank and place of a row; the notes of a rollouts file have them as a list.

    Args:
        ranks (`int`), rows (`int`), slices (`int`), iterations (`int`), accumulation (`int`):
            Ranks, rows of a micro-step, micro-steps of a round, iterations over it, micro-steps of an optimizer step.
        whole (`int`, *optional*, defaults to 0):
            1 if open groups are whole rollouts.
    """

    ranks: int
    rows: int
    slices: int
    iterations: int
    accumulation: int
    whole: int = 0

    @property
    def rows_of_rank(self) -> int:
        """Rows of a rank in a round."""
        return self.rows * self.slices

    @property
    def batches(self) -> tuple[int, ...]:
        """Sizes over all ranks; rows can be dealt anew if they are equal."""
        per_step = self.ranks * self.rows * self.accumulation
        return self.ranks * self.rows_of_rank, per_step, self.iterations, self.whole


def load_dealt(
    folder: Path, layout: list[int], rank: int, device: torch.device
) -> SavedRollouts | None:
    """Load the share of `rank` in the rollouts of all ranks that wrote a checkpoint.

    Returns:
        `SavedRollouts`, *optional*: `None` if the file of a rank cannot be used, if the batches differ, or if rows do
            not say to which completion their values belong (images).
    """
    files = files_of_all(folder, device)
    if not files:
        return None
    was, now = Layout(*files[0].notes["layout"]), Layout(*layout)
    if was.batches != now.batches:
        return None
    block = dealt_block([unpack_block(file) for file in files], was, now, rank)
    if block is None:
        return None
    saved = pack_block(block)
    if any(OPEN not in file.notes for file in files):
        return saved
    parts = [decoded(file.tensors[OPEN].cpu().numpy().tobytes()) for file in files]
    deal = dealt_groups if files[0].notes[OPEN]["in_flight"] else dealt_rounds
    own = deal(parts, was, now, rank)
    if own is None:
        return None
    saved.tensors[OPEN] = torch.frombuffer(bytearray(encoded(own)), dtype=torch.uint8)
    saved.notes[OPEN] = files[0].notes[OPEN]
    return saved


def files_of_all(folder: Path, device: torch.device) -> list[SavedRollouts]:
    """Load the files of all ranks that wrote a checkpoint; none unless all are there and of one layout."""
    first = load_rollouts(folder, 0, device)
    if first is None or "layout" not in first.notes:
        return []
    layout = first.notes["layout"]
    files = [load_rollouts(folder, rank, device) for rank in range(layout[0])]
    whole = [file for file in files if file is not None and file.notes.get("layout") == layout]
    return whole if len(whole) == len(files) else []


# ---- open groups ----------------------------------------------------------------------------------------------------


def dealt_groups(
    parts: Sequence[SavedGroups], was: Layout, now: Layout, rank: int
) -> SavedGroups | None:
    """Return the share of a rank in groups of one prompt; `None` if they cannot be dealt evenly.

    The oldest groups go to different ranks, because every round takes as many from each. The place of a group counts
    from the first of this rank, as before: it may be negative, and still says where its row is in the dataset.
    """
    found: list[tuple[int, int, Group, int | None]] = []
    for number, part in enumerate(parts):
        for group, index in zip(part.groups, part.indices, strict=True):
            first = number * was.rows_of_rank // len(group.prompts)
            found.append((group.number, first + group.place, group, index))
    if len(found) % now.ranks:
        return None
    found.sort(key=lambda entry: entry[:2])
    groups, indices = [], []
    for _, position, group, index in found[rank :: now.ranks]:
        first = rank * now.rows_of_rank // len(group.prompts)
        groups.append(replace(group, place=position - first))
        indices.append(index)
    return _joined(parts, groups, indices)


def dealt_rounds(parts: Sequence[SavedGroups], was: Layout, now: Layout, rank: int) -> SavedGroups:
    """Return the part of a rank of each round that ran ahead; the ranks' parts follow each other in a round."""
    rows = slice(rank * now.rows_of_rank, (rank + 1) * now.rows_of_rank)
    rounds: dict[int, list[Group]] = {}
    for part in parts:
        for group in part.groups:
            rounds.setdefault(group.number, []).append(group)
    groups = []
    for _, of_ranks in sorted(rounds.items()):
        seeds = [seed for group in of_ranks for seed in group.seeds or ()]
        groups.append(
            replace(
                of_ranks[0],
                prompts=[one for group in of_ranks for one in group.prompts][rows],
                seeds=seeds[rows] or None,
                rollouts=[one for group in of_ranks for one in group.rollouts][rows],
                begun_rows=[one for group in of_ranks for one in group.begun_rows][rows],
            )
        )
    return _joined(parts, groups, [None] * len(groups))


def _joined(
    parts: Sequence[SavedGroups], groups: list[Group], indices: list[int | None]
) -> SavedGroups:
    updates = {update: made for part in parts for update, made in part.updates.items()}
    return SavedGroups(max(part.last_begun for part in parts), updates, groups, indices)


# ---- the block ------------------------------------------------------------------------------------------------------


def dealt_block(
    blocks: Sequence[list[dict]], was: Layout, now: Layout, rank: int
) -> list[dict] | None:
    """Return the slices of a rank; `None` if values cannot be told apart by row. An optimizer step keeps its rows."""
    if not any(blocks):
        return []
    if was.slices % was.accumulation:
        return None
    slices: list[dict] = []
    for first in range(0, was.slices, was.accumulation):
        step = [part for block in blocks for part in block[first : first + was.accumulation]]
        rows = joined_rows(step, was.rows)
        if rows is None:
            return None
        for number in range(now.accumulation):
            start = (rank * now.accumulation + number) * now.rows
            cut = slice(start, start + now.rows)
            slices.append(
                {name: value[cut] if _has_rows(value) else value for name, value in rows.items()}
            )
    return slices


def joined_rows(slices: Sequence[dict], num_rows: int) -> dict[str, Any] | None:
    """Join slices of `num_rows` rows each; tensors are padded to the widest, prompts on the left."""
    names = slices[0].keys()
    if any(part.keys() != names for part in slices):
        return None
    found: dict[str, Any] = {}
    for name in names:
        values = [part[name] for part in slices]
        if not _has_rows(values[0]):
            found[name] = values[0]
        elif any(len(value) != num_rows for value in values):
            return None
        elif isinstance(values[0], list):
            found[name] = [row for value in values for row in value]
        else:
            found[name] = torch.cat(_same_width(values, on_the_left=name.startswith("prompt")))
    return found


def _has_rows(value: Any) -> bool:
    return isinstance(value, list) or value.ndim > 0


def _same_width(tensors: Sequence[torch.Tensor], on_the_left: bool) -> list[torch.Tensor]:
    if tensors[0].ndim < 2:
        return list(tensors)
    width = max(tensor.shape[1] for tensor in tensors)
    padded = []
    for tensor in tensors:
        missing = width - tensor.shape[1]
        sides = (missing, 0) if on_the_left else (0, missing)
        # `pad` begins with the last dimension
        padded.append(pad(tensor, (0, 0) * (tensor.ndim - 2) + sides))
    return padded
