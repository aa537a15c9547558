"""Output of the library: every line that a rank prints for the user goes through this module.

Progress and failures are printed at once, because a rank that waits in a collective flushes nothing. Warnings go
through `logging`, so that a script's own settings apply to them.
"""

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

# longest wait for an output that takes nothing: Ctrl-S, a pager or `tee` that was stopped, a hung disk
BLOCKED_S = 5.0
MAX_WAITING = 1000  # lines that wait for such an output; later ones are dropped

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
    to = sys.stderr if error else sys.stdout
    _print(partial(print, f"[trl_multinode] {text}", file=to, flush=True))


def show(text: str, write: Callable[[str], object] | None = None) -> None:
    """Print text without the name of the library: the line of a step, or a table.

    Args:
        text (`str`):
            One line or several.
        write (`Callable[[str], object]`, *optional*):
            Function that prints above a progress bar.
    """
    _print(partial(write or partial(print, file=sys.stdout, flush=True), text))


class Printer:
    """Thread that prints, so that an output which blocks holds up no caller: not a heartbeat, nor the end of a run."""

    def __init__(self) -> None:
        self._lines: queue.Queue[tuple[Callable[[], object], threading.Event]] = queue.Queue(
            MAX_WAITING
        )
        self._blocked = False
        threading.Thread(target=self._run, name="printer", daemon=True).start()

    def _run(self) -> None:
        while True:
            write, written = self._lines.get()
            try:
                write()
            except Exception as error:
                _warn_once(error)
            self._blocked = False
            written.set()

    def print(self, write: Callable[[], object]) -> None:
        """Call `write`, and wait until it has returned, unless the output blocks."""
        written = threading.Event()
        try:
            self._lines.put_nowait((write, written))
        except queue.Full:
            return
        if not self._blocked and not written.wait(BLOCKED_S):
            self._blocked = True


_printer: Printer | None = None
_starting = threading.Lock()


def _forget_printer() -> None:
    """A forked process has no threads, and its parent may have held the lock."""
    global _printer, _starting
    _printer, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_printer)


def _print(write: Callable[[], object]) -> None:
    """Print a line. One that cannot be written is dropped with one warning: no run ends for want of a log."""
    global _last_line, _printer
    _last_line = time.monotonic()
    try:
        with _starting:
            _printer = _printer or Printer()
    except RuntimeError:  # no thread starts while the interpreter ends
        write()
        return
    _printer.print(write)


def _warn_once(error: Exception) -> None:
    global _failed
    if not _failed:
        _failed = True
        warn(
            f"lines of this library are missing, because the output of this rank cannot be written ({error})"
        )


def silent_since() -> float:
    """Return the time (`time.monotonic`) of this process's last line."""
    return _last_line


def warn(text: str) -> None:
    """Log a warning."""
    logger.warning("%s", text)
