"""Sampling settings that truncate: ranks, engines and vLLM's workers must agree on them."""

from collections.abc import Callable
from typing import Any

# Keywords of vLLM's SamplingParams after which a token may have the probability 0, and their values when they are off
TRUNCATING: dict[str, tuple] = {
    "top_p": (None, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0.0),
    "min_tokens": (None, 0),
    "structured_outputs": (None,),
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
    "thinking_token_budget": (None,),
}


def truncating(setting: Callable[[str, None], Any]) -> list[str]:
    """
    Return the names of the settings of a request that truncate its distribution.

    Args:
        setting (`Callable`):
            Function of a name and a default that returns the setting, such as the `get` of a dictionary.
    """
    return [name for name, off in TRUNCATING.items() if setting(name, None) not in off]
