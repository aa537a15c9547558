"""Batches of an epoch that must be known before TRL generates for them."""

from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest

from trl_multinode.rollouts.upcoming import UpcomingBatches
from trl_multinode.trainer import MultiNodeGRPOTrainer


def next_blocks(
    num_batches: int, accumulation: int, block: int
) -> list[tuple[int, int | None, int]]:
    """transformers' loop over one epoch: at every block's first batch, what `after` and `place_in_window` say."""
    batches = [[index] for index in range(num_batches)]  # equal by value never: identity counts
    upcoming, found = UpcomingBatches(iter(batches), block), []
    used = 0
    while used < num_batches:
        window = []
        fetch = iter(upcoming.open_window())
        for _ in range(accumulation):
            batch = next(fetch, None)
            if batch is not None:
                window.append(batch)
        for place, batch in enumerate(window):
            if used % block == 0:
                following = upcoming.after(batch, block)
                found.append(
                    (batch[0], following and following[0], upcoming.place_in_window(batch) - place)
                )
            used += 1
    return found


@pytest.mark.parametrize(("accumulation", "block"), product([1, 2, 3, 4], [1, 2, 4, 6]))
def test_the_next_blocks_first_batch_is_known_when_a_block_begins(accumulation, block):
    starts = range(0, 12, block)
    expected = [(start, start + block if start + block < 12 else None, 0) for start in starts]
    assert next_blocks(12, accumulation, block) == expected


def test_batches_are_fetched_with_the_trainers_own_and_at_most_a_block_early():
    fetched = []
    upcoming = UpcomingBatches((fetched.append(i) or [i] for i in range(20)), 3)
    upcoming.open_window()
    assert next(upcoming) == [0] and len(fetched) == 4
    upcoming.after([0], 3)
    assert len(fetched) == 4
    upcoming.open_window()
    assert [next(upcoming) for _ in range(2)] == [[1], [2]] and len(fetched) == 6


def test_a_run_that_resumes_inside_a_block_without_its_rollouts_generates_the_batch_at_hand():
    batches = [[{"prompt": f"block {number // 8}"}] for number in range(96)]
    # step 3 of 4 batches each, in the middle of block 1
    upcoming = UpcomingBatches(iter(batches[12:]), 3 * 8)
    fetch = upcoming.open_window()
    window = [next(fetch) for _ in range(4)]
    trainer = SimpleNamespace(
        _recorder=None, _upcoming=upcoming, steps_per_round=8, _step=12, host=None,
        state=SimpleNamespace(max_steps=24, global_step=3), args=SimpleNamespace(gradient_accumulation_steps=4),
        _tokenize_prompts=lambda prompts: (prompts, None, {}),
    )  # fmt: skip
    trainer._after = partial(MultiNodeGRPOTrainer._after, trainer)
    found = [
        MultiNodeGRPOTrainer._batch_ahead(trainer, window[0], rounds)[0] for rounds in range(4)
    ]
    assert [rows[0]["prompt"] for rows in found] == [f"block {1 + rounds}" for rounds in range(4)]


def test_no_batch_follows_the_last_step_of_a_run_that_ends_inside_an_epoch():
    """Rounds of 8 micro-steps in 2 optimizer steps; the run ends after 3 of 12 rounds."""
    upcoming = UpcomingBatches(iter([[number] for number in range(96)]), 3 * 8)
    found = []
    for step in range(6):
        fetch = upcoming.open_window()
        window = [next(fetch) for _ in range(4)]
        trainer = SimpleNamespace(
            _upcoming=upcoming, steps_per_round=8, _step=4 * step,
            state=SimpleNamespace(max_steps=6, global_step=step), args=SimpleNamespace(gradient_accumulation_steps=4),
        )  # fmt: skip
        found.append(
            [MultiNodeGRPOTrainer._after(trainer, window[0], rounds) for rounds in (1, 2, 3)]
        )
    of_round = [[8 * number] if number < 3 else None for number in range(6)]
    assert found == [of_round[1 + step // 2 :][:3] for step in range(6)]


def test_a_batch_that_is_not_of_this_epoch_has_no_next():
    upcoming = UpcomingBatches(iter([[0], [1]]), 1)
    next(upcoming.open_window())
    assert upcoming.after([0], 1) is None  # equal, not the same
