"""The plan: properties that hold for any lengths, and what it is worth on lengths like those of real rollouts."""

import sys
from collections.abc import Callable

import numpy as np
import pytest

from trl_multinode.batches.batching import POOL_RANKS, POOL_ROWS, Plan, deal, plan_micro_steps

CAP, LINEAR = 4 * 768, 6 * 64


def rollouts(ranks: int, rows: int, seed: int = 0) -> np.ndarray:
    """Log-normal lengths in groups of 8, shuffled within a rank as TRL does: 100,000 of them in 10 ms."""
    random = np.random.default_rng(seed)
    spread = np.repeat(random.normal(size=(ranks * rows + 7) // 8), 8)[
        : ranks * rows
    ] + random.normal(size=ranks * rows)
    return random.permuted(
        np.clip(120 * np.exp(0.6 * spread), 4, 768).astype(int).reshape(ranks, rows), axis=1
    )


def lock_step_efficiency(plan: Plan) -> float:
    """The mean cost of a rank divided by the summed cost of each micro-step's most expensive bin."""
    costs = plan.costs()
    return costs.sum() / (len(costs) * costs.max(axis=0).sum())


def check(lengths: np.ndarray, groups: list[int], cap: int, plan: Plan) -> None:
    """What every plan must hold: each rank sees its own bins only, and all ranks together every row once."""
    ranks, rows = lengths.shape
    bins = [plan.bins(rank) for rank in range(ranks)]
    trained = [
        (row, rank) for rank, steps in enumerate(bins) for numbers in steps for row in numbers
    ]
    assert sorted(row for row, _ in trained) == list(range(lengths.size)), (
        "every row is trained exactly once"
    )
    assert [rank for _, rank in sorted(trained)] == plan.targets.tolist(), (
        "a row is sent to the rank that trains it"
    )
    assert {len(steps) for steps in bins} == {plan.micro_steps}, (
        "every rank has the same number of micro-steps"
    )
    assert all(numbers for steps in bins for numbers in steps), (
        "an empty bin would break the lock-step"
    )
    flat = lengths.reshape(-1)
    slots = [[len(numbers) * flat[numbers].max() for numbers in steps] for steps in bins]
    assert np.array_equal(slots, plan.slots()) and plan.slots().max() <= cap
    assert plan.owners.tolist() == [rank for rank in range(ranks) for _ in range(rows)]
    group = np.repeat(np.arange(len(groups)), groups)  # of each rank
    assert (group[plan.targets] == group[plan.owners]).all(), (
        "a row left the ranks between which it may move"
    )


LENGTHS = {
    "rollouts": lambda random, shape: np.clip(120 * np.exp(random.normal(size=shape)), 1, 768),
    "equal": lambda random, shape: np.full(shape, random.integers(1, 769)),
    "one giant row": lambda random, shape: np.where(
        np.arange(np.prod(shape)).reshape(shape) == 0, 768, 1
    ),
    "one node has all long rows": lambda random, shape: np.repeat(
        np.where(np.arange(shape[0]) < 2, 700, 10)[:, None], shape[1], axis=1
    ),
    "any": lambda random, shape: random.integers(1, 769, shape),
}


@pytest.mark.parametrize("kind", LENGTHS)
def test_the_properties_hold_for_any_shape_and_any_number_of_pools(kind):
    """Also with fewer rows per rank than nodes, and generation blocks of unequal sizes: a plan for each."""
    random = np.random.default_rng(0)
    for _ in range(60):
        nodes, per_node = random.integers(1, 10), random.integers(1, 9)
        limits = {
            "pool_rows": random.choice([1, 8, 50, POOL_ROWS]),
            "pool_ranks": random.choice([1, 6, POOL_RANKS]),
        }
        groups = [per_node] * nodes if random.integers(2) else [nodes * per_node]
        cap = int(random.choice([768, 1000, CAP, 100_000]))
        for rows in random.integers(1, 30, size=2):
            lengths = LENGTHS[kind](random, (nodes * per_node, rows)).astype(int)
            plan = plan_micro_steps(lengths, groups, cap, LINEAR, **limits)
            check(lengths, groups, cap, plan)
            in_pool = len(lengths) // plan.pools
            assert in_pool == 1 or in_pool * rows <= limits["pool_rows"]
            assert in_pool <= limits["pool_ranks"]


@pytest.mark.parametrize("kind", LENGTHS)
def test_the_properties_hold_for_nodes_with_different_numbers_of_ranks(kind):
    random = np.random.default_rng(0)
    for _ in range(60):
        groups = random.integers(1, 9, size=random.integers(2, 6)).tolist()
        rows, cap = int(random.integers(1, 30)), int(random.choice([768, 1000, CAP, 100_000]))
        lengths = LENGTHS[kind](random, (sum(groups), rows)).astype(int)
        limit = int(random.choice([2, POOL_RANKS]))
        plan = plan_micro_steps(lengths, groups, cap, LINEAR, pool_ranks=limit)
        check(lengths, groups, cap, plan)
        assert (np.diff(plan.costs().max(axis=0)) <= 0).all()


def test_uneven_nodes_wait_for_each_other_little_longer_than_even_ones():
    lengths = rollouts(31, 64)
    uneven = plan_micro_steps(lengths, [7, 8, 8, 8], CAP, LINEAR)
    even = plan_micro_steps(lengths[:28], [7] * 4, CAP, LINEAR)
    assert lock_step_efficiency(uneven) > lock_step_efficiency(even) - 0.03 > 0.8


def test_rows_are_dealt_in_snake_order():
    assert deal(np.array([[9, 8, 7, 6, 5, 4, 3, 2, 1]]), 3).tolist() == [
        [0, 1, 2],
        [5, 4, 3],
        [6, 7, 8],
    ]
    # rows 0 to 3 stay on one, 4 to 7 on the other
    two_nodes = np.array([[1, 2, 3, 4], [40, 30, 20, 10]])
    assert deal(two_nodes, 1).tolist() == [[3, 4], [2, 5], [1, 6], [0, 7]]
    assert deal(two_nodes, 2).tolist() == [[3, 2, 4, 5], [0, 1, 7, 6]]


def test_pools_get_equal_work_in_every_micro_step():
    """Plain turns (1 2 3, 1 2 3) instead of the snake's would give the first pool the longest row every time."""
    lengths = rollouts(64 * 7, 32)
    plan = plan_micro_steps(lengths, [64 * 7], CAP, LINEAR)
    tokens = np.bincount(plan.targets // (64 * 7 // plan.pools), lengths.reshape(-1))
    assert plan.pools == 14 and tokens.max() / tokens.min() < 1.01
    assert lock_step_efficiency(plan) > 0.91


@pytest.mark.parametrize(
    ("ranks", "rows", "share", "lock_step"), [(2, 128, 0.9, 0.97), (4, 64, 0.9, 0.95)]
)
def test_worth(ranks, rows, share, lock_step):
    """256 rows a step: design goal 0.85 real tokens a slot with 4 rows a micro-batch, lock-step included."""
    for seed in range(5):
        lengths = rollouts(ranks, rows, seed)
        found = plan_micro_steps(lengths, [ranks], CAP, LINEAR)
        assert lengths.sum() / found.slots().sum() > share
        assert lengths.sum() / (ranks * found.slots().max(axis=0).sum()) > 0.85
        assert (
            lock_step_efficiency(found) > lock_step
            and lengths.size / (ranks * found.micro_steps) >= 4
        )


@pytest.mark.nightly  # the plans' worth and cost
@pytest.mark.parametrize(
    ("nodes", "rows", "at_least"), [(8, 32, 0.91), (64, 32, 0.91), (128, 128, 0.95)]
)
def test_worth_over_nodes(nodes, rows, at_least):
    """Rows that stay on their node wait for the node with the longest ones; dealt rows do not."""
    lengths = rollouts(nodes * 7, rows)
    alone, dealt = (
        plan_micro_steps(lengths, groups, CAP, LINEAR) for groups in ([7] * nodes, [nodes * 7])
    )
    assert lock_step_efficiency(dealt) > at_least > lock_step_efficiency(alone) + 0.05
    assert dealt.costs().max(axis=0).sum() < 0.9 * alone.costs().max(axis=0).sum()


@pytest.mark.nightly  # the plans' worth and cost
def test_pools_are_nearly_as_good_as_one_pool_of_all_ranks():
    lengths = rollouts(8 * 7, 32)
    pools, one = (
        plan_micro_steps(lengths, [8 * 7], CAP, LINEAR, limit)
        for limit in (POOL_ROWS, lengths.size)
    )
    assert pools.pools == 2 and one.pools == 1
    assert pools.costs().max(axis=0).sum() < 1.03 * one.costs().max(axis=0).sum()


def num_calls(call: Callable[[], object]) -> int:
    """Count the calls of functions during `call`, of Python's and of C's, in this thread."""
    counted = [0]

    def count(frame, event: str, argument) -> None:
        counted[0] += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return counted[0]


@pytest.mark.nightly  # the plans' worth and cost
def test_a_plan_for_128_nodes_touches_no_row_in_python():
    """It takes milliseconds, because numpy does the work; a call for each of 114,688 rows would take 50."""

    def plan_and_read(rows: int) -> None:
        plan = plan_micro_steps(rollouts(128 * 7, rows), [128 * 7], CAP, LINEAR)
        plan.bins(0), plan.costs(), plan.slots()

    counts = [num_calls(lambda rows=rows: plan_and_read(rows)) for rows in (8, 16, 128)]
    assert max(counts) < 20_000, counts


def test_the_most_expensive_micro_steps_come_first_on_every_node():
    """So that memory runs out at once or never."""
    costs = plan_micro_steps(rollouts(4, 64), [2, 2], CAP, LINEAR).costs()
    assert (np.diff(costs.max(axis=0)) <= 0).all()
