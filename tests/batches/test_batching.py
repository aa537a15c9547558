"""The plan: properties that hold for any lengths, and what it is worth on lengths like those of real rollouts."""

import numpy as np
import pytest

from trl_multinode.batches.batching import plan_micro_steps
from trl_multinode.testing.replay import log_normal_length

CAP, LINEAR = 4 * 768, 6 * 64


def rollouts(ranks: int, rows: int, seed: int = 0) -> list[list[int]]:
    """Log-normal lengths in groups of 8, shuffled within a rank as TRL does."""
    lengths = [log_normal_length([seed, row // 8], row % 8) for row in range(ranks * rows)]
    lengths[0] = 768
    return np.random.default_rng(seed).permuted(np.reshape(lengths, (ranks, rows)), axis=1).tolist()


def nodes(ranks: int, per_node: int) -> list[list[int]]:
    return [list(range(first, first + per_node)) for first in range(0, ranks, per_node)]


SHAPES = [(1, 1, 8), (1, 1, 1), (2, 2, 32), (4, 4, 64), (4, 2, 16), (4, 1, 16), (14, 7, 8), (3, 3, 1), (8, 8, 2)]


@pytest.mark.parametrize(("ranks", "per_node", "rows"), SHAPES)
@pytest.mark.parametrize("cap", [768, CAP, 100_000])
@pytest.mark.parametrize("seed", range(3))
def test_every_row_once_within_the_cap_on_its_node_and_as_many_bins_on_every_rank(ranks, per_node, rows, cap, seed):
    lengths = rollouts(ranks, rows, seed)
    found = plan_micro_steps(lengths, nodes(ranks, per_node), cap, LINEAR)
    assert sorted(row for bins in found.bins for numbers in bins for row in numbers) == list(range(ranks * rows))
    assert {len(bins) for bins in found.bins} == {found.micro_steps}
    assert all(numbers for bins in found.bins for numbers in bins), "an empty bin would break the lock-step"
    assert found.slots().max() <= cap
    assert (found.targets() // per_node == found.owners // per_node).all(), "a row left its node"
    assert found.lengths.tolist() == [length for rank in lengths for length in rank]


@pytest.mark.parametrize("length", [1, 100, 768])
def test_equal_lengths_and_extreme_ones(length):
    found = plan_micro_steps([[length] * 16] * 2, nodes(2, 2), 768, LINEAR)
    assert found.slots().max() <= 768 and found.lock_step_efficiency() > 0.99
    one_long = plan_micro_steps([[768] + [1] * 15, [1] * 16], nodes(2, 2), 768, LINEAR)
    assert one_long.slots().max() <= 768 and sum(len(numbers) for numbers in one_long.bins[0]) < 16 + 8


def test_nodes_with_unlike_rows_still_have_as_many_bins():
    found = plan_micro_steps([[700] * 8, [700] * 8, [10] * 8, [10] * 8], nodes(4, 2), 768, LINEAR)
    assert {len(bins) for bins in found.bins} == {8}


@pytest.mark.parametrize(("ranks", "rows", "share", "lock_step"), [(2, 128, 0.9, 0.97), (4, 64, 0.9, 0.95)])
def test_worth(ranks, rows, share, lock_step):
    """256 rows a step: design goal 0.85 real tokens a slot with 4 rows a micro-batch, lock-step included."""
    for seed in range(5):
        lengths = rollouts(ranks, rows, seed)
        found = plan_micro_steps(lengths, nodes(ranks, ranks), CAP, LINEAR)
        tokens = sum(map(sum, lengths))
        assert tokens / found.slots().sum() > share
        assert tokens / (ranks * found.slots().max(axis=0).sum()) > 0.85
        assert found.lock_step_efficiency() > lock_step and found.mean_rows >= 4


def test_the_most_expensive_micro_steps_come_first_on_every_node():
    """So that nodes, which plan alone, are in step with each other, and memory runs out at once or never."""
    costs = plan_micro_steps(rollouts(4, 64), nodes(4, 2), CAP, LINEAR).costs()
    for node in (costs[:2], costs[2:]):
        assert (np.diff(node.max(axis=0)) <= 0).all()


def test_the_plan_is_the_same_for_everyone_who_makes_it():
    first, second = (plan_micro_steps(rollouts(4, 32), nodes(4, 2), CAP, LINEAR).bins for _ in range(2))
    assert first == second
