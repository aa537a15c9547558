"""Output of the library: every line that a rank prints for the user goes through this module.

Progress and failures are printed at once, because a rank that waits in a collective flushes nothing. Warnings go
through `logging`, so that a script's own settings apply to them.
"""

import logging
import sys
import time
from collections.abc import Callable

_last_line = time.monotonic()
logger = logging.getLogger("trl_multinode")


def report(text: object, error: bool = False) -> None:
    """Print a line with the name of the library in front.

    Args:
        text (`object`):
            Line to print; it names the node or the rank if it concerns only one.
        error (`bool`, *optional*, defaults to `False`):
            Print to stderr.
    """
    global _last_line
    _last_line = time.monotonic()
    print(f"[trl_multinode] {text}", file=sys.stderr if error else sys.stdout, flush=True)


def show(text: str, write: Callable[[str], object] | None = None) -> None:
    """Print text without the name of the library: the line of a step, or a table.

    Args:
        text (`str`):
            One line or several.
        write (`Callable[[str], object]`, *optional*):
            Function that prints above a progress bar.
    """
    global _last_line
    _last_line = time.monotonic()
    if write is not None:
        write(text)
    else:
        print(text, flush=True)


def silent_since() -> float:
    """Return the time (`time.monotonic`) of this process's last line."""
    return _last_line


def warn(text: str) -> None:
    """Log a warning."""
    logger.warning("%s", text)
