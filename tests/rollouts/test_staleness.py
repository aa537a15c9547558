"""What is reported of staleness, of the importance weights and of who was busy."""

import math
from types import SimpleNamespace

import pytest
import torch

from trl_multinode.rollouts.staleness import NUM_SUMS, StalenessMeter, summarize_rounds


def meter(mode: str = "token_truncate", low=None, high=2.0) -> StalenessMeter:
    return StalenessMeter(
        SimpleNamespace(
            vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_min=low,
            vllm_importance_sampling_clip_max=high,
        )
    )  # fmt: skip


def output(trainer, sampler, mask=None, **more) -> dict:
    trainer = torch.tensor(trainer)
    mask = torch.ones_like(trainer) if mask is None else torch.tensor(mask)
    return {"old_per_token_logps": trainer, "sampling_per_token_logps": torch.tensor(sampler),
            "completion_mask": mask, **more}  # fmt: skip


def metrics(*meters, ahead=(0.0, 0.0), clocks=(), idle=0.0) -> dict:
    return summarize_rounds([one.take(ahead, list(clocks)) for one in meters], [idle] * len(meters))


def test_equal_weights_have_the_full_sample_size_and_one_heavy_weight_that_of_one_token():
    one = meter()
    one.add_weights(output([[-1.0, -2.0]], [[-1.0, -2.0]]))
    assert metrics(one)["staleness/effective_sample_size"] == pytest.approx(1.0)
    one.add_weights(output([[0.0, -40.0, -40.0, -40.0]], [[0.0, -1.0, -1.0, -1.0]]))
    assert metrics(one)["staleness/effective_sample_size"] == pytest.approx(0.25)


def test_clipped_are_the_tokens_beyond_the_corrections_limits_and_masked_ones_do_not_count():
    weights = [0.5, 1.0, 2.5, 3.0]
    logps = [[math.log(weight) for weight in weights] + [9.0]]
    mask = [[1, 1, 1, 1, 0]]
    one = meter()
    one.add_weights(output(logps, [[0.0] * 5], mask))
    assert metrics(one)["staleness/clipped_share"] == 0.5
    one = meter(low=0.7)
    one.add_weights(output(logps, [[0.0] * 5], mask))
    assert metrics(one)["staleness/clipped_share"] == 0.75
    one = meter("sequence_mask", high=3.0)
    one.add_weights(output(logps, [[0.0] * 5], mask))  # 0.5 x 1 x 2.5 x 3 = 3.75
    found = metrics(one)
    assert found["staleness/clipped_share"] == 1.0 and found["staleness/effective_sample_size"] == pytest.approx(1.0)


def test_a_token_without_a_log_prob_weighs_one():
    one = meter()
    one.add_weights(output([[-1.0, -2.0]], [[float("nan"), -2.0]]))
    assert metrics(one)["staleness/effective_sample_size"] == pytest.approx(1.0)


def test_the_share_of_nan_is_that_of_the_trained_tokens_of_all_ranks():
    first, second = meter(), meter()
    assert "logprobs/nan_share" not in metrics(first, second)
    first.add_checked(100, 1)
    second.add_checked(200, 0)
    second.add_checked(100, 1)
    assert metrics(first, second)["logprobs/nan_share"] == 2 / 400
    assert "logprobs/nan_share" not in metrics(first, second)  # taken


def test_staleness_is_reported_in_rounds_and_in_optimizer_steps_over_all_ranks():
    first, second = meter(), meter()
    first.add_round(0, 0)
    first.add_round(1, 4)
    second.add_round(1, 2)
    found = metrics(first, second)
    assert found["staleness/rounds_mean"] == pytest.approx(2 / 3) and found["staleness/rounds_max"] == 1
    assert found["staleness/steps_mean"] == 2 and found["staleness/steps_max"] == 4
    assert "staleness/rounds_mean" not in metrics(first, second)  # taken


def test_busy_shares_come_from_the_engines_clocks_and_the_ranks_idle_seconds():
    one = meter()
    one._since -= 10.0  # ten seconds ago
    found = metrics(one, ahead=(6.0, 1.0), clocks=[(9.0, 10.0, 3.0, 1.0), (10.0, 10.0, 9.0, 4.0)], idle=2.0)
    assert found["engine/tail_share"] == 0.25
    assert found["engine/busy"] == pytest.approx(0.6) and found["perf/rank_busy_share"] == pytest.approx(0.8, abs=0.01)
    assert found["perf/hidden_share"] == pytest.approx(0.5, abs=0.01)
    assert metrics(one, clocks=[(15.0, 20.0, 5.0, 1.0), (20.0, 20.0, 10.0, 4.0)])["engine/busy"] == pytest.approx(
        3 / 20
    )


def test_the_fullest_cache_of_all_engines_is_reported_if_engines_measure_it():
    nodes = [list(meter().take((0.0, 0.0), [(9.0, 10.0, 3.0, 0.0)], kv_use)) for kv_use in (0.25, 0.75)]
    found = summarize_rounds(nodes, [0.0, 0.0])
    assert found["engine/kv_use"] == 0.75 and found["engine/busy"] == pytest.approx(0.3)
    assert "engine/kv_use" not in metrics(meter())


def test_a_rank_sends_a_fixed_count_of_numbers():
    assert len(meter().take((0.0, 0.0), [])) == NUM_SUMS
