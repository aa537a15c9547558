"""Open groups in a checkpoint: the index of their row in the dataset, and what a resume refuses."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from refusals import refused
from trl.trainer.utils import RepeatSampler

from trl_multinode.node_settings import NodeSettings
from trl_multinode.rollouts.groups import Group
from trl_multinode.rollouts.saved_groups import SavedGroups, encoded
from trl_multinode.saving.open_groups import OpenGroupsFile, check_same_way
from trl_multinode.saving.saved_rollouts import SavedRollouts

# ranks, groups of a rank and round, rows of a group, micro-steps of a round
WORLD, QUOTA, SIZE, REPEATS = (
    3,
    2,
    4,
    2,
)
# 3 rounds of 6 prompts, and two that TRL drops
DATASET = [{"prompt": f"row {index}"} for index in range(20)]


def file_of(rank: int = 0, shuffle: bool = True, dataset=DATASET) -> OpenGroupsFile:
    trainer = SimpleNamespace(
        vllm_generation=SimpleNamespace(rounds=None),
        host=SimpleNamespace(topology=f"node 0, rank {rank}", settings=NodeSettings(max_staleness=2)),
        args=SimpleNamespace(generation_batch_size=WORLD * QUOTA * SIZE, seed=7),
        accelerator=SimpleNamespace(process_index=rank, num_processes=WORLD),
        num_generations=SIZE, train_dataset=dataset, shuffle_dataset=shuffle,
        _tokenize_prompts=lambda prompts: ([list(prompts[0].encode())], None, {}),
    )  # fmt: skip
    return OpenGroupsFile(trainer)


def group(number: int, place: int, prompt: str) -> Group:
    return Group(number, place, [{"prompt": prompt}] * SIZE, [[1]] * SIZE, due=number)


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_index_of_a_group_is_the_one_that_trls_sampler_draws_in_every_epoch(shuffle):
    sampler = RepeatSampler(DATASET, SIZE, WORLD * QUOTA, REPEATS, shuffle, seed=7)
    for epoch in range(3):
        drawn = list(sampler)
        for number in range(3):
            block = drawn[number * REPEATS * WORLD * QUOTA * SIZE :][: WORLD * QUOTA * SIZE : SIZE]
            for rank in range(WORLD):
                for place, index in enumerate(block[rank * QUOTA : (rank + 1) * QUOTA]):
                    of_rank = group(3 * epoch + number, place, DATASET[index]["prompt"])
                    assert file_of(rank, shuffle)._index_of(of_rank) == index


def test_another_order_of_the_dataset_is_noticed_when_the_checkpoint_is_written():
    with refused("train_dataset", "`max_staleness=1`", got=19):
        file_of()._index_of(group(1, 0, "none of them"))


def test_another_dataset_is_noticed_when_its_groups_are_restored():
    assert file_of()._row_of(3, list(b"row 3")) == {"prompt": "row 3"}
    for index in (3, 30):
        with refused("train_dataset", got=index):
            file_of()._row_of(index, list(b"another"))


def test_a_checkpoint_with_open_groups_resumes_only_in_the_same_way():
    folder = Path("checkpoint-3")
    for was, now, usable in [
        (False, False, False),
        (False, True, False),
        (False, True, True),
        (True, True, True),
    ]:
        check_same_way(folder, was, now, usable)
    with refused("max_staleness", "`max_staleness=2`"):
        check_same_way(folder, True, False, True)
    with refused("resume_from_checkpoint", got=folder):
        check_same_way(folder, True, True, False)


def test_groups_of_another_size_are_refused():
    larger = Group(0, 0, [], [[1]] * (SIZE + 1), due=0)
    data = encoded(SavedGroups(last_begun=0, updates={}, groups=[larger], indices=[0]))
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    saved = SavedRollouts({"open": tensor}, {"open": {"in_flight": True}})
    with refused("num_generations", got=4, expected=5):
        file_of().restore_from(saved)
