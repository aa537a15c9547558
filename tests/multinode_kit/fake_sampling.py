"""Sampling of the fake engine: vLLM's settings, in vLLM's order, on one row of logits."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from trl_multinode.wire.sampling import TRUNCATING

# `stop` has no effect
SAMPLING_KEYS = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
}


def sample(
    logits: torch.Tensor,
    ids: Sequence[int],
    num_sampled: int,
    eos: set[int],
    sampling: Mapping[str, Any],
    random: torch.Generator,
) -> tuple[int, float]:
    """
    Sample the token that follows `ids`.

    Args:
        logits (`torch.Tensor`):
            Logits of the model, `(V,)`.
        num_sampled (`int`):
            Number of tokens at the end of `ids` that were sampled.
        eos (`set[int]`):
            Tokens that end a completion.

    Returns:
        `tuple[int, float]`: Token, and its log-prob over the whole vocabulary.
    """
    temperature = sampling.get("temperature", 1.0)
    scores = penalized(logits, ids, sampling) / (temperature or 1.0)
    masked = scores.clone()
    if (allowed := sampling.get("allowed_token_ids")) is not None:
        masked[[token for token in range(len(masked)) if token not in allowed]] = -torch.inf
    if num_sampled < sampling.get("min_tokens", 0):
        masked[list(eos)] = -torch.inf
    probabilities = truncated(masked, sampling).softmax(-1)
    token = draw(probabilities, random) if temperature else masked.argmax()
    return int(token), scores.log_softmax(-1)[token].item()


def draw(probabilities: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Draw a token as vLLM does. `torch.multinomial` draws the same one, but raises for NaN: vLLM takes token 0."""
    return (probabilities / torch.empty_like(probabilities).exponential_(generator=random)).argmax()


def penalized(
    logits: torch.Tensor, ids: Sequence[int], sampling: Mapping[str, Any]
) -> torch.Tensor:
    """Return the logits after `logit_bias` and `repetition_penalty`."""
    logits = logits.clone()
    for token, bias in sampling.get("logit_bias", {}).items():
        logits[int(token)] += bias
    penalty = RepetitionPenaltyLogitsProcessor(float(sampling.get("repetition_penalty", 1.0)))
    return penalty(torch.tensor([ids]), logits[None])[0]


def truncated(scores: torch.Tensor, sampling: Mapping[str, Any]) -> torch.Tensor:
    """Return the scores with -inf for tokens that `min_p`, `top_k` or `top_p` cut off."""
    warpers = {"min_p": MinPLogitsWarper, "top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper}
    for name, warper in warpers.items():
        if sampling.get(name) not in TRUNCATING[name]:
            scores = warper(sampling[name])(None, scores[None])[0]
    return scores
