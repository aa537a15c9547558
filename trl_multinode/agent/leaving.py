"""An agent that leaves its run in order: its open rows end first, within a grace."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from ..errors import ConfigurationError
from ..run.reporter import report

# in a row, a second each: the last replies are on their way to the ranks then, and a beat to node 0
LOOKS_WITHOUT_ROWS = 3


class Leaving:
    """Requests to an agent to leave its run, and what is left to do then.

    Args:
        logs (`Path`):
            Folder of the agent's logs; other processes find the agent there.
        grace_s (`float`):
            Longest time for the open rows. Those that are left begin again on other engines.

    Attributes:
        asked (`bool`):
            Whether the agent leaves.
    """

    def __init__(self, logs: Path, grace_s: float):
        self.asked = False
        self._grace_s = grace_s
        self._has_rows = False
        self._looks = 0
        self._why = logs / f"{_name()}.leave"
        logs.mkdir(parents=True, exist_ok=True)
        self._why.unlink(missing_ok=True)
        process = psutil.Process()
        _record(logs).write_text(f"{process.pid} {process.create_time()}")

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Let a request wait for open rows inside; outside, the process ends at once."""
        self._has_rows = True
        try:
            yield
        finally:
            self._has_rows = False

    def ask(self) -> bool:
        """Take note of a request. A signal handler calls it, and gets SIGALRM at the end of the grace.

        Returns:
            `bool`: whether the agent leaves in order; `False` if it has no rows, or was asked before.
        """
        if self.asked or not self._has_rows:
            return False
        self.asked = True
        # a thread that waits for an engine that is frozen looks at no clock
        signal.setitimer(signal.ITIMER_REAL, self._grace_s)
        return True

    def why(self) -> str:
        """Return the reason that the caller of [`ask_to_leave`] gave."""
        with suppress(OSError):
            return self._why.read_text()
        return ""

    def is_over(self, num_open: int) -> bool:
        """Return whether the agent can end before its grace, with so many requests open."""
        self._looks = 0 if num_open else self._looks + 1
        if num_open:
            left_s, _ = signal.getitimer(signal.ITIMER_REAL)
            report(f"leaves the run: {num_open} requests open, {left_s:.0f} s of grace left")
        return self._looks >= LOOKS_WITHOUT_ROWS


def ask_to_leave(logs: Path, why: str = "") -> int:
    """Let the agent of this machine with these logs leave its run, and return its process id.

    Args:
        logs (`Path`):
            Its folder of logs.
        why (`str`, *optional*):
            Reason, for the log of the run.

    Raises:
        `ConfigurationError`: if no agent runs with these logs.
    """
    try:
        pid, created = _record(logs).read_text().split()
        process = psutil.Process(int(pid))
        if process.create_time() != float(created):
            raise psutil.NoSuchProcess(process.pid)
    except (OSError, ValueError, psutil.NoSuchProcess) as error:
        raise ConfigurationError(
            f"No agent of this machine runs with the logs {logs} ({error}).",
            setting="--logs",
            got=str(logs),
            cure="Name the folder of its `--logs`, or send SIGTERM to its process.",
        ) from error
    if why:
        (logs / f"{_name()}.leave").write_text(why)
    os.kill(process.pid, signal.SIGTERM)
    return process.pid


def _name() -> str:
    """Return the name of this machine's agent in a folder that several machines may share."""
    return f"agent-{socket.gethostname()}"


def _record(logs: Path) -> Path:
    return logs / f"{_name()}.pid"
