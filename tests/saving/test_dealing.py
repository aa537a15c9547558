"""Rollouts of a checkpoint, dealt anew over another number of ranks."""

from pathlib import Path

import numpy as np
import pytest
import torch

from trl_multinode.engine.client import Rollout
from trl_multinode.rollouts.groups import Group
from trl_multinode.rollouts.saved_groups import SavedGroups, decoded, encoded
from trl_multinode.saving.dealing import load_dealt
from trl_multinode.saving.saved_rollouts import (
    SavedRollouts,
    pack_block,
    save_rollouts,
    unpack_block,
)
from trl_multinode.wire.messages import WeightVersion

# 24 rows a round, which is two optimizer steps; (ranks, rows, slices, iterations, accumulation)
FOUR, THREE, TWO = [4, 1, 6, 1, 3], [3, 2, 4, 1, 2], [2, 3, 4, 1, 2]


def row(token: int) -> Rollout:
    return Rollout(np.array([token]), np.array([-0.5], np.float32), WeightVersion(3, 4), 0)


def write(folder: Path, layout: list[int], groups=None, in_flight=False, block=True) -> None:
    """Files of all ranks. Row r of slice s of rank k has the token 100 k + 10 s + r, with r tokens in front."""
    ranks, rows, slices, *_ = layout
    for rank in range(ranks):
        parts = []
        for number in range(slices if block else 0):
            tokens = [100 * rank + 10 * number + one for one in range(rows)]
            width = 1 + rank
            ids = torch.tensor(tokens)[:, None] * torch.ones(1, width, dtype=torch.long)
            parts.append(
                {
                    "prompt_ids": ids,
                    "completion_ids": ids,
                    "advantages": torch.tensor(tokens),
                    "num_items_in_batch": torch.tensor(7),
                    "names": list(map(str, tokens)),
                    "none": None,
                }
            )
        saved = pack_block(parts)
        saved.notes["layout"] = layout
        if groups is not None:
            own = groups(rank)
            indices = (
                [10 * group.number + group.prompts[0][0] for group in own]
                if in_flight
                else [None] * len(own)
            )
            data = encoded(SavedGroups(5, {3: (2, 4)}, own, indices))
            saved.tensors["open"] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            saved.notes["open"] = {"in_flight": in_flight}
        save_rollouts(folder, rank, saved)


def dealt(folder: Path, layout: list[int]) -> list[SavedRollouts]:
    return [load_dealt(folder, layout, rank) for rank in range(layout[0])]


def steps(blocks: list[list[dict]], layout: list[int]) -> list[list[int]]:
    """Rows of each optimizer step, in the order of ranks and micro-steps."""
    accumulation = layout[4]
    return [
        [
            int(one)
            for block in blocks
            for part in block[first : first + accumulation]
            for one in part["advantages"]
        ]
        for first in range(0, layout[2], accumulation)
    ]


@pytest.mark.parametrize("now", [THREE, TWO], ids=["three", "two"])
def test_an_optimizer_step_inside_a_block_keeps_its_rows(tmp_path, now):
    write(tmp_path, FOUR)
    before = [
        [100 * rank + 10 * part for rank in range(4) for part in range(3 * step, 3 * step + 3)]
        for step in (0, 1)
    ]
    blocks = [unpack_block(saved) for saved in dealt(tmp_path, now)]
    assert [len(block) for block in blocks] == [now[2]] * now[0]
    assert steps(blocks, now) == before
    for part in (part for block in blocks for part in block):
        assert len(part["advantages"]) == now[1] and int(part["num_items_in_batch"]) == 7
        assert part["names"] == [str(int(one)) for one in part["advantages"]]
        # padding is on the side of TRL's
        assert part["prompt_ids"][:, -1].tolist() == part["advantages"].tolist()
        assert part["completion_ids"][:, 0].tolist() == part["advantages"].tolist()


def test_the_round_ahead_is_cut_anew(tmp_path):
    def ahead(rank: int) -> list[Group]:
        rows = range(6 * rank, 6 * rank + 6)
        return [
            Group(
                5,
                0,
                [],
                [[one] for one in rows],
                5,
                seeds=list(rows),
                rollouts=list(map(row, rows)),
            )
        ]

    write(tmp_path, FOUR, ahead, block=False)
    found = [decoded(saved.tensors["open"].numpy().tobytes()) for saved in dealt(tmp_path, THREE)]
    for rank, part in enumerate(found):
        rows = list(range(8 * rank, 8 * rank + 8))
        (group,) = part.groups
        assert [prompt[0] for prompt in group.prompts] == rows == group.seeds
        assert [int(one.tokens[0]) for one in group.rollouts] == rows
        assert (part.last_begun, part.updates, part.indices) == (5, {3: (2, 4)}, [None])


def test_groups_in_flight_are_dealt_evenly_and_keep_their_place_in_the_dataset(tmp_path):
    """Two prompts of three rows per rank and round; the first rank has one of an older round."""

    def begun(rank: int) -> list[Group]:
        places = [(4, rank % 2), (5, 0), (5, 1)]
        return [
            Group(number, place, [], [[2 * rank + place]] * 3, number) for number, place in places
        ]

    write(tmp_path, FOUR, begun, in_flight=True, block=False)
    found = [decoded(saved.tensors["open"].numpy().tobytes()) for saved in dealt(tmp_path, TWO)]
    assert [len(part.groups) for part in found] == [6, 6]
    assert [group.number for part in found for group in part.groups] == [4, 4, 5, 5, 5, 5] * 2
    seen = []
    for rank, part in enumerate(found):
        for group, index in zip(part.groups, part.indices, strict=True):
            position = 4 * rank + group.place
            assert group.prompts[0] == [position] and index == 10 * group.number + position
            seen.append((group.number, position))
    assert len(set(seen)) == 12


@pytest.mark.parametrize(
    "why", ["another batch", "a file is missing", "images", "one image a row", "another layout"]
)
def test_rollouts_that_cannot_be_dealt_are_left(tmp_path, why):
    write(tmp_path, FOUR)
    now = THREE
    if why == "another batch":
        now = [3, 2, 3, 1, 3]
    elif why == "a file is missing":
        (tmp_path / "rollouts_rank2.safetensors").unlink()
    elif why == "another layout":
        save_rollouts(tmp_path, 2, SavedRollouts({}, {"layout": THREE, "block": []}))
    else:
        number = 1 if why == "one image a row" else 5
        part = {"pixel_values": torch.zeros(number, 2), "advantages": torch.zeros(1)}
        saved = pack_block([part | {"num_images": [number]}] * 6)
        saved.notes["layout"] = FOUR
        for rank in range(4):
            save_rollouts(tmp_path, rank, saved)
    assert dealt(tmp_path, now) == [None] * 3
