"""Log-prob probe of the engines' weights; a checksum would verify the transfer, not the weights in use."""

from typing import Any

import torch

from ..engine.group import EngineGroup
from ..errors import LogprobDivergenceError
from ..run.topology import Topology
from ..settings import PROBE_LENGTH


def divergence_limit(
    limit: float | None, trainer_dtype: torch.dtype, engine_dtype: torch.dtype
) -> float:
    """Return the mean |log-prob difference| per token above which weights must be stale.

    Measured differences: 4e-6 between fp32 and fp32 on a CPU, 0.01 to 0.05 with bf16 engines, more than 0.1 with
    weights that are a few steps stale, 0.85 with a stale head.
    """
    if limit is not None:
        return limit
    both_fp32 = trainer_dtype == engine_dtype == torch.float32
    return 0.02 if both_fp32 else 0.3


def probe_tokens(vocab_size: int) -> list[int]:
    """Return token ids spread over the vocabulary, so that the probe reads both ends of a padded embedding."""
    step = max(1, vocab_size // PROBE_LENGTH)
    last = vocab_size - 1
    return [min(last, i * step) for i in range(PROBE_LENGTH - 1)] + [last]


@torch.no_grad()
def probe_engines(
    model: Any, engines: EngineGroup | None, limit: float, topology: Topology
) -> None:
    """Compare the engines' log-probs of a fixed sequence with the trainer's, to detect weights that are still dummies.

    All training ranks take part, because a ZeRO-3 forward is a collective; those without `engines` only run the
    forward. With a `limit` of 0, no rank compares.

    Raises:
        `LogprobDivergenceError`: if an engine exceeds the limit; the message names node and engine.
    """
    tokens = probe_tokens(model.config.get_text_config().vocab_size)
    was_training = model.training
    model.eval()
    ids = torch.tensor([tokens], device=model.device)
    logits = model(input_ids=ids).logits[0, :-1].float()
    model.train(was_training)
    if engines is None or not limit:
        return
    expected = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].cpu()
    for engine in engines:
        # it is started again; the check of every round compares its weights
        with engine.loss_accepted():
            got = torch.from_numpy(engine.score(tokens).logprobs.copy())
        if engine.lost is not None:
            continue
        difference = (got - expected).abs().mean().item()
        if not difference <= limit:
            raise LogprobDivergenceError(
                f"{engine.name} and the trainer (rank {topology.rank}) differ by {difference:.3f} per token on a "
                f"probe prompt after the first weight update (limit {limit}): some weights did not arrive. Check that "
                "vLLM supports this architecture with reloaded weights. With LoRA, try `lora_sync='merged'`. "
                "`logprob_divergence_limit` sets the limit, 0 turns the check off."
            )
