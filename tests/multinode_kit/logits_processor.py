"""Custom logits processors for vLLM's V1 model runner, as a user's `engine_kwargs` name them."""

import time
from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class EvenTokensOnly(AdapterLogitsProcessor):
    """Processor that masks odd tokens of requests with `even_tokens_only` in their `extra_args`."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        return mask_odd_tokens if (params.extra_args or {}).get("even_tokens_only") else None


class SlowTokens(AdapterLogitsProcessor):
    """Processor that sleeps for `seconds_a_token` of a request's `extra_args`, so that a row outlives an update."""

    def is_argmax_invariant(self) -> bool:
        return True

    def new_req_logits_processor(self, params: Any) -> Any:
        seconds: float = (params.extra_args or {}).get("seconds_a_token", 0.0)

        def wait(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            time.sleep(seconds)
            return logits

        return wait if seconds else None


def mask_odd_tokens(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Mask the odd tokens of one row."""
    logits[1::2] = -torch.inf
    return logits
