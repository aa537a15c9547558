"""Signals that end a run, received through a pipe, because a Python handler would wait for the main thread in NCCL."""

import os
import select
import signal
import threading
import time
from contextlib import suppress
from typing import Any, ClassVar

from ...wire.stop_signals import environment_signals, preempt_signals
from ..endings.exit_codes import PREEMPTED
from .exits import is_good

TOGETHER_S = 0.1  # in which the bytes of signals that were pending together arrive
PYTHONS_OWN = (signal.SIG_DFL, signal.default_int_handler)


class StopSignals:
    """The watch thread's pipe: wake-ups of this process, and the signals that end a run.

    A handler that the script installs, before or later, stays in place (it may save a checkpoint before preemption),
    and an ignored signal stays ignored (`nohup`). The exception is the pre-empt signal of the environment: a launcher
    that must survive it ignores it, and the ranks inherit that.
    """

    # those whose pipe gets the signals, the last one at present
    _catching: ClassVar[list["StopSignals"]] = []

    def __init__(self) -> None:
        self.read_end, self._write_end = os.pipe()
        self._numbers = (signal.SIGINT, *preempt_signals())
        os.set_blocking(self._write_end, False)
        self._handlers: dict[int, Any] = {}  # signal -> Python's own handler, which is replaced
        self._previous_end = -1  # the wakeup file descriptor of the script

    def wake(self) -> None:
        """Make the read end readable. A no-op after `close`."""
        with suppress(OSError):  # the pipe is full, so the thread wakes up anyway; or it is closed
            os.write(self._write_end, b"\0")

    def received(self) -> list[signal.Signals]:
        """Read the pipe, and return the stop signals that no handler of the script receives.

        The pipe gets every signal that has a Python handler, for example a reward function's alarm. SIGINT comes
        first: of signals that are pending together the kernel runs the handler of the latest number first, and a
        SIGTERM after Ctrl-C must not pre-empt the run.
        """
        # 0 is a plain wake-up, any other byte a signal's number
        numbers = os.read(self.read_end, 4096)
        if signal.SIGINT not in numbers and not set(numbers).isdisjoint(self._numbers):
            time.sleep(TOGETHER_S)
            if select.select([self.read_end], [], [], 0.0)[0]:
                numbers += os.read(self.read_end, 4096)
        stops = sorted(n for n in numbers if n in self._numbers)
        return [signal.Signals(n) for n in stops if signal.getsignal(n) is noop_handler]

    def catch(self) -> None:
        """Receive the signals from now on, if the main thread calls it and the script leaves one of them to Python."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._numbers:
            inherited = (
                number in environment_signals() and signal.getsignal(number) == signal.SIG_IGN
            )
            if inherited or signal.getsignal(number) in PYTHONS_OWN:
                self._handlers[number] = signal.signal(number, noop_handler)
        if not any(signal.getsignal(number) is noop_handler for number in self._numbers):
            return  # none of our handlers is installed, so leave the wakeup pipe to its owner
        self._previous_end = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._catching.append(self)

    def restore(self) -> None:
        """Give the signals back to Python, and the wakeup pipe to its previous owner."""
        if self not in self._catching or threading.current_thread() is not threading.main_thread():
            return
        self._catching.remove(self)
        current = signal.set_wakeup_fd(self._previous_end)
        if current != self._write_end:  # the script has installed its own meanwhile
            signal.set_wakeup_fd(current)
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is noop_handler:
                signal.signal(number, handler)
        self._handlers.clear()

    def close(self) -> None:
        """Close the pipe, after `restore` and after its last reader."""
        if self not in self._catching and self._write_end >= 0:
            ends = self.read_end, self._write_end
            self.read_end = self._write_end = -1
            for end in ends:
                os.close(end)


def _restore_all() -> None:
    """Drop the pipe in a forked child, which shares it with its parent.

    A pool that ends its workers by SIGTERM would otherwise end the run.
    """
    for signals in StopSignals._catching[::-1]:
        signals.restore()


os.register_at_fork(after_in_child=_restore_all)


def noop_handler(*_: object) -> None:
    """Do nothing: the watch thread receives the signal through the wakeup pipe."""


class Preempted(SystemExit):
    """End of a script that was pre-empted and has saved its checkpoint. The exit code is 143."""

    def __init__(self) -> None:
        super().__init__(PREEMPTED)


def ends_well(error: BaseException) -> bool:
    """Return whether an error ends the script on all ranks alike: `sys.exit(0)`, or after a pre-emption."""
    return isinstance(error, Preempted) or (isinstance(error, SystemExit) and is_good(error.code))
