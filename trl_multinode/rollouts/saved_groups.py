"""Open groups of one rank in a checkpoint, as msgpack, without the rows of the dataset."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from ..engine.client import Rollout
from ..wire.messages import VersionSpan, WeightVersion
from .groups import Group
from .rounds import Rounds


class SavedGroups(msgspec.Struct):
    """Snapshot of the open groups, with rows under way as far as they are made."""

    last_begun: int  # last round whose groups were begun
    updates: dict[int, tuple[int, int]]  # round and step of every weight update that made a token
    groups: list[Group]  # without `inputs`
    # per group: the index of its row in the dataset, if it has one row of it
    indices: list[int | None]

    @classmethod
    def of(cls, rounds: Rounds, index_of: Callable[[Group], int | None]) -> "SavedGroups":
        """Take a snapshot of the rounds of this rank.

        Args:
            rounds (`Rounds`):
                Rounds of this rank.
            index_of (`Callable[[Group], int | None]`):
                Function that returns the index of a group's row in the dataset, if the group has one row of it.
        """
        groups = rounds.groups.snapshot()
        rows = [
            row
            for group in groups
            for row in (*group.rollouts, *group.begun_rows)
            if row is not None
        ]
        return cls(
            rounds.last_begun,
            rounds.updates.of_rows(rows),
            # the settings of the resumed run hold for rows that begin again
            [replace(group, inputs=[], min_update=0, max_tokens=None) for group in groups],
            [index_of(group) for group in groups],
        )

    def restore_to(
        self, rounds: Rounds, row_of: Callable[[int | None, list[int]], dict[str, Any]]
    ) -> None:
        """Open the groups again. A resumed run counts updates anew; those of the saved rows are below 0.

        Args:
            rounds (`Rounds`):
                Rounds of this rank.
            row_of (`Callable[[int | None, list[int]], dict]`):
                Function that returns a row of the dataset by its index, and checks that it has these prompt ids.
        """
        shift = -1 - max(self.updates, default=0)
        for group, index in zip(self.groups, self.indices, strict=True):
            row = row_of(index, group.prompts[0])
            group.inputs = [deepcopy(row) for _ in group.prompts]
            group.rollouts = [_renumbered(row, shift) for row in group.rollouts]
            group.begun_rows = [_renumbered(row, shift) for row in group.begun_rows]
        updates = {update + shift: made for update, made in self.updates.items()}
        rounds.restore(self.groups, self.last_begun, updates)


def _renumbered(row: Rollout | None, shift: int) -> Rollout | None:
    """Return a row whose updates have other numbers."""
    if row is None:
        return None
    version = WeightVersion(row.version.update + shift, row.version.step)
    spans = tuple(VersionSpan(span.update + shift, span.step, span.end) for span in row.versions)
    return replace(row, version=version, versions=spans)


def encoded(saved: SavedGroups) -> bytes:
    """Return a snapshot as msgpack."""
    return msgspec.msgpack.encode(saved, enc_hook=_parts_of)


def decoded(data: bytes) -> SavedGroups:
    """Invert [`encoded`]."""
    return msgspec.msgpack.decode(data, type=SavedGroups, dec_hook=_array_of)


def _parts_of(array: np.ndarray) -> tuple[str, bytes]:
    return array.dtype.str, array.tobytes()


def _array_of(kind: type, parts: tuple[str, bytes]) -> np.ndarray:
    dtype, data = parts
    return np.frombuffer(data, dtype)
