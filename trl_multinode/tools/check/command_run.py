"""Command after a roll-call: run it as a child, forward signals to it, and end with the exit code of the run.

`accelerate launch` and torchrun end with 1 whatever the ranks end with. So the child gets the name of a file in its
environment, into which the local main process of this node writes how the run ended (`run/endings/ending.py`).
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from ...run.endings.ending import RESUMING
from ...run.endings.exit_codes import OTHER, PREEMPTED
from ...wire.leftovers import CHECK_PREFIX, OWNER_LOCK
from ...wire.locks import hold, release
from ...wire.process_end import end_with_parent

ENDING_FILE = "TRL_MULTINODE_ENDING_FILE"
PREEMPT_SIGNAL = "TRL_MULTINODE_PREEMPT_SIGNAL"
FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
LOOK_EVERY_S = 0.1
WITNESS_S = 0.5  # in which a signal that a sender sends to many processes reaches the witness too

# A child that does nothing but print the signals that it gets itself.
WITNESS = """
import signal, sys
numbers = set(map(int, sys.argv[1:]))
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
print(0, flush=True)
while True:
    print(int(signal.sigwait(numbers)), flush=True)
"""


def run_command(command: Sequence[str]) -> int:
    """
    Run a command until it ends, and return the exit code of the run.

    A SIGTERM of `kill` reaches this process only; a scheduler's, or Ctrl-C, reaches every process of the job. A second
    one would cut torchrun's orderly end short, so a signal is forwarded only if a witness did not get it as well.

    Args:
        command (`Sequence[str]`):
            Words of the command.

    Returns:
        `int`: the code in the ending file. Without one, or if only the run ended well, the command's own, 128 + N if
            signal N has ended it.
    """
    forwarded = FORWARDED | ({number} if (number := preempt_signal()) is not None else set())
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
    with _own_folder() as folder:
        ending = folder / "ending.json"
        witness = Witness(forwarded)
        try:
            child = subprocess.Popen(
                command, env=os.environ | {ENDING_FILE: str(ending)}, preexec_fn=_prepared(os.getpid(), unblocked)
            )
            own = _wait(child, witness, forwarded)
        except OSError as error:  # no such command
            print(f"cannot run {command[0]} ({error.strerror})", file=sys.stderr, flush=True)
            own = 127
        finally:
            witness.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        return code_of(ending, own)


@contextmanager
def _own_folder() -> Iterator[Path]:
    """Yield a private folder; if this process is killed, the next start or `trl-multinode clean` removes it."""
    with tempfile.TemporaryDirectory(prefix=CHECK_PREFIX) as name:
        lock = Path(name, OWNER_LOCK)
        hold(lock)
        try:
            yield lock.parent
        finally:
            release(lock)


def code_of(ending: Path, own: int) -> int:
    """Return the exit code in an ending file, and report its cause; `own` if there is none."""
    try:
        found = json.loads(ending.read_text())
        code = int(found["code"])
    except (OSError, ValueError, KeyError, TypeError):
        return own
    if code not in range(256) or (
        code == 0 and own != 0
    ):  # the run ended well, and a later line of the command failed
        return own
    if code == PREEMPTED and found.get("continues") is False and found.get("checkpoint"):
        # 143 would make a job file start a script again that begins at step 1 and replaces this checkpoint
        print(
            f"the run was pre-empted and has saved {found['checkpoint']}, but its script begins at step 1 when it is "
            f"launched again, so the exit code is {OTHER} and not {PREEMPTED}. It continues with {RESUMING}.",
            file=sys.stderr,
            flush=True,
        )
        return OTHER
    if code != own:
        print(f"the run ended with exit code {code}: {found.get('cause')}", file=sys.stderr, flush=True)
    return code


def preempt_signal() -> int | None:
    """Return the number of the signal in `TRL_MULTINODE_PREEMPT_SIGNAL` (`USR1`, `SIGUSR1` or `10`), if it is set."""
    text = os.environ.get(PREEMPT_SIGNAL, "").strip().upper()
    number = int(text) if text.isdigit() else getattr(signal, f"SIG{text.removeprefix('SIG')}", None)
    return number if number in signal.valid_signals() else None


def _wait(child: subprocess.Popen, witness: "Witness", forwarded: set[int]) -> int:
    """Wait for the end of the command, and forward signals that are pending, which nothing but a sender can make.

    `signal.sigtimedwait` is no source of them: after a stop of this process, Python 3.11 returns numbers of none.
    """
    pidfd = os.pidfd_open(child.pid)
    try:
        while (code := child.poll()) is None:
            select.select([pidfd], [], [], LOOK_EVERY_S)
            for number in forwarded & signal.sigpending():
                signal.sigwait({number})
                if not witness.got(number):
                    _forward(child, number)
    finally:
        os.close(pidfd)
    return code if code >= 0 else 128 - code


def _forward(child: subprocess.Popen, number: int) -> None:
    """Send a signal to the command; the pre-empt signal only to its processes that handle it: a launcher does not."""
    if number != preempt_signal() or number == signal.SIGTERM:
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
    found = next((line.split()[1] for line in status.splitlines() if line.startswith(f"{kind}:")), "0")
    return bool(int(found, 16) >> (number - 1) & 1)


def _prepared(parent: int, unblocked: set[Any]) -> Any:
    def prepare() -> None:
        """End with the parent, also if it is killed; `fork` has passed on its blocked signals."""
        end_with_parent(parent, signal.SIGTERM)
        if (number := preempt_signal()) not in (None, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # a launcher has no handler and would end; the ranks install one
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)

    return prepare


class Witness:
    """Process beside the command that shows whether a signal was sent to all processes of the job.

    Args:
        numbers (`set[int]`):
            Signals.
    """

    def __init__(self, numbers: set[int]):
        prepare = partial(end_with_parent, os.getpid(), signal.SIGKILL)
        words = [sys.executable, "-I", "-S", "-c", WITNESS, *(str(int(number)) for number in numbers)]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, preexec_fn=prepare)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it is ready
        os.set_blocking(self._process.stdout.fileno(), False)

    def got(self, number: int) -> bool:
        """Return whether the witness got a signal too. It is asked once per signal that this process got."""
        assert self._process.stdout is not None
        until = time.monotonic() + WITNESS_S
        while True:
            if line := self._process.stdout.readline():
                if int(line) == number:
                    return True
            elif time.monotonic() >= until and not self._is_pending(number):
                return False
            else:
                time.sleep(0.02)

    def _is_pending(self, number: int) -> bool:
        """Return whether the witness has a signal that it has not printed yet, because the machine is busy."""
        return _has(self._process.pid, "ShdPnd", number)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
