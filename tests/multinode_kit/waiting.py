"""Polling with a deadline."""

import time
from collections.abc import Callable

POLL_S = 0.1


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Poll until `condition` returns `True`, and return whether it did so within `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
