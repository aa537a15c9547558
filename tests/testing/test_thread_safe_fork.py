"""A fork of a process whose other thread holds the lock of the C library's resolver."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trl_multinode.testing import thread_safe_fork
from trl_multinode.testing.namespaces import namespaces_available
from trl_multinode.testing.thread_safe_fork import fork_without_held_locks

pytestmark = [pytest.mark.real, pytest.mark.nightly]  # of the test kit


def test_no_fork_waits_for_a_lock_that_another_thread_held(tmp_path):
    if reason := namespaces_available():
        pytest.skip(reason)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    script = Path(__file__).with_name("held_lock.py")
    command = ["unshare", "--mount", sys.executable, str(script), str(pipe)]
    found = subprocess.run(command, capture_output=True, text=True)
    forks, code = re.findall(r"\d+", found.stdout)
    # On a busy machine the limit may also end a fork that no lock holds
    assert int(forks) >= 2 and code == "3", found.stdout + found.stderr


def test_a_lock_that_stays_held_ends_in_an_error(monkeypatch):
    def wait_for_the_lock() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGALRM)

    monkeypatch.setattr(thread_safe_fork, "_look_up_or_end", wait_for_the_lock)
    with pytest.raises(RuntimeError, match="10 forks"):
        fork_without_held_locks(lambda: os._exit(3))


def test_a_process_that_ends_before_its_program_is_an_error(monkeypatch):
    monkeypatch.setattr(thread_safe_fork, "_look_up_or_end", lambda: os._exit(7))
    with pytest.raises(RuntimeError, match="ended with 7"):
        fork_without_held_locks(lambda: os._exit(3))
