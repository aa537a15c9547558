"""Signals by which a launcher or a scheduler stops a run. A scheduler sends them to the engines' processes too.

The processes of an engine ignore them: an engine that obeyed would end before its owner could save a checkpoint. They
end with their owner in any case, because each holds a pidfd on its parent or has a parent-death signal.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import ConfigurationError

PREEMPT_VARIABLE = "TRL_MULTINODE_PREEMPT_SIGNAL"
# torchrun passes both on to its ranks, and kills them later. A terminal or an ssh session that is closed sends SIGHUP.
OF_LAUNCHERS = (signal.SIGTERM, signal.SIGHUP)
ALLOWED = (signal.SIGUSR1, signal.SIGUSR2)  # torchrun handles the others, or Python does
END_ENGINE = signal.SIGRTMIN  # from the owner to its engine, in the place of SIGTERM

_replaced: dict[int, Any] = {}  # handlers of vLLM, while they are replaced


def preempt_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that pre-empt a run: SIGTERM, SIGHUP, and the one of the environment if it is valid."""
    return *OF_LAUNCHERS, *environment_signals()


def environment_signals() -> list[signal.Signals]:
    """Return the signal that the environment names, in a list; an empty one without a valid name."""
    name = os.environ.get(PREEMPT_VARIABLE, "").upper()
    return [number for number in ALLOWED if name in (number.name, number.name.removeprefix("SIG"))]


def check_preempt_signal() -> None:
    """Raise `ConfigurationError` if the environment names a signal that cannot pre-empt a run."""
    name = os.environ.get(PREEMPT_VARIABLE)
    if name and not environment_signals():
        raise ConfigurationError(
            f"{PREEMPT_VARIABLE} must be USR1 or USR2, got {name!r}.",
            setting=PREEMPT_VARIABLE,
            got=name,
            expected=("USR1", "USR2"),
            cure="SIGTERM and SIGHUP need no variable; torchrun and Python use the other signals themselves.",
        )


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Start a process inside: it inherits the blocked signals, and loses none before it calls `ignore_stop_signals`.

    Other threads of this process still receive them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, preempt_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stop_signals() -> None:
    """Ignore the signals from now on, and remember the handlers of another library. For the processes of an engine.

    Processes that this one starts ignore them too, until a library installs its own handlers there.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in preempt_signals():
        before = signal.signal(number, signal.SIG_IGN)
        if callable(before):
            _replaced[number] = before
    signal.pthread_sigmask(signal.SIG_UNBLOCK, preempt_signals())


def obey_stop_signals() -> None:
    """Install the handlers again that `ignore_stop_signals` replaced: vLLM ends its processes by SIGTERM."""
    while _replaced:
        signal.signal(*_replaced.popitem())
