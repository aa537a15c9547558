"""What is reported of staleness, of the importance weights and of who was busy."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trl_multinode.rollouts.staleness import StalenessMeter, summarize_rounds
from trl_multinode.rollouts.token_ages import TokenAges


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
    return summarize_rounds(
        [one.take(ahead, np.reshape(clocks, (-1, 4))) for one in meters], [idle] * len(meters)
    )


def huge(log: float) -> tuple[list, list, list]:
    """One sequence outweighs the three others, or is outweighed by them. The fifth is masked, as one cut off is."""
    return [[log / 2] * 2, *[[0.0, 0.0]] * 4], [[0.0] * 2] * 5, [*[[1, 1]] * 4, [0, 0]]


def share(*weights: float) -> float:
    return sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights))


# TRL's ratio is `exp` of the difference per token, or of its sum per sequence; tokens of tools do not count
ROWS = (
    [[-1.0, -2.0, -3.0], [-0.5, -1.5, -2.5]],
    [[-1.5, -1.0, -3.0], [-0.5, -3.0, -1.0]],
    [[1, 1, 1], [1, 1, 0]],
)
TOOLS = torch.tensor([[1, 0, 1], [1, 1, 1]])
SIZES = {  # mode, log-probs of the trainer and of the sampler, mask -> effective sample size
    "equal": ("token_truncate", [[-1.0, -2.0]], [[-1.0, -2.0]], None, 1.0),
    "one heavy token": ("token_truncate", [[0.0, -40.0, -40.0, -40.0]], [[0.0, -1.0, -1.0, -1.0]], None, 0.25),
    "a token without a log-prob weighs one": ("token_truncate", [[-1.0, -2.0]], [[float("nan"), -2.0]], None, 1.0),
    "all are small": ("sequence_truncate", [[-60.0], [-60.0]], [[0.0], [0.0]], None, 1.0),
    "tokens": ("token_truncate", *ROWS, share(*map(math.exp, (0.5, 0.0, 0.0, 1.5)))),
    "sequences": ("sequence_truncate", *ROWS, share(*map(math.exp, (0.5, 1.5)))),
    **{f"beyond float32: {log}": ("sequence_truncate", *huge(log), 0.25 if log > 0 else 0.75)
       for log in (45.0, -60.0, 100.0, 800.0)},
}  # fmt: skip


@pytest.mark.parametrize("case", SIZES)
def test_the_effective_sample_size_is_that_of_trls_weights(case):
    mode, trainer, sampler, mask, expected = SIZES[case]
    one = meter(mode)
    one.add_weights(
        output(trainer, sampler, mask, **({"tool_mask": TOOLS} if mask is ROWS[2] else {}))
    )
    assert metrics(one)["staleness/effective_sample_size"] == pytest.approx(expected)


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
    assert found["staleness/clipped_share"] == 1.0 and found[
        "staleness/effective_sample_size"
    ] == pytest.approx(1.0)


@pytest.mark.nightly  # a statistical check of the table above
@pytest.mark.parametrize(
    "mode", ["token_truncate", "token_mask", "sequence_mask", "sequence_truncate"]
)
def test_the_effective_sample_size_is_that_of_the_samplers_tokens_or_sequences(mode):
    """Of tokens drawn from q and weighted with p / q, the share is 1 / sum(p^2 / q) for many samples; the weights of a
    sequence are products, so the share of sequences of T tokens is that to the power T."""
    length, random = 4, torch.Generator().manual_seed(0)
    trained, sampled = torch.tensor([0.2, 0.25, 0.25, 0.3]), torch.tensor([0.3, 0.3, 0.2, 0.2])
    tokens = torch.multinomial(sampled, 400_000, replacement=True, generator=random).view(
        -1, length
    )
    exact = 1.0 / (trained**2 / sampled).sum().item()
    one, other = meter(mode), meter(mode)  # two ranks with rows of padded lengths
    mask = torch.ones_like(tokens)
    for each, rows in ((one, slice(0, 30_000)), (other, slice(30_000, None))):
        padded = torch.nn.functional.pad(mask[rows], (0, 2))
        logps = [
            torch.nn.functional.pad(p.log()[tokens[rows]], (0, 2), value=9.0)
            for p in (trained, sampled)
        ]
        each.add_weights({"old_per_token_logps": logps[0], "sampling_per_token_logps": logps[1] - 1.0 * (padded == 0),
                          "completion_mask": padded})  # fmt: skip
    expected = exact ** (length if mode.startswith("sequence") else 1)
    assert metrics(one, other)["staleness/effective_sample_size"] == pytest.approx(
        expected, rel=0.01
    )


def test_the_share_of_nan_is_that_of_the_trained_tokens_of_all_ranks():
    first, second = meter(), meter()
    assert "logprobs/nan_share" not in metrics(first, second)
    first.add(trained_tokens=100, nan_tokens=1)
    second.add(trained_tokens=200, nan_tokens=0)
    second.add(trained_tokens=100, nan_tokens=1)
    assert metrics(first, second)["logprobs/nan_share"] == 2 / 400
    assert "logprobs/nan_share" not in metrics(first, second)  # taken


def test_staleness_is_reported_in_rounds_and_in_optimizer_steps_over_all_ranks():
    first, second = meter(), meter()
    first.add_round(TokenAges())
    first.add_round(TokenAges(1, 1, 4, 4))
    second.add_round(TokenAges(1, 1, 2, 2))
    found = metrics(first, second)
    assert (
        found["staleness/rounds_mean"] == pytest.approx(2 / 3)
        and found["staleness/rounds_max"] == 1
    )
    assert found["staleness/steps_mean"] == 2 and found["staleness/steps_max"] == 4
    assert "staleness/rounds_mean" not in metrics(first, second)  # taken


def test_busy_shares_come_from_the_engines_clocks_and_the_ranks_idle_seconds():
    one = meter()
    one._since -= 10.0  # ten seconds ago
    found = metrics(
        one, ahead=(6.0, 1.0), clocks=[(9.0, 10.0, 3.0, 1.0), (10.0, 10.0, 9.0, 4.0)], idle=2.0
    )
    assert found["engine/tail_share"] == 0.25
    assert found["engine/busy"] == pytest.approx(0.95)
    assert found["engine/filled"] == pytest.approx(0.6)
    assert found["perf/rank_busy_share"] == pytest.approx(0.8, abs=0.01)
    assert found["perf/hidden_share"] == pytest.approx(0.5, abs=0.01)
    assert metrics(one, clocks=[(15.0, 20.0, 5.0, 1.0), (20.0, 20.0, 10.0, 4.0)])[
        "engine/filled"
    ] == pytest.approx(3 / 20)


def test_the_fullest_cache_of_all_engines_is_reported_if_engines_measure_it():
    nodes = [
        meter().take((0.0, 0.0), np.array([(9.0, 10.0, 3.0, 0.0)]), kv_use)
        for kv_use in (0.25, 0.75)
    ]
    found = summarize_rounds(nodes, [0.0, 0.0])
    assert found["engine/kv_use"] == 0.75 and found["engine/filled"] == pytest.approx(0.3)
    assert "engine/kv_use" not in metrics(meter())
