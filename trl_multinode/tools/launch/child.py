"""The launcher after a roll-call: run it as a child, forward signals to it, and end with the exit code of the run.

`accelerate launch` and torchrun end with 1 whatever the ranks end with. So the child gets the name of a file in its
environment, into which the local main process of this node writes how the run ended (`run/endings/ending.py`).
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from ...run.endings.ending import RESUMING
from ...run.endings.exit_codes import OTHER, PREEMPTED
from ...wire.leftovers import CHECK_PREFIX, OWNER_LOCK
from ...wire.locks import hold, release
from ...wire.process_end import end_with_parent
from ...wire.stop_signals import environment_signals

ENDING_FILE = "TRL_MULTINODE_ENDING_FILE"
FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
LOOK_EVERY_S = 0.1
SPREAD_S = 0.5  # in which a signal that a sender sends to many processes reaches all of them
IDLE = ("sleep", "infinity")


def run_command(command: Sequence[str]) -> int:
    """
    Run a command until it ends, and return the exit code of the run.

    A SIGTERM of `kill` reaches this process only; a scheduler's, or Ctrl-C, reaches every process of the job. A second
    one would cut torchrun's orderly end short, so a signal is forwarded only if an idle process beside the command did
    not get it as well.

    Args:
        command (`Sequence[str]`):
            Words of the command.

    Returns:
        `int`: the code in the ending file. Without one, or if only the run ended well, the command's own, 128 + N if
            signal N has ended it.
    """
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    prepare = partial(_prepare, os.getpid(), unblocked)
    # If this process is killed, the next start or `trl-multinode clean` removes the folder
    with tempfile.TemporaryDirectory(prefix=CHECK_PREFIX) as folder:
        ending, lock = Path(folder, "ending.json"), Path(folder, OWNER_LOCK)
        hold(lock)
        try:
            child = subprocess.Popen(
                command, env=os.environ | {ENDING_FILE: str(ending)}, preexec_fn=prepare
            )
            own = _wait(child)
        except OSError as error:  # no such command
            _say(f"cannot run {command[0]} ({error.strerror})")
            own = 127
        finally:
            release(lock)
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        return code_of(ending, own)


def _prepare(parent: int, unblocked: set[Any]) -> None:
    """End with the parent, also if it is killed; `fork` has passed on its blocked signals."""
    end_with_parent(parent, signal.SIGTERM)
    for number in environment_signals():
        # a launcher has no handler and would end; the ranks install one
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


def _wait(child: subprocess.Popen) -> int:
    """Wait for the end of the command, and forward signals that are pending, which nothing but a sender can make.

    `signal.sigtimedwait` is no source of them: after a stop of this process, Python 3.11 returns numbers of none.
    """
    idle = _start_idle()
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = child.wait(LOOK_EVERY_S)
                return code if code >= 0 else 128 - code
            for number in FORWARDED & signal.sigpending():
                signal.sigwait({number})
                time.sleep(SPREAD_S)
                if _has(idle.pid, "ShdPnd", number):
                    idle.kill()  # in a new one, nothing is pending
                    idle = _start_idle()
                else:
                    _forward(child, number)
    finally:
        idle.kill()
        idle.wait()


def _start_idle() -> subprocess.Popen:
    """Start a process that inherits the blocked signals, so those that it gets stay pending."""
    return subprocess.Popen(IDLE, preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGKILL))


def _forward(child: subprocess.Popen, number: int) -> None:
    """Send a signal to the command; the pre-empt signal only to its processes that handle it: a launcher does not."""
    if number not in environment_signals():
        child.send_signal(number)
        return
    for process in [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]:
        if _has(process.pid, "SigCgt", number):
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def _has(pid: int, kind: str, number: int) -> bool:
    """Return whether a signal is in one of a process's sets: `SigCgt`, which it handles, or `ShdPnd`, pending."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    found = status.partition(f"\n{kind}:")[2].split()
    return bool(int(found[0], 16) >> (number - 1) & 1)


def code_of(ending: Path, own: int) -> int:
    """Return the exit code in an ending file, and report its cause; `own` if there is none."""
    try:
        found = json.loads(ending.read_text())
        code = int(found["code"])
    except (OSError, ValueError, KeyError, TypeError):
        return own
    # after a run that ended well, a later line of the command may fail
    if code == 0 or code not in range(256):
        return own
    if code == PREEMPTED and found.get("continues") is False and found.get("checkpoint"):
        # 143 would make a job file start a script again that begins at step 1 and replaces this checkpoint
        _say(
            f"the run was pre-empted and has saved {found['checkpoint']}, but its script begins at step 1 when it is "
            f"launched again, so the exit code is {OTHER} and not {PREEMPTED}. It continues with {RESUMING}."
        )
        return OTHER
    if code != own:
        _say(f"the run ended with exit code {code}: {found.get('cause')}")
    return code


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
