"""Test-only faults, all read from the environment here. A fault is inactive unless its variable is set.

`TRL_MULTINODE_FAULT="skip_load@2-2,stale_head@4"` (comma-separated) activates `skip_load` in weight update 2 only and
`stale_head` from update 4 on.

- `skip_load`: the worker loads nothing and commits nothing, as if it had lost the update.
- `skip_load_silently`: the worker loads nothing but commits the version, a bug that only log-probs reveal.
- `stale_head`: vLLM does not rebuild its packed copy of a tied head (a real vLLM bug on a CPU).
"""

import os
from collections.abc import Mapping

VARIABLE = "TRL_MULTINODE_FAULT"
SLOW_ENGINE = "TRL_MULTINODE_SLOW_ENGINE"  # "1:0.5" delays every request of engine 1 by 0.5 s


def is_active(name: str, update: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Return `True` if fault `name` is active in weight update number `update`."""
    for entry in environ.get(VARIABLE, "").split(","):
        fault, _, updates = entry.partition("@")
        first, _, last = updates.partition("-")
        if fault == name and int(first or 1) <= update <= int(last or 1 << 62):
            return True
    return False


def delay_of_engine(index: int, environ: Mapping[str, str] = os.environ) -> float:
    """Return the seconds by which engine `index` delays every request."""
    slow, _, seconds = environ.get(SLOW_ENGINE, "-1:0").partition(":")
    return float(seconds) if int(slow) == index else 0.0
