"""Extensions of vLLM's log-probs, for both of its model runners: V1 (CPUs) and V2 (GPUs).

**Log-probs over the whole vocabulary.** Settings such as `top_p` set logits to -inf before a token is sampled, and
vLLM's processed log-probs are normalised over the tokens that are left. The trainer scores without these settings, so
even with equal weights its log-prob of the same token is lower. The extended samplers return the log-prob after
penalties, `logit_bias` and temperature but before any token is masked. They do so in steps with a request that masks
tokens, and in every step of an engine with custom logits processors, which may mask tokens too; the other steps remain
vLLM's.

**Scores at a temperature.** vLLM scores prompts with the raw logits, at temperature 1. The extension divides them by
the temperature of the request.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch

from ..wire.sampling import truncating

GREEDY_BELOW = 1e-5  # vLLM divides no logits by a temperature below it
# Tokens of a prompt that V1 scores at once, as many as V2. vLLM would take all of a step, which its memory profile
# does not include: three float32 copies of 8192 rows of 152k logits have 15 GB
SCORED_AT_ONCE = 1024


def extend_logprobs(vllm_config: Any, runner: Any) -> str:
    """
    Extend a worker's model runner.

    Returns:
        `str`: Reason why this worker cannot return log-probs over the whole vocabulary; empty if it can.
    """
    if runner.sampler is None:
        return ""  # only the last rank of a pipeline samples
    v2 = vllm_config.use_v2_model_runner
    (score_at_temperature_v2 if v2 else score_at_temperature_v1)(runner)
    if vllm_config.speculative_config is not None:
        return "`speculative_config` in `engine_kwargs` replaces vLLM's sampler"
    try:
        (WholeVocabularyV2 if v2 else WholeVocabularyV1)(runner)
    except (AttributeError, ImportError, ValueError) as error:
        return f"this version of vLLM has another sampler ({error})"
    return ""


def any_custom(processors: Iterable[Any]) -> bool:
    """Return whether one of the logits processors is not vLLM's own: it comes from `engine_kwargs` or a plugin."""
    return any(not type(processor).__module__.startswith("vllm.") for processor in processors)


def before_masks(logits: torch.Tensor, raw: torch.Tensor) -> torch.Tensor:
    """Return the logits, with those of `raw` in the place of -inf."""
    return torch.where(logits.isneginf(), raw, logits)


def divided(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return the logits of each row after the row's temperature."""
    return logits / temperature.where(temperature >= GREEDY_BELOW, 1.0)[:, None]


class WholeVocabulary:
    """Logits of the step under way, as the extensions of both samplers keep them."""

    _before_grammar: torch.Tensor | None = None  # before the bit masks of structured outputs
    _raw: torch.Tensor | None = None  # before any change, if a request of this step masks tokens
    _whole: torch.Tensor | None = None  # before the temperature, without masks

    def _take_raw(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of this step before any mask; those before the grammar's are of one step only."""
        raw = self._before_grammar
        self._before_grammar = None
        return logits if raw is None else raw


# ---- V1


class WholeVocabularyV1(WholeVocabulary):
    """Extension of vLLM's V1 sampler. It replaces three methods, which run in this order:

    ```text
    grammar                  copy of the logits
    forward
      allowed_token_ids, bad_words, min_tokens, logit_bias, custom processors
      apply_penalties        their result, with biased and penalized raw logits in the place of -inf
      sample                 temperature, min_p, top_k, top_p; returns log-probs of that result after temperature
    ```
    """

    def __init__(self, runner: Any):
        from vllm.v1.sample.logits_processor import LogitBiasLogitsProcessor
        from vllm.v1.worker import gpu_model_runner

        sampler = runner.sampler
        self._runner = runner
        self._bias = LogitBiasLogitsProcessor
        self._always = any_custom(runner.input_batch.logitsprocs.all)
        self._mask_grammar = gpu_model_runner.apply_grammar_bitmask
        self._forward = sampler.forward
        self._penalize = sampler.apply_penalties
        self._sample = sampler.sample
        gpu_model_runner.apply_grammar_bitmask = self.mask_grammar
        sampler.forward = self.forward
        sampler.apply_penalties = self.penalize
        sampler.sample = self.sample

    def mask_grammar(
        self, scheduler_output: Any, grammar_output: Any, batch: Any, logits: torch.Tensor
    ) -> None:
        """Apply the bit masks of structured outputs."""
        self._before_grammar = logits.clone()
        self._mask_grammar(scheduler_output, grammar_output, batch, logits)

    def forward(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Sample a token of every request."""
        raw = self._take_raw(logits)
        params = (
            self._runner.requests[request].sampling_params
            for request in self._runner.input_batch.req_ids
        )
        if self._always or any(truncating(partial(getattr, each)) for each in params):
            # vLLM changes them in place
            self._raw = raw.to(torch.float32, copy=True)
        try:
            return self._forward(logits, *args, **kwargs)
        finally:
            self._raw = self._whole = None

    def penalize(
        self, logits: torch.Tensor, metadata: Any, output_token_ids: list[list[int]]
    ) -> torch.Tensor:
        """Apply the penalties, the last change of logits before the temperature."""
        logits = self._penalize(logits, metadata, output_token_ids)
        if (raw := self._raw) is not None:
            for processor in metadata.logitsprocs.non_argmax_invariant:
                raw = processor.apply(raw) if isinstance(processor, self._bias) else raw
            self._whole = before_masks(logits, self._penalize(raw, metadata, output_token_ids))
        return logits

    def sample(
        self, logits: torch.Tensor, metadata: Any, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sample tokens; return them and the log-probs of which vLLM picks those of the sampled tokens."""
        sampled, logprobs = self._sample(logits, metadata, *args, **kwargs)
        if self._whole is None or logprobs is None:
            return sampled, logprobs
        greedy = metadata.temperature is None
        return sampled, (
            self._whole if greedy else divided(self._whole, metadata.temperature)
        ).log_softmax(-1)


def score_at_temperature_v1(runner: Any) -> None:
    """Divide the logits of scored prompts by their request's temperature, and score a long prompt in parts.

    vLLM scores one request after the other, from where its computed tokens end.
    """
    score = runner._get_prompt_logprobs_dict

    def score_each(
        hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        waiting = runner.num_prompt_logprobs
        for request in list(waiting):
            runner.num_prompt_logprobs = {request: waiting[request]}
            state, count = runner.requests[request], num_scheduled_tokens.get(request, 0)
            temperature = state.sampling_params.temperature or 1.0
            runner.sampler.compute_logprobs = partial(logprobs_at, temperature)
            first = state.num_computed_tokens
            for done in range(0, count, SCORED_AT_ONCE):
                state.num_computed_tokens = first + done
                found |= score(hidden_states[done:], {request: min(SCORED_AT_ONCE, count - done)})
            state.num_computed_tokens = first
            if not runner.num_prompt_logprobs:  # vLLM removes a request after its last token
                del waiting[request]
            del runner.sampler.compute_logprobs
        runner.num_prompt_logprobs = waiting
        return found

    runner._get_prompt_logprobs_dict = score_each


def logprobs_at(temperature: float, logits: torch.Tensor) -> torch.Tensor:
    """Return the log-probs over the whole vocabulary at a temperature."""
    return (logits.float() / temperature).log_softmax(-1)


# ---- V2


class WholeVocabularyV2(WholeVocabulary):
    """Extension of vLLM's V2 sampler. It replaces two methods, and is the last of the sampler's logits processors:

    ```text
    grammar                  copy of the logits
    sample
      logit_bias with allowed_token_ids and min_tokens, penalties, bad_words, custom processors
      apply                  their result, with biased and penalized raw logits in the place of -inf
      temperature, min_p, top_k, top_p
                             returns logits of that result after temperature
    ```

    vLLM copies the logits before the first processor, so `sample` can read the raw ones after it.
    """

    def __init__(self, runner: Any):
        sampler = runner.sampler
        grammar = runner.structured_outputs_worker
        (self._bias,) = (
            each for each in sampler.logits_processors if hasattr(each, "num_logit_bias")
        )
        self._penalties = sampler.penalties_state
        self._temperature = sampler.sampling_states.temperature
        self._always = any_custom(sampler.logits_processors)
        self._truncates = np.zeros_like(sampler.needs_logits_processing)
        self._mask_grammar = grammar.apply_grammar_bitmask
        self._sample = sampler.sample
        grammar.apply_grammar_bitmask = self.mask_grammar
        sampler.sample = self.sample
        sampler.logits_processors.append(self)

    def mask_grammar(self, logits: torch.Tensor, *args: Any) -> None:
        """Apply the bit masks of structured outputs."""
        self._before_grammar = logits.clone()
        self._mask_grammar(logits, *args)

    def sample(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        slots: torch.Tensor,
        slots_np: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample tokens; return them and the logits of their log-probs. `rows` has the slot of each row's request."""
        raw = self._take_raw(logits)
        if not self._truncates[slots_np].any():
            return self._sample(logits, rows, slots, slots_np, *args, **kwargs)
        self._raw = raw
        self._whole = None
        sampled, _ = self._sample(logits, rows, slots, slots_np, *args, **kwargs)
        whole = before_masks(logits, raw).float() if self._whole is None else self._whole
        self._raw = self._whole = None
        return sampled, divided(whole, self._temperature.gpu[rows])

    def add_request(self, slot: int, params: Any) -> bool:
        """Read a request's settings; return whether this processor changes logits."""
        self._truncates[slot] = self._always or bool(truncating(partial(getattr, params)))
        return False

    def apply_staged_writes(self) -> None:
        """Do nothing; a processor of vLLM flushes its buffers here."""

    def apply(self, logits: torch.Tensor, context: Any) -> torch.Tensor:
        """Keep the logits as they are before the temperature, and return them."""
        if self._raw is not None:
            raw = self._penalties.apply(self._biased(self._raw.float(), context), context)
            self._whole = before_masks(logits, raw)
        return logits

    def _biased(self, logits: torch.Tensor, context: Any) -> torch.Tensor:
        """Return a copy of the logits plus each row's `logit_bias`; vLLM's kernel would mask tokens too."""
        bias = self._bias
        rows = context.expanded_idx_mapping
        if not bias.num_logit_bias.np[context.idx_mapping_np].any():
            return logits.clone()
        ids = bias.logit_bias_token_ids.gpu[rows]
        values = bias.logit_bias.gpu[rows]
        unused = (
            torch.arange(ids.shape[1], device=ids.device) >= bias.num_logit_bias.gpu[rows][:, None]
        )
        return logits.scatter_add(
            1, ids.masked_fill(unused, 0).long(), values.masked_fill(unused, 0.0)
        )


def score_at_temperature_v2(runner: Any) -> None:
    """Divide the logits of scored prompts by their request's temperature. vLLM scores a step's tokens in chunks."""
    worker = runner.prompt_logprobs_worker
    states = runner.sampler.sampling_states
    score = worker.compute_prompt_logprobs

    def score_scaled(
        logits_fn: Callable, hidden_states: torch.Tensor, batch: Any, *others: Any
    ) -> dict[str, Any]:
        done = 0

        def scaled(chunk: torch.Tensor) -> torch.Tensor:  # vLLM calls it for consecutive chunks
            nonlocal done
            temperature = states.temperature.np[batch.idx_mapping_np]
            of_tokens = np.repeat(
                np.where(temperature == 0.0, 1.0, temperature), batch.num_scheduled_tokens
            )
            divisor = torch.from_numpy(of_tokens[done : done + len(chunk)]).to(
                chunk.device, torch.float32
            )
            done += len(chunk)
            return logits_fn(chunk).float() / divisor[:, None]

        return score(scaled, hidden_states, batch, *others)

    worker.compute_prompt_logprobs = score_scaled
