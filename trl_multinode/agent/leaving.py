"""An agent that leaves its run in order: its open rows end first, within a grace."""

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from ..errors import ConfigurationError
from ..run.reporter import report
from ..wire.stop_signals import preempt_signals

# after the last open row: its reply is on its way to the rank then, and a beat on its way to node 0
SETTLE_S = 2.5
SAME_S = 60.0  # between the start times of one process, as two processes read them


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
        self._logs = logs
        self._grace_s = grace_s
        self._has_rows = False
        self._last_row = 0.0  # when one was open
        self._signals = [
            number
            for number in (signal.SIGINT, signal.SIGALRM, *preempt_signals())
            if signal.getsignal(number) != signal.SIG_IGN
        ]

    def record(self) -> None:
        """Let [`ask_to_leave`] find this process.

        Raises:
            `ConfigurationError`: if another agent of this machine has the same logs.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        if (other := _agent_of(self._logs)) is not None:
            raise ConfigurationError(
                f"Another agent of this machine, process {other.pid}, writes its logs into {self._logs}.",
                setting="--logs",
                got=str(self._logs),
                cure="Give each agent a folder of its own.",
            )
        _path(self._logs, "leave").unlink(missing_ok=True)
        process = psutil.Process()
        _path(self._logs, "pid").write_text(f"{process.pid} {process.create_time()}")

    def obey_signals(self) -> None:
        """Leave at SIGTERM; end this process at a second one, SIGINT or SIGHUP, unless it was started to ignore it."""
        for number in self._signals:
            signal.signal(number, self._stop)

    def _stop(self, number: int, _: object) -> None:
        if number == signal.SIGTERM and self._has_rows and not self.asked:
            self.asked = True
            # a thread that waits for an engine that is frozen looks at no clock
            signal.setitimer(signal.ITIMER_REAL, self._grace_s)
            return
        self._ignore_signals()
        # without rows, and after the grace, the end is in order too
        raise SystemExit(0 if number in (signal.SIGTERM, signal.SIGALRM) else 128 + number)

    def _ignore_signals(self) -> None:
        """Let no further signal interrupt the end of the engines."""
        for number in self._signals:
            signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """Let SIGTERM wait for open rows inside; outside, it ends the process at once."""
        self._has_rows = True
        try:
            yield
        finally:
            self._has_rows = False
            if self.asked:
                self._ignore_signals()

    def why(self) -> str:
        """Return the reason that the caller of [`ask_to_leave`] gave."""
        with suppress(OSError):
            return _path(self._logs, "leave").read_text()
        return ""

    def is_over(self, num_open: int) -> bool:
        """Return whether the agent can end before its grace, with so many requests open."""
        now = time.monotonic()
        if num_open:
            left_s, _ = signal.getitimer(signal.ITIMER_REAL)
            report(f"leaves the run: {num_open} requests open, {left_s:.0f} s of grace left")
        if num_open or not self._last_row:
            self._last_row = now
        return now > self._last_row + SETTLE_S


def ask_to_leave(logs: Path, why: str = "") -> int:
    """Let the agent of this machine with these logs leave its run, and return its process id.

    Args:
        logs (`Path`):
            Its folder of logs.
        why (`str`, *optional*):
            Reason, for the log of the run.

    Raises:
        `ConfigurationError`: if no agent runs with these logs, or if it is another user's.
    """
    process = _agent_of(logs)
    problem = "none is recorded there, or it has ended"
    if process is not None:
        try:
            process.send_signal(0)  # before the reason is written
            _path(logs, "leave").write_text(why)
            process.terminate()
            return process.pid
        except (OSError, psutil.Error) as error:
            problem = str(error)
    raise ConfigurationError(
        f"No agent of this machine with the logs {logs} can be asked to leave: {problem}.",
        setting="--logs",
        got=str(logs),
        cure="Name the folder of its `--logs`, or send SIGTERM to its process.",
    )


def _agent_of(logs: Path) -> psutil.Process | None:
    """Return the process of this machine's agent with these logs, if it runs."""
    with suppress(OSError, ValueError, psutil.NoSuchProcess):
        pid, created = _path(logs, "pid").read_text().split()
        process = psutil.Process(int(pid))
        # a clock that was set moves the times of all processes
        if abs(process.create_time() - float(created)) < SAME_S:
            return process
    return None


def _path(logs: Path, kind: str) -> Path:
    """Return a file of this machine's agent in a folder that several machines may share."""
    return logs / f"agent-{socket.gethostname()}.{kind}"
