"""A fork of a process whose other thread holds the lock of the C library's resolver."""

import os
import signal

import pytest

from trl_multinode.testing import thread_safe_fork
from trl_multinode.testing.thread_safe_fork import fork_without_held_locks

pytestmark = [pytest.mark.real, pytest.mark.nightly]  # of the test kit


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
