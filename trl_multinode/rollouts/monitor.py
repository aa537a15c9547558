"""Check for wrong engine weights in every round, on every node: equal weights must give equal log-probs."""

from typing import Any

import torch

from ..errors import LogprobDivergenceError
from ..run.reporter import warn
from ..weights.probe import divergence_limit
from .generation import NodeGeneration
from .look_ahead import RoundRollouts

HARMLESS_KEYS = {"stop", "stop_token_ids", "ignore_eos", "max_tokens", "include_stop_str_in_output"}


class DivergenceMonitor:
    """Monitor of the difference between engine and trainer log-probs, which TRL computes anyway.

    It costs one subtraction and no collective, and for stale completions a prefill of one row.

    Args:
        host ([`NodeHost`]), args ([`~trl.GRPOConfig`]), model (`PreTrainedModel`), generation ([`NodeGeneration`]):
            Objects of the calling rank.
    """

    def __init__(self, host: Any, args: Any, model: torch.nn.Module, generation: NodeGeneration):
        self._where = str(host.topology)
        self._generation = generation
        self.limit = divergence_limit(host.settings.logprob_divergence_limit, model.dtype, host.dtype)
        if self.limit and not comparable(args):
            warn(
                "The check of engine against trainer log-probs is off: top_p, top_k, min_p, repetition_penalty or "
                "generation_kwargs change the engine's probabilities, and TRL scores without them."
            )
            self.limit = 0.0
        self.last = 0.0
        self._temperature = args.temperature
        self._turn = -1
        self._requested: tuple[int, int, int, int] | None = None  # row, number of scored tokens, engine, request id
        generation.on_stale = self.ask

    def check(self, output: dict, stale: bool = False) -> None:
        """Raise if the log-probs of engine and trainer differ too much on this rank.

        Args:
            output (`dict`):
                Output of TRL's `_generate_and_score_completions`.
            stale (`bool`, *optional*, defaults to `False`):
                True if older weights made these completions, so that their log-probs do not test the engine's current
                weights. The check then uses the row whose score `ask` requested, if any.

        Raises:
            `LogprobDivergenceError`: if the mean difference exceeds the limit; the message names node, rank and
                weight version.
        """
        if "old_per_token_logps" not in output or "sampling_per_token_logps" not in output:
            if self.limit:
                warn("The log-prob check of the engines is off, because vllm_importance_sampling_correction is False.")
                self.limit = 0.0
            return
        mask = output["completion_mask"].bool() & output.get("tool_mask", output["completion_mask"]).bool()
        if not stale:
            difference = (output["old_per_token_logps"] - output["sampling_per_token_logps"]).abs()[mask]
        elif self._requested is not None:
            difference = self._rescored(output, mask)
        else:
            return
        self._judge(difference[~torch.isnan(difference)])

    def _judge(self, difference: torch.Tensor) -> None:
        self.last = difference.mean().item() if difference.numel() else 0.0
        if self.limit and self.last > self.limit:
            raise LogprobDivergenceError(
                f"{self._where}: engine and trainer differ by {self.last:.3f} per token (limit {self.limit:g}) with "
                f"the weights of {self._generation.version}: some of the engine's weights are stale or wrong. Check "
                "that vLLM supports reloading this architecture; `logprob_divergence_limit` sets the limit, 0 turns "
                "the check off."
            )

    def ask(self, made: RoundRollouts) -> None:
        """Request the score of one of these rows under an engine's current weights; `check` waits for the reply.

        The request is a prefill of one row. It must go out before the next round's prompts, or it queues behind them.
        """
        self._requested = None
        if not self.limit or self._temperature != 1.0:  # engines score at temperature 1
            return
        self._turn += 1
        engines, row = self._generation.engines, self._turn % len(made.rows)
        engine, prompt = self._turn % len(engines), made.prompts[row]
        tokens = [*prompt, *made.rows[row].tokens.tolist()][: engines.max_model_len - 1]  # vLLM adds one token
        if len(tokens) > len(prompt):
            self._requested = row, len(tokens) - len(prompt), engine, engines[engine].post_score(tokens)

    def _rescored(self, output: dict, mask: torch.Tensor) -> torch.Tensor:
        """Return the absolute log-prob differences of the row that `ask` chose."""
        assert self._requested is not None
        row, kept, engine, request_id = self._requested
        self._requested = None
        scored = torch.from_numpy(self._generation.engines[engine].scored(request_id).logprobs[-kept:].copy())
        return (output["old_per_token_logps"][row][:kept].float().cpu() - scored).abs()[mask[row][:kept].cpu()]


def comparable(args: Any) -> bool:
    """Return whether the engine samples from TRL's scoring distribution, which applies temperature only."""
    plain = (args.top_p in (None, 1.0), not args.top_k, not args.min_p, args.repetition_penalty in (None, 1.0))
    harmless = set(args.generation_kwargs or {}) <= HARMLESS_KEYS
    return all(plain) and harmless and not args.vllm_structured_outputs_regex
