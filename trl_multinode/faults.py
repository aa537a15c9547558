"""Test-only switches, read in one place. Nothing here does anything unless the environment variable is set.

`TRL_MULTINODE_FAULT="skip_load@2-2,stale_head@4"`: comma-separated names, each with the weight updates it applies to.

- `skip_load`: an update loads nothing and commits nothing, as if the worker had lost it;
- `skip_load_silently`: it loads nothing and commits all the same, the bug that only log-probs can show;
- `stale_head`: vLLM's packed copy of a tied head is not rebuilt (its real bug on a CPU).
"""

import os
from collections.abc import Mapping

VARIABLE = "TRL_MULTINODE_FAULT"
SLOW_ENGINE = "TRL_MULTINODE_SLOW_ENGINE"  # "1:0.5": engine 1 takes half a second more per request


def is_active(name: str, update: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether fault `name` applies to weight update number `update`."""
    for entry in environ.get(VARIABLE, "").split(","):
        fault, _, updates = entry.partition("@")
        first, _, last = updates.partition("-")
        if fault == name and int(first or 1) <= update <= int(last or 1 << 62):
            return True
    return False


def delay_of_engine(index: int, environ: Mapping[str, str] = os.environ) -> float:
    """Seconds by which every request of engine `index` is slowed."""
    slow, _, seconds = environ.get(SLOW_ENGINE, "-1:0").partition(":")
    return float(seconds) if int(slow) == index else 0.0
