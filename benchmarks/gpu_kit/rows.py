"""Sampled rows, and the difference between the engine's log-probs of them and the trainer's."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from trl_multinode.engine.client import Rollout
from trl_multinode.engine.node_engines import NodeEngines
from trl_multinode.engine.stream import Request

SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "ignore_eos": True,
}
PROMPT_TOKENS = 24
Rows = list[tuple[list[int], Rollout]]


def prompts(vocabulary: int, count: int, length: int = PROMPT_TOKENS) -> list[list[int]]:
    """Return `count` random prompts of `length` tokens, always the same."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(2, vocabulary, (count, length), generator=generator).tolist()


def sample(
    engines: NodeEngines,
    asked: Sequence[list[int]],
    each: int,
    tokens: int,
    update: int,
    seeded: bool = True,
) -> Rows:
    """Sample `each` rows of exactly `tokens` tokens for every prompt, each row with its own seed if `seeded`."""
    requests = [
        Request(prompt, each, 100 * index if seeded else None) for index, prompt in enumerate(asked)
    ]
    groups = engines.generate(requests, tokens, SAMPLING, update)
    return [(prompt, row) for prompt, rows in zip(asked, groups, strict=True) for row in rows]


@torch.no_grad()
def trainer_logprobs(model: PreTrainedModel, rows: Rows, batch: int = 8) -> torch.Tensor:
    """Return the log-probs of rows of equal length under `model`, `(rows, tokens)` float32 on the CPU."""
    found = []
    for start in range(0, len(rows), batch):
        ids = torch.tensor(
            [[*prompt, *row.tokens.tolist()] for prompt, row in rows[start : start + batch]]
        )
        ids, first = ids.to(model.device), len(rows[start][0])
        scores = model(ids).logits[:, first - 1 : -1].float().log_softmax(-1)
        found.append(scores.gather(2, ids[:, first:, None])[..., 0].cpu())
    return torch.cat(found)


def engine_logprobs(rows: Rows) -> torch.Tensor:
    """Return the engine's log-probs of the tokens that it sampled: `(rows, tokens)` float32."""
    return torch.stack([torch.from_numpy(row.logprobs.copy()) for _, row in rows])


def mean_difference(model: PreTrainedModel, rows: Rows) -> float:
    """Return the mean |engine - trainer| per token. NaN stays NaN, so that it fails every limit."""
    return (engine_logprobs(rows) - trainer_logprobs(model, rows)).abs().mean().item()


def score_difference(engines: NodeEngines, model: PreTrainedModel, rows: Rows) -> float:
    """Return the mean |engine - trainer| of the first row's prompt log-probs; vLLM computes them in other code."""
    prompt, row = rows[0]
    tokens = row.tokens.tolist()
    got = torch.from_numpy(engines[0].score([*prompt, *tokens]).logprobs[len(prompt) - 1 :].copy())
    return (got - trainer_logprobs(model, rows[:1])[0]).abs().mean().item()


def rounding_floor(model: PreTrainedModel, rows: Rows) -> float:
    """Return the mean |difference| between the trainer's dtype and float32 with the same weights: rounding alone."""
    dtype = model.dtype
    if dtype == torch.float32:
        return 0.0
    rounded = trainer_logprobs(model, rows)
    cast_parameters(model, torch.float32)
    exact = trainer_logprobs(model, rows)
    cast_parameters(model, dtype)  # bfloat16 to float32 and back is exact
    return (rounded - exact).abs().mean().item()


def cast_parameters(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast the parameters in place. `model.to` would also round the rotary frequencies, which are a float32 buffer."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def swap_points(before: torch.Tensor, after: torch.Tensor, got: torch.Tensor) -> list[int]:
    """
    Estimate for each row how many tokens the old weights sampled.

    Args:
        before (`torch.Tensor`), after (`torch.Tensor`), got (`torch.Tensor`):
            `(rows, tokens)` log-probs under the old weights, under the new weights, and from the engine.

    Returns:
        `list[int]`: the cut with the least total difference to the old weights before it and to the new ones after it.
    """
    old, new = (got - before).abs(), (got - after).abs()
    zero = torch.zeros(len(got), 1)
    left = torch.cat([zero, old.cumsum(1)], 1)
    right = torch.cat([new.flip(1).cumsum(1).flip(1), zero], 1)
    return (left + right).argmin(1).tolist()
