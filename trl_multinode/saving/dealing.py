"""Rollouts of a checkpoint that another number of ranks wrote, dealt anew over the ranks of this launch.

This needs the same global batch: the rows of an optimizer step and of a generation round stay together, whichever rank
trains them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from ..rollouts.groups import Group
from ..rollouts.saved_groups import SavedGroups, decoded, encoded
from .open_groups import NAME
from .saved_rollouts import SavedRollouts, load_rollouts, pack_block, unpack_block


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


def load_dealt(folder: Path, layout: list[int], rank: int) -> SavedRollouts | None:
    """Load the share of `rank` in the rollouts of all ranks that wrote a checkpoint.

    Returns:
        `SavedRollouts`, *optional*: `None` if the file of a rank cannot be used, if the batches differ, or if rows do
            not say to which completion their values belong (images).
    """
    files = _files_of_all(folder, Layout(*layout))
    if files is None:
        return None
    was, now = Layout(*files[0].notes["layout"]), Layout(*layout)
    block = dealt_block([unpack_block(file) for file in files], was, now, rank)
    if block is None:
        return None
    saved = pack_block(block)
    if all(NAME in file.notes for file in files):
        groups = _dealt_open(files, was, now, rank)
        if groups is None:
            return None
        saved.tensors[NAME], saved.notes[NAME] = groups, files[0].notes[NAME]
    return saved


def _files_of_all(folder: Path, now: Layout) -> list[SavedRollouts] | None:
    """Load the rollouts of all ranks that wrote a checkpoint; `None` if they cannot be dealt anew."""
    first = load_rollouts(folder, 0)
    if first is None or "layout" not in first.notes:
        return None
    was = Layout(*first.notes["layout"])
    files = [load_rollouts(folder, number) for number in range(was.ranks)]
    whole = [file for file in files if file and file.notes.get("layout") == first.notes["layout"]]
    return whole if len(whole) == was.ranks and was.batches == now.batches else None


# ---- open groups ----------------------------------------------------------------------------------------------------


def _dealt_open(
    files: Sequence[SavedRollouts], was: Layout, now: Layout, rank: int
) -> torch.Tensor | None:
    """Return the share of a rank in the open groups of all files, encoded; `None` if they cannot be dealt evenly."""
    parts = [decoded(file.tensors[NAME].numpy().tobytes()) for file in files]
    deal = dealt_groups if files[0].notes[NAME]["in_flight"] else dealt_rounds
    share = deal(parts, was, now, rank)
    if share is None:
        return None
    newest = max(part.last_begun for part in parts)
    updates = {update: made for part in parts for update, made in part.updates.items()}
    own = SavedGroups(newest, updates, [group for group, _ in share], [index for _, index in share])
    return torch.frombuffer(bytearray(encoded(own)), dtype=torch.uint8)


def dealt_groups(
    parts: Sequence[SavedGroups], was: Layout, now: Layout, rank: int
) -> list[tuple[Group, int | None]] | None:
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
    share = []
    for _, position, group, index in found[rank :: now.ranks]:
        first = rank * now.rows_of_rank // len(group.prompts)
        share.append((replace(group, place=position - first), index))
    return share


def dealt_rounds(
    parts: Sequence[SavedGroups], was: Layout, now: Layout, rank: int
) -> list[tuple[Group, int | None]]:
    """Return the part of a rank of each round that ran ahead; the ranks' parts follow each other in a round."""
    rounds: dict[int, list[Group]] = {}
    for part in parts:
        for group in part.groups:
            rounds.setdefault(group.number, []).append(group)
    share: list[tuple[Group, int | None]] = []
    for _, of_ranks in sorted(rounds.items()):
        own: dict[str, Any] = {}
        for name in ("prompts", "seeds", "rollouts", "begun_rows"):
            rows = [row for group in of_ranks for row in getattr(group, name) or ()]
            own[name] = rows[rank * now.rows_of_rank :][: now.rows_of_rank] or None
        share.append((replace(of_ranks[0], **own), None))
    return share


# ---- the block ------------------------------------------------------------------------------------------------------


def dealt_block(
    blocks: Sequence[list[dict]], was: Layout, now: Layout, rank: int
) -> list[dict] | None:
    """Return the slices of a rank; `None` if values cannot be told apart by row. An optimizer step keeps its rows."""
    whole = [part for block in blocks for part in block]
    if not whole:
        return []
    if not all(_rows_are_known(part, whole[0], was) for part in whole):
        return None
    slices: list[dict] = []
    for first in range(0, was.slices, was.accumulation):
        step = [part for block in blocks for part in block[first : first + was.accumulation]]
        for number in range(now.accumulation):
            start = (rank * now.accumulation + number) * now.rows
            slices.append(joined_rows(step, slice(start, start + now.rows)))
    return slices


def _rows_are_known(part: dict, first: dict, was: Layout) -> bool:
    """Return whether the values of a slice can be told apart by row, and slices make whole optimizer steps."""
    sizes = {len(value) for value in part.values() if _has_rows(value)}
    is_alike = sizes == {was.rows} and part.keys() == first.keys() and "num_images" not in part
    return is_alike and was.slices % was.accumulation == 0


def joined_rows(slices: Sequence[dict], wanted: slice) -> dict[str, Any]:
    """Join the wanted rows of slices; tensors are padded to the widest, prompts on the left."""
    found = dict(slices[0])
    for name, value in found.items():
        if not _has_rows(value):
            continue
        rows = [row for part in slices for row in part[name]][wanted]
        if isinstance(value, list):
            found[name] = rows
        elif value.ndim == 1:
            found[name] = torch.stack(rows)
        else:
            side = "left" if name.startswith("prompt") else "right"
            found[name] = pad_sequence(rows, batch_first=True, padding_side=side)
    return found


def _has_rows(value: Any) -> bool:
    return isinstance(value, list) or value.ndim > 0
