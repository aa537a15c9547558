"""Data of a rollout that ran ahead: everything that TRL's code needs when its round is used."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np

from ..engine.client import Rollout
from ..images import images_of
from ..wire.messages import WeightVersion
from .upcoming import Batch

Images = list[list | None]  # PIL images of each row
PART = (
    "session_part"  # by which the rows of a session are found again; see `batches/session_rows.py`
)


@dataclass
class Turn:
    """One `generate` call, of a group or of a rank's whole round.

    Args:
        prompts (`list[list[int]]`):
            Token ids, one row per completion.
        rows (`list[Rollout]`):
            Completions, in the order of `prompts`.
        images (`list[list | None]`, *optional*):
            PIL images of each row.
    """

    prompts: list[list[int]]
    rows: list[Rollout]
    images: Images | None = None


class ToolLoop(NamedTuple):
    """Result of TRL's `_tool_call_loop`: rows in the order of the batch, counts over all of its rows.

    Args:
        tool_mask (`list[list[int]]`):
            1 for tokens of the model, 0 for tokens of a tool's result.
        completions (`list[list[dict]]`):
            Messages of each row, those of tools among them.
        completion_ids (`list[list[int]]`):
            Token ids of each row, those of tools among them.
        logprobs (`list[list[float]]`):
            Log-prob of each token, 0 for tokens of a tool's result.
        calls (`int`), failures (`int`):
            Number of calls of tools, and of those that failed.
        images (`list[list]`):
            Images in the tools' results of each row.
    """

    tool_mask: list[list[int]]
    completions: list[Any]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]
    calls: int
    failures: int
    images: list[list[Any]]


@dataclass
class Scores:
    """Rewards of one group, from the functions that were called for the group alone.

    Args:
        values (`list[list[float | None] | None]`):
            Rewards of each row, per reward function of the trainer; `None` for a function that TRL calls itself.
        extras (`dict[str, list]`):
            Values that the functions gave to `log_extra`, by column.
        metrics (`list[tuple[str, float]]`):
            Names and values that the functions gave to `log_metric`, in their order.
    """

    values: list[list[float | None] | None]
    extras: dict[str, list[Any]] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)

    def rewards_of(self, index: int) -> list[float | None]:
        """Return the rewards of a function that was called for the group."""
        rewards = self.values[index]
        assert rewards is not None, "a reward function of this group is called later"
        return rewards

    def leave_out(self, rows: Sequence[bool]) -> None:
        """Forget the rewards of some rows."""
        for rewards in filter(None, self.values):
            rewards[:] = [
                None if is_out else one for one, is_out in zip(rewards, rows, strict=True)
            ]

    def add_extra(self, column: str, values: list[Any]) -> None:
        """Keep the values of a column of the completions' log."""
        self.extras.setdefault(column, []).extend(values)

    def add_metric(self, name: str, value: float) -> None:
        """Keep the value of a metric."""
        self.metrics.append((name, value))


@dataclass
class Recorded:
    """Rollouts of the rows of one group, from the first prompt to the last turn.

    Args:
        inputs (`list[dict]`):
            Rows of the dataset, one per completion.
        prompts (`list`):
            Value of `prompts` in reward functions: messages or texts, with the observations of environments.
        completions (`list`), completion_ids (`list[list[int]]`):
            Values of these names in reward functions.
        turns (`list[Turn]`):
            All `generate` calls, the first one with all rows.
        fields (`list[dict]`):
            Extra fields of a `rollout_func` for each row, for rewards of the group. TRL adds them to the rows of the
            round itself, after it has looked there for images of the dataset.
        environments (`list`, *optional*):
            Environment of each row.
        tools (`ToolLoop`, *optional*):
            Result of the tool loop, if the trainer has tools.
        output (`dict`, *optional*):
            Result of the `rollout_func`, if the trainer has one.
        scores (`Scores`, *optional*):
            Rewards, if the group was scored before its round.
        pools (`list`):
            Pools with the environments, which no other group may use before the rewards were read.
    """

    inputs: Batch
    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    turns: list[Turn]
    fields: list[dict[str, Any]] = field(default_factory=list)
    environments: list[Any] | None = None
    tools: ToolLoop | None = None
    output: dict[str, Any] | None = None
    scores: Scores | None = None
    pools: list[Any] = field(default_factory=list)

    @property
    def rows(self) -> list[Rollout]:
        """Completions of all turns."""
        return [row for turn in self.turns for row in turn.rows]

    @property
    def first_turn(self) -> Turn:
        """The first completion of each row, with which the row that is trained begins.

        A `rollout_func` may generate more rows than it returns, so for one these are all tokens of its rows, and none
        if it has not asked an engine.
        """
        if self.output is None:
            return self.turns[0] if self.turns else Turn([], [])
        # sessions without calls are rows of the round too
        if self.turns or self.output.get(PART) is not None:
            return self._turn_of(self.output)
        return Turn([], [])

    def _turn_of(self, output: dict[str, Any]) -> Turn:
        made = self.rows
        # rows of sessions without calls have no tokens here
        version = min((row.version for row in made), default=WeightVersion(sys.maxsize))
        tokens = [np.asarray(ids, np.int32) for ids in output["completion_ids"]]
        if (parts := output.get(PART)) is not None:
            # behind the first row of a session, the tokens have other ones before them than those before them here
            lengths = [of_row.count(0) if made else 0 for of_row in parts]
            tokens = [ids[:length] for ids, length in zip(tokens, lengths, strict=True)]
        rows = [Rollout(ids, np.zeros(len(ids), np.float32), version, 0) for ids in tokens]
        # those with which TRL scores the rows
        images: Images = [images_of(row) for row in self.inputs]
        return Turn(output["prompt_ids"], rows, images if len(images) == len(rows) else None)


def joined_loop(loops: Iterable[ToolLoop]) -> ToolLoop:
    """Join the tool loops of a round's groups: rows follow each other, and counts are summed."""
    return ToolLoop(*(reduce(add, values) for values in zip(*loops, strict=True)))


def joined_output(outputs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join results of a `rollout_func`. A value that is no list holds for all rows of its group."""
    if len(outputs) == 1:
        return dict(outputs[0])
    names = dict.fromkeys(name for output in outputs for name in output)
    return {name: _joined_field(name, outputs) for name in names}


def _joined_field(name: str, outputs: Sequence[dict[str, Any]]) -> list[Any] | None:
    if all(output.get(name) is None for output in outputs):
        return None
    values: list[Any] = []
    for output in outputs:
        value, completions = output.get(name), output["completion_ids"]
        # TRL sums the mask of every row, and without one all tokens are the model's
        if value is None and name == "env_mask":
            value = [[1] * len(ids) for ids in completions]
        values += value if isinstance(value, list) else [value] * len(completions)
    return values
