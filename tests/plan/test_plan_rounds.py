"""The simulated round: lengths, the time of one row and of many, the cache as a bound, the simulation in the docs."""

from dataclasses import replace

import pytest
from plan_kit import size, task

from trl_multinode.tools.plan.engine_memory import (
    EngineMemory,
    cache_blocks,
    engine_memory,
    parallel_degrees,
)
from trl_multinode.tools.plan.model_size import Experts
from trl_multinode.tools.plan.rounds import Decoder, drained, generate, lengths, mixed
from trl_multinode.tools.plan.task import Rows

# test_plan_command.py compares the numbers of docs/operate/sizing.md, which change with each formula
pytestmark = pytest.mark.nightly
PLAN = task("7B")
ROWS = Rows(256, 512, 4791.0, 32768)


def decoder(tensor_parallel: int = 1) -> Decoder:
    return Decoder(PLAN.model, PLAN.cluster.gpu, tensor_parallel)


def on(gpus: int) -> EngineMemory:
    return engine_memory(replace(PLAN, rows=ROWS), gpus, 1)


def test_lengths_have_the_mean_and_no_more_than_the_longest():
    found = list(lengths(ROWS))
    assert len(found) == 256 and max(found) <= 32768
    assert sum(found) / len(found) == pytest.approx(4791, rel=0.01)
    assert sorted(mixed(found)) == found != mixed(found)


def test_rows_take_their_steps_wait_for_the_cache_and_have_a_tail():
    one = decoder()
    seconds, tail = drained([1000], 512, 8, one)
    assert seconds == pytest.approx(1000 * one.step_s(1, 512 + 500)) and tail == 0.0
    # 8 rows of 100 tokens, two at a time: four rounds of two
    assert drained([100] * 8, 10, 2, one)[0] == pytest.approx(4 * drained([100] * 2, 10, 2, one)[0])
    # 20 rows at once, one of which goes on for 900 steps: fewer than 10 % of 20 run
    _, tail = drained([100] * 19 + [1000], 0, 64, one)
    assert tail == pytest.approx(900 * one.step_s(1, 100 + 450))


def test_a_round_takes_as_long_as_in_the_simulation_of_the_docs():
    """docs/operate/sizing.md: 389 s on one engine of a 7B model on an H100, 214 GPU-seconds with full engines."""
    one = generate(ROWS, on(1), decoder(), open_rounds=4)
    assert one.seconds == pytest.approx(389, rel=0.15) and one.full_s == pytest.approx(
        214, rel=0.15
    )


def test_more_engines_divide_full_rounds_but_not_the_tail():
    one, four = (generate(ROWS, on(gpus), decoder(), open_rounds=4) for gpus in (1, 4))
    assert four.full_s == pytest.approx(one.full_s / 4, rel=0.02)
    assert four.seconds > one.seconds / 4 * 1.5


def test_a_token_of_many_rows_needs_all_experts_one_row_needs_few():
    model, gpu = size("235B"), PLAN.cluster.gpu
    experts = Decoder(model, gpu, 8)
    few, many = experts.step_s(1, 0), experts.step_s(256, 0)
    assert many > 3 * few
    assert Decoder(replace(model, experts=Experts()), gpu, 8).step_s(1, 0) == pytest.approx(
        many, rel=0.25
    )


def test_the_cache_of_one_token_is_split_by_heads_and_no_further():
    model = size("32B")  # 64 layers, 8 key-value heads of 128: 2 * 64 * 8 * 128 elements of 2 bytes
    assert 2 * model.cache.cache_elements(1) == 262144
    assert [
        model.cache.cache_elements(1) // model.cache.cache_elements(1, n) for n in (2, 4, 8, 16)
    ] == [
        2,
        4,
        8,
        8,
    ]
    assert cache_blocks(model, 16 * 262144 * 10 + 1) == 10


def test_an_engine_takes_only_degrees_that_divide_the_heads():
    assert parallel_degrees(size("32B"), 6) == [1, 2]  # 64 heads: not 3, not 6
    assert parallel_degrees(size("0.5B"), 8) == [1, 2]  # 14 heads
