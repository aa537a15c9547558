"""Extensions of vLLM's log-probs, for both of its model runners: V1 (CPUs) and V2 (GPUs)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch


def extend_logprobs(runner: Any, is_v2: bool) -> None:
    """Make a worker's model runner score prompts at the temperature of their request."""
    if runner.sampler is None:
        return  # only the last rank of a pipeline samples
    if is_v2:
        score_at_temperature_v2(runner)
    else:
        score_at_temperature_v1(runner)


def score_at_temperature_v1(runner: Any) -> None:
    """Divide the logits of scored prompts by their request's temperature. vLLM scores one request after the other."""
    score = runner._get_prompt_logprobs_dict

    def score_each(hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        waiting = runner.num_prompt_logprobs
        for request in list(waiting):
            runner.num_prompt_logprobs = {request: waiting[request]}
            temperature = runner.requests[request].sampling_params.temperature or 1.0
            runner.sampler.compute_logprobs = partial(logprobs_at, temperature)
            found |= score(hidden_states, num_scheduled_tokens)
            if not runner.num_prompt_logprobs:  # vLLM removes a request after its last token
                del waiting[request]
            del runner.sampler.compute_logprobs
        runner.num_prompt_logprobs = waiting
        return found

    runner._get_prompt_logprobs_dict = score_each


def logprobs_at(temperature: float, logits: torch.Tensor) -> torch.Tensor:
    """Return the log-probs over the whole vocabulary at a temperature."""
    return (logits.float() / temperature).log_softmax(-1)


def score_at_temperature_v2(runner: Any) -> None:
    """Divide the logits of scored prompts by their request's temperature. vLLM scores a step's tokens in chunks."""
    worker, states = runner.prompt_logprobs_worker, runner.sampler.sampling_states
    score = worker.compute_prompt_logprobs

    def score_scaled(logits_fn: Callable, hidden_states: torch.Tensor, batch: Any, *others: Any) -> dict[str, Any]:
        done = 0

        def scaled(chunk: torch.Tensor) -> torch.Tensor:  # vLLM calls it for consecutive chunks
            nonlocal done
            temperature = states.temperature.np[batch.idx_mapping_np]
            of_tokens = np.repeat(np.where(temperature == 0.0, 1.0, temperature), batch.num_scheduled_tokens)
            divisor = torch.from_numpy(of_tokens[done : done + len(chunk)]).to(chunk.device, torch.float32)
            done += len(chunk)
            return logits_fn(chunk).float() / divisor[:, None]

        return score(scaled, hidden_states, batch, *others)

    worker.compute_prompt_logprobs = score_scaled
