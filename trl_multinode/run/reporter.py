"""Output of the library: every line that a rank prints for the user goes through this module.

Progress and failures are printed at once, because a rank that waits in a collective flushes nothing. Warnings go
through `logging`, so that a script's own settings apply to them.
"""

import logging
import sys
import time
from collections.abc import Callable
from typing import IO

_last_line = time.monotonic()
_failed = False  # whether a line could not be printed
logger = logging.getLogger("trl_multinode")


def report(text: object, error: bool = False) -> None:
    """Print a line with the name of the library in front.

    Args:
        text (`object`):
            Line to print; it names the node or the rank if it concerns only one.
        error (`bool`, *optional*, defaults to `False`):
            Print to stderr.
    """
    _print(f"[trl_multinode] {text}", sys.stderr if error else sys.stdout)


def show(text: str, write: Callable[[str], object] | None = None) -> None:
    """Print text without the name of the library: the line of a step, or a table.

    Args:
        text (`str`):
            One line or several.
        write (`Callable[[str], object]`, *optional*):
            Function that prints above a progress bar.
    """
    if write is not None:
        _print(text, write)
    else:
        _print(text, sys.stdout)


def _print(text: str, to: IO[str] | Callable[[str], object]) -> None:
    """Print a line. One that cannot be written is dropped with one warning: no run ends for want of a log."""
    global _last_line, _failed
    _last_line = time.monotonic()
    try:
        to(text) if callable(to) else print(text, file=to, flush=True)
    except OSError as error:
        if not _failed:
            _failed = True
            warn(f"lines of this library are missing, because the output of this rank cannot be written ({error})")


def silent_since() -> float:
    """Return the time (`time.monotonic`) of this process's last line."""
    return _last_line


def warn(text: str) -> None:
    """Log a warning."""
    logger.warning("%s", text)
