"""The alarm: with fresh weights the engine's log-probs and the trainer's agree, on every node, at every step."""

import logging

import torch

from .config import field_or_default
from .errors import LogprobDivergenceError
from .probe import divergence_limit

logger = logging.getLogger(__name__)
HARMLESS_KEYS = {"stop", "stop_token_ids", "ignore_eos", "max_tokens", "include_stop_str_in_output"}


class DivergenceMonitor:
    """Compares the two log-probs that TRL has anyway; costs one subtraction and no collective.

    Args:
        host ([`NodeHost`]), args ([`~trl.GRPOConfig`]), model (`PreTrainedModel`), generation ([`NodeGeneration`]):
            Of the calling rank.
    """

    def __init__(self, host, args, model, generation):
        self._where = str(host.topology)
        self._generation = generation
        self.limit = divergence_limit(field_or_default(args, "logprob_divergence_limit"), model.dtype, host.dtype)
        if self.limit and not comparable(args):
            logger.warning(
                "The check of engine against trainer log-probs is off: top_p, top_k, min_p, repetition_penalty or "
                "generation_kwargs change the engine's probabilities, and TRL scores without them."
            )
            self.limit = 0.0
        self.last = 0.0

    def check(self, output: dict) -> None:
        """Look at the output of TRL's `_generate_and_score_completions` of this rank.

        Raises:
            `LogprobDivergenceError`: naming node, rank and weight version.
        """
        if "old_per_token_logps" not in output or "sampling_per_token_logps" not in output:
            if self.limit:
                logger.warning("Engine against trainer log-probs: off, vllm_importance_sampling_correction is False.")
                self.limit = 0.0
            return
        mask = output["completion_mask"].bool() & output.get("tool_mask", output["completion_mask"]).bool()
        difference = (output["old_per_token_logps"] - output["sampling_per_token_logps"]).abs()[mask]
        difference = difference[~torch.isnan(difference)]
        self.last = difference.mean().item() if difference.numel() else 0.0
        if self.limit and self.last > self.limit:
            raise LogprobDivergenceError(
                f"{self._where}: engine and trainer differ by {self.last:.3f} per token (limit {self.limit:g}) with "
                f"the weights of {self._generation.version}: some of the engine's weights are stale or wrong. Check "
                "that vLLM supports reloading this architecture; `logprob_divergence_limit` sets the limit, 0 turns "
                "the check off."
            )


def comparable(args) -> bool:
    """Whether the engine samples from the distribution that TRL scores: temperature only."""
    plain = (args.top_p in (None, 1.0), not args.top_k, not args.min_p, args.repetition_penalty in (None, 1.0))
    harmless = set(args.generation_kwargs or {}) <= HARMLESS_KEYS
    return all(plain) and harmless and not args.vllm_structured_outputs_regex
