"""Open groups of one rank in a checkpoint: flat arrays and JSON notes, without the rows of the dataset."""

from collections.abc import Callable
from copy import deepcopy
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ..engine.client import Rollout
from ..wire.messages import VersionSpan, WeightVersion
from .groups import Group
from .rounds import Rounds


def to_arrays(rounds: Rounds, index_of: Callable[[Group], int | None]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Convert a snapshot of the open groups, with rows under way as far as they are made, to arrays and notes.

    Args:
        rounds (`Rounds`):
            Rounds of this rank.
        index_of (`Callable[[Group], int | None]`):
            Function that returns the index of a group's row in the dataset, if the group has one row of it.
    """
    groups = rounds.groups.snapshot()
    found = [pair for group in groups for pair in zip(group.rollouts, group.begun_rows, strict=True)]
    made = [(place, ended or begun, ended is not None) for place, (ended, begun) in enumerate(found) if ended or begun]
    rows = [row for _, row, _ in made if row is not None]
    prompts = [prompt for group in groups for prompt in group.prompts]
    spans = [(span.update, span.step, span.end) for row in rows for span in row.versions]
    arrays = {
        "places": np.asarray([place for place, _, _ in made], np.int32),
        "ended": np.asarray([ended for _, _, ended in made], np.int32),
        "lengths": np.asarray([len(row.tokens) for row in rows], np.int32),
        "tokens": np.concatenate([np.empty(0, np.int32), *(row.tokens for row in rows)]),
        "logprobs": np.concatenate([np.empty(0, np.float32), *(row.logprobs for row in rows)]),
        "engines": np.asarray([row.engine for row in rows], np.int32),
        "span_counts": np.asarray([len(row.versions) for row in rows], np.int32),
        "spans": np.asarray(spans, np.int32).reshape(-1, 3),
        "prompt_lengths": np.asarray([len(prompt) for prompt in prompts], np.int32),
        "prompts": np.concatenate([np.empty(0, np.int32), *(np.asarray(prompt, np.int32) for prompt in prompts)]),
    }
    notes = {
        "last_begun": rounds.last_begun,
        "updates": [[update, *found] for update, found in rounds.updates.of_rows(rows).items()],
        "groups": [
            {
                "number": group.number, "place": group.place, "index": index_of(group), "attempt": group.attempt,
                "due": group.due, "begun": group.begun, "seeds": group.seeds, "size": len(group.rollouts),
            }
            for group in groups
        ],
    }  # fmt: skip
    return arrays, notes


def restore(
    rounds: Rounds,
    arrays: dict[str, np.ndarray],
    notes: dict[str, Any],
    row_of: Callable[[int | None, list[int]], dict[str, Any]],
) -> None:
    """Restore what [`to_arrays`] saved. A resumed run counts updates anew; those of the saved rows are below 0.

    Args:
        row_of (`Callable[[int | None, list[int]], dict]`):
            Function that returns a row of the dataset by its index, and checks that it has these prompt ids.
    """
    last = max([update for update, *_ in notes["updates"]], default=0)
    rows = list(zip(arrays["places"].tolist(), arrays["ended"].tolist(), _rollouts(arrays, last), strict=True))
    rollouts = {place: row for place, ended, row in rows if ended}
    begun = {place: row for place, ended, row in rows if not ended}
    groups, start = [], 0
    prompts = [prompt.tolist() for prompt in _split(arrays["prompts"], arrays["prompt_lengths"])]
    for saved in notes["groups"]:
        places, start = range(start, start + saved["size"]), start + saved["size"]
        row = row_of(saved["index"], prompts[places[0]])
        groups.append(
            Group(
                saved["number"], saved["place"], [deepcopy(row) for _ in places], [prompts[place] for place in places],
                saved["due"], saved["begun"], seeds=saved["seeds"],
                rollouts=[rollouts.get(place) for place in places],
                begun_rows=[begun.get(place) for place in places],
                attempt=saved.get("attempt", 0),
            )
        )  # fmt: skip
    updates = {update - last - 1: (number, step) for update, number, step in notes["updates"]}
    rounds.restore(groups, notes["last_begun"], updates)


def _rollouts(arrays: dict[str, np.ndarray], last: int) -> list[Rollout]:
    rows = zip(
        _split(arrays["tokens"], arrays["lengths"]),
        _split(arrays["logprobs"], arrays["lengths"]),
        _split(arrays["spans"], arrays["span_counts"]),
        arrays["engines"].tolist(),
        strict=True,
    )
    found = []
    for tokens, logprobs, spans, engine in rows:
        versions = tuple(VersionSpan(update - last - 1, step, end) for update, step, end in spans.tolist())
        found.append(Rollout(tokens, logprobs, WeightVersion(versions[0].update, versions[0].step), engine, versions))
    return found


def _split(values: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    ends = [0, *accumulate(lengths.tolist())]
    return [values[start:end] for start, end in pairwise(ends)]
