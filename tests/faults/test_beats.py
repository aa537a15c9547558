"""Faults that are silent, on real ranks: a stopped rank, a cut link, a held interpreter lock, a suspended job.

`tests/test_judges.py` has what ends a run and what does not, on states that a test makes up.
"""

import mmap
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from beating import LIMIT_S, LIMITS, BeatReader, Link, enter
from forks import forked
from store_host import RANKS
from waiting import HANG_S, until

from trl_multinode.run import store as run_store
from trl_multinode.run.endings.exit_codes import PEER_LOST
from trl_multinode.run.heartbeats import beats as beats_module
from trl_multinode.run.heartbeats import judges as judges_module
from trl_multinode.run.watch import watch_thread as watch_module

FAILED = "[trl_multinode] the run failed: "
SHORT = replace(LIMITS, heartbeat_s=LIMIT_S)
pytestmark = pytest.mark.real  # 50 s of waiting for limits


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(run_store, "GRACE_S", 1.0)
    monkeypatch.setattr(watch_module, "POLL_S", 0.1)
    monkeypatch.setattr(beats_module, "DUTY_S", 1.0)
    monkeypatch.setattr(beats_module, "WRITE_EVERY_S", 0.5)
    monkeypatch.setattr(judges_module, "NAME_EVERY_S", 1.0)
    monkeypatch.setattr(judges_module, "READ_STATES_EVERY_S", 0.2)


@pytest.fixture
def link(store):
    link = Link(store.port)
    yield link
    link.close()


def wait_in_a_collective() -> None:
    """Wait for ranks that never come."""
    time.sleep(HANG_S)


def wait_for_the_test(file: Path) -> None:
    """Wait until the test makes a file."""
    until(file.exists, str(file))


def line_of_all(ranks) -> str:
    """Return the one line with which all `ranks` end."""
    assert [rank.wait() for rank in ranks] == [PEER_LOST] * len(ranks), "\n".join(
        rank.text for rank in ranks
    )
    (line,) = {rank.text.splitlines()[-1] for rank in ranks}
    assert line.startswith(FAILED), line
    return line


def test_row_12_a_stopped_rank_ends_the_run_and_is_named(tmp_path, store):
    """Rank 0 writes the beats of its node until it is stopped; then rank 1 does."""

    def body(rank: int) -> None:
        me = enter(rank, store.port, SHORT)
        with me.activity.inside(), me.phases("train"):
            wait_in_a_collective()

    with forked(body, RANKS, tmp_path) as ranks:
        BeatReader(store, ranks[0]).wait(2, "wait_in_a_collective")
        os.kill(ranks[0].process.pid, signal.SIGSTOP)
        line = line_of_all(ranks[1:])
        assert "rank 0 (node 0)" in line and f"`heartbeat_timeout` {LIMIT_S:g} s" in line
        assert "phase train of step 4" in line and "in wait_in_a_collective < " in line
        assert ranks[0].wait() == -signal.SIGKILL  # by a rank of its node


def test_row_30_a_cut_link_ends_both_sides(tmp_path, store, link):
    def body(rank: int) -> None:
        port, store_s = (link.port, LIMIT_S) if rank >= 2 else (store.port, HANG_S)
        me = enter(rank, port, SHORT, store_s=store_s)
        with me.activity.inside(), me.phases("train"):
            wait_in_a_collective()

    with forked(body, RANKS, tmp_path) as ranks:
        BeatReader(store, ranks[0]).wait(2, "wait_in_a_collective")
        link.cut()
        near = line_of_all(ranks[:2])
        assert "node 1 (ranks 2 to 3)" in near and f"`heartbeat_timeout` {LIMIT_S:g} s" in near
        assert "phase train of step 4" in near
        assert "launcher of node 0" in line_of_all(ranks[2:])


def test_row_30_reset_connections_are_opened_again(tmp_path, store, link):
    """A reset comes while three ranks wait in a meeting for rank 0."""
    resets, meetings = (3, 6, 9), 12

    def body(rank: int) -> int:
        me = enter(rank, link.port if rank >= 2 else store.port)
        met = 0
        with me.activity.inside():
            while met < meetings:
                if rank == 0 and met in resets:
                    wait_for_the_test(tmp_path / f"reset{met}")
                me.meeting.wait()
                met += 1
                print(f"met {met}.", flush=True)
        me.watch.close()
        return met

    with forked(body, RANKS, tmp_path) as ranks:
        for number in resets:
            ranks[2].wait_for(f"met {number}.")
            until(lambda: link.num_open >= 4, "two connections of each rank of node 1")
            link.reset()
            (tmp_path / f"reset{number}").touch()
        assert [rank.result for rank in ranks] == [meetings] * RANKS
        assert "store was reset" in ranks[2].text


def hold_the_interpreter_lock(until_set: mmap.mmap) -> None:
    """Use the CPU without giving the interpreter lock to another thread, as one long call of native code does."""
    sys.setswitchinterval(3600.0)  # threads that wait for the lock do not ask for it before
    while not until_set[0]:
        pass
    sys.setswitchinterval(0.005)


def test_long_work_that_is_no_fault_trips_nothing(tmp_path, store):
    """A reward function in native code, then a save: each is longer than the limits of heartbeats and of progress."""
    named = mmap.mmap(-1, 1)  # shared with the forked ranks; to read it needs no system call

    def body(rank: int) -> None:
        me = enter(rank, store.port, replace(SHORT, stuck_s=2 * LIMIT_S))
        with me.activity.inside():
            with me.phases("reward"):
                if rank == 3:
                    wait_for_the_test(tmp_path / "all have heartbeats")
                    hold_the_interpreter_lock(named)
            me.meeting.wait()
            with me.phases("checkpoint"), open(tmp_path / f"model{rank}", "wb") as file:
                start = time.monotonic()
                while rank == 0 and time.monotonic() - start < 2 * LIMIT_S + 2:
                    file.write(bytes(2**20))
                    time.sleep(0.1)
            me.meeting.wait()
        me.watch.close()

    with forked(body, RANKS, tmp_path) as ranks:
        BeatReader(store, ranks[0]).wait(1)
        (tmp_path / "all have heartbeats").touch()
        ranks[2].wait_for("rank 3 (node 1) has sent no heartbeat")
        named[0] = 1
        assert [rank.wait() for rank in ranks] == [0] * RANKS, "\n".join(
            rank.text for rank in ranks
        )
        assert "uses the CPU" in ranks[2].text and "phase reward of step 4" in ranks[2].text
        assert not any(FAILED in rank.text for rank in ranks)


def test_a_judge_that_was_suspended_forgives_all(tmp_path, store, monkeypatch):
    """A batch system suspends the job for longer than the limit, and resumes it."""
    monkeypatch.setattr(beats_module, "SUSPENDED_S", 2.0)
    monkeypatch.setattr(judges_module, "JUDGE_LATE_S", 1.5)

    def body(rank: int) -> None:
        me = enter(rank, store.port, SHORT)
        with me.activity.inside(), me.phases("train"):
            wait_for_the_test(tmp_path / "seen")
        me.watch.close()

    with forked(body, RANKS, tmp_path) as ranks:
        beats = BeatReader(store, ranks[0])
        beats.wait(2, "until")
        for rank in ranks:
            os.kill(rank.process.pid, signal.SIGSTOP)
        time.sleep(LIMIT_S + 1)
        for rank in ranks:
            os.kill(rank.process.pid, signal.SIGCONT)
        beats.wait(3)  # each comes before its writer judges
        (tmp_path / "seen").touch()
        assert [rank.wait() for rank in ranks] == [0] * RANKS, "\n".join(
            rank.text for rank in ranks
        )
