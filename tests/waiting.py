"""Waiting for facts. The limit only ends a hang: it is no claim about how long something takes."""

import time
from collections.abc import Callable
from typing import Any

HANG_S = 600.0
POLL_S = 0.02


def until(
    fact: Callable[[], Any],
    what: str | Callable[[], str] = "the awaited fact",
    limit_s: float = HANG_S,
) -> Any:
    """
    Wait until `fact()` returns a true value, and return that value.

    Args:
        fact (`Callable[[], Any]`):
            Function that is polled.
        what (`str` or `Callable[[], str]`, *optional*):
            Description of the fact for the error message; a function may add the state at that time, as a log.
        limit_s (`float`, *optional*, defaults to `HANG_S`):
            Seconds after which the wait counts as a hang.

    Raises:
        AssertionError: the fact did not come true in time.
    """
    deadline = time.monotonic() + limit_s
    while not (value := fact()):
        assert time.monotonic() < deadline, (
            f"not within {limit_s:.0f} s: {what if isinstance(what, str) else what()}"
        )
        time.sleep(POLL_S)
    return value
