"""Faults that are silent: stopped ranks, frozen nodes, cut links, a held interpreter lock, waits without an end."""

import os
import signal
import sys
import time
from dataclasses import replace

import pytest
from beating import LIMIT_S, LIMITS, STORE_S, Link, enter
from forks import forked
from store_host import RANKS, StoreHost

from trl_multinode.run import meeting as meeting_module
from trl_multinode.run import store as run_store
from trl_multinode.run.endings.exit_codes import PEER_LOST
from trl_multinode.run.heartbeats import beats as beats_module
from trl_multinode.run.heartbeats import judges as judges_module
from trl_multinode.run.watch import watch_thread as watch_module

FAILED = "[trl_multinode] the run failed: "
SLACK_S = 10.0  # what docs/faults.md promises beyond the limit


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(run_store, "GRACE_S", 1.0)
    monkeypatch.setattr(watch_module, "POLL_S", 0.1)
    monkeypatch.setattr(beats_module, "DUTY_S", 1.0)
    monkeypatch.setattr(judges_module, "NAME_EVERY_S", 1.0)
    monkeypatch.setattr(judges_module, "READ_STATES_EVERY_S", 0.2)
    monkeypatch.setattr(meeting_module, "PROGRESS_EVERY_S", 1.0)
    monkeypatch.setattr(meeting_module, "STATE_EVERY_S", 0.1)


@pytest.fixture
def link(store):
    link = Link(store.port)
    yield link
    link.close()


def a_step(rank: int, store: StoreHost, limits=LIMITS, port: int | None = None, seconds: float = 60.0) -> None:
    """A rank that waits in a collective of a training step for ranks that never come."""
    me = enter(rank, port or store.port, limits, store_s=STORE_S if port is None else LIMIT_S)
    with me.activity.inside(), me.phases("train"):
        wait_in_a_collective(seconds)


def wait_in_a_collective(seconds: float) -> None:
    print("waits", flush=True)
    time.sleep(seconds)


def all_wait(ranks) -> None:
    for rank in ranks:
        rank.wait_for("waits")
    time.sleep(2.0)  # some heartbeats


def end_of(ranks, start: float) -> str:
    """All `ranks` end within the promised time, with one line, which is returned."""
    statuses = [rank.wait(LIMIT_S + SLACK_S + 10) for rank in ranks]
    print(f"ended after {time.monotonic() - start:.1f} s")
    assert statuses == [PEER_LOST] * len(ranks), "\n".join(rank.text for rank in ranks)
    (line,) = {rank.text.splitlines()[-1] for rank in ranks}
    assert line.startswith(FAILED), line
    return line.removeprefix(FAILED)


@pytest.mark.parametrize("stopped", [0, 3])
def test_row_12_a_stopped_rank_ends_the_run_and_is_named(tmp_path, store, stopped):
    with forked(lambda rank: a_step(rank, store), RANKS, tmp_path) as ranks:
        all_wait(ranks)
        os.kill(ranks[stopped].process.pid, signal.SIGSTOP)
        start = time.monotonic()
        line = end_of([rank for number, rank in enumerate(ranks) if number != stopped], start)
        assert time.monotonic() - start < LIMIT_S + SLACK_S
        assert f"rank {stopped} (node {stopped // 2}) has neither sent a heartbeat nor used the CPU for" in line
        assert "in phase train of step 4 for" in line and "in wait_in_a_collective < " in line
        assert ranks[stopped].wait(5) == -signal.SIGKILL  # by a rank of its node


def while_locked(seconds: float) -> None:
    """Use the CPU without giving the interpreter lock to another thread, as one long call of native code does."""
    sys.setswitchinterval(3600.0)  # threads that wait for the lock do not ask for it before
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    sys.setswitchinterval(0.005)


def test_row_13_a_rank_that_holds_the_interpreter_lock_but_works_is_named_and_goes_on(tmp_path, store):
    def body(rank: int) -> float:
        me = enter(rank, store.port)
        seconds = 0.0
        with me.activity.inside(), me.phases("reward"):
            time.sleep(1.0)
            if rank == 3:
                start = time.monotonic()
                while_locked(2 * LIMIT_S)
                seconds = time.monotonic() - start
        me.meeting.wait()
        me.watch.close()
        return seconds

    with forked(body, RANKS, tmp_path) as ranks:
        assert [rank.wait(60) for rank in ranks] == [0] * RANKS, "\n".join(rank.text for rank in ranks)
        assert ranks[3].result > LIMIT_S + 1
        assert "rank 3 (node 1) has sent no heartbeat for" in ranks[2].text
        assert "but uses the CPU; it was last in phase reward of step 4 for" in ranks[2].text


def test_row_13_a_rank_that_holds_the_interpreter_lock_for_too_long_ends_the_run(tmp_path, store):
    def body(rank: int) -> None:
        me = enter(rank, store.port, replace(LIMITS, stuck_s=LIMIT_S + 2))
        with me.activity.inside(), me.phases("reward"):
            time.sleep(1.0)
            while_locked(60.0) if rank == 3 else wait_in_a_collective(60.0)

    with forked(body, RANKS, tmp_path) as ranks:
        ranks[0].wait_for("waits")
        line = end_of(ranks[:3], time.monotonic())
        assert "rank 3 (node 1) has sent no heartbeat for" in line and "(`stuck_timeout` 5 s)" in line
        assert ranks[3].wait(5) == -signal.SIGKILL


def test_row_18_the_others_name_the_slow_rank_and_the_run_goes_on(tmp_path, store):
    def body(rank: int) -> None:
        me = enter(rank, store.port)
        with me.activity.inside():
            with me.phases("reward"):
                time.sleep(LIMIT_S + 2 if rank == 3 else 0.0)  # a slow verifier
            me.meeting.wait()
            with me.phases("generate" if rank == 3 else "train"):  # elsewhere than the others, without a meeting
                time.sleep(4.0)
            with me.phases("train"):
                me.meeting.wait()
        me.watch.close()

    with forked(body, RANKS, tmp_path) as ranks:
        assert [rank.wait(60) for rank in ranks] == [0] * RANKS, "\n".join(rank.text for rank in ranks)
        assert " s for rank 3 (node 1), in phase reward" in ranks[0].text + ranks[1].text
        assert (
            "3 ranks waiting" in ranks[0].text and "for rank 3 (node 1), in phase generate of step 4" in ranks[0].text
        )


def test_row_30_a_cut_link_ends_both_sides(tmp_path, store, link):
    def body(rank: int) -> None:
        a_step(rank, store, port=link.port if rank >= 2 else None)

    with forked(body, RANKS, tmp_path) as ranks:
        all_wait(ranks)
        link.cut()
        start = time.monotonic()
        near = end_of(ranks[:2], start)
        assert time.monotonic() - start < LIMIT_S + SLACK_S
        assert "node 1 (ranks 2 to 3) has sent no heartbeat for" in near and "(`heartbeat_timeout` 3 s)" in near
        assert "was last in phase train of step 4" in near
        far = end_of(ranks[2:], start)
        assert time.monotonic() - start < LIMIT_S + SLACK_S + 5
        assert "the launcher of node 0, which hosts the rendezvous store, ended or cannot be reached" in far


def test_row_30_a_link_that_is_cut_for_less_than_the_limit_changes_nothing(tmp_path, store, link):
    def body(rank: int) -> None:
        me = enter(rank, link.port if rank >= 2 else store.port, replace(LIMITS, heartbeat_s=4 * LIMIT_S))
        with me.activity.inside(), me.phases("train"):
            wait_in_a_collective(6.0)
        me.watch.close()

    with forked(body, RANKS, tmp_path) as ranks:
        all_wait(ranks)
        link.cut()
        time.sleep(LIMIT_S)
        link.heal()
        assert [rank.wait(60) for rank in ranks] == [0] * RANKS, "\n".join(rank.text for rank in ranks)


def test_row_30_reset_connections_are_opened_again(tmp_path, store, link):
    def body(rank: int) -> int:
        me = enter(rank, link.port if rank >= 2 else store.port)
        meetings = 0
        with me.activity.inside():
            for _ in range(30):
                with me.phases("train"):
                    time.sleep(0.1 * (rank % 2))
                me.meeting.wait()
                meetings += 1
                print(f"met {meetings}", flush=True)
        me.watch.close()
        return meetings

    with forked(body, RANKS, tmp_path) as ranks:
        for number in (3, 10, 17):
            ranks[2].wait_for(f"met {number}")
            assert link.reset() >= 4  # two per rank of node 1
        assert [rank.wait(60) for rank in ranks] == [0] * RANKS, "\n".join(rank.text for rank in ranks)
        assert [rank.result for rank in ranks] == [30] * RANKS
        assert "a connection to the run's store was reset; opened again after" in ranks[2].text


@pytest.mark.parametrize("node", [0, 1])
def test_a_frozen_node_ends_the_run(tmp_path, store, node):
    with forked(lambda rank: a_step(rank, store), RANKS, tmp_path) as ranks:
        all_wait(ranks)
        for rank in ranks[2 * node : 2 * node + 2]:
            os.kill(rank.process.pid, signal.SIGSTOP)
        start = time.monotonic()
        line = end_of(ranks[2 - 2 * node : 4 - 2 * node], start)
        assert time.monotonic() - start < LIMIT_S + SLACK_S
        assert f"node {node} (ranks {2 * node} to {2 * node + 1}) has sent no heartbeat for" in line


def test_ranks_in_different_collectives_end_the_run_after_the_stuck_limit(tmp_path, store):
    def body(rank: int) -> None:
        me = enter(rank, store.port, replace(LIMITS, stuck_s=2.0))
        with me.activity.inside(), me.phases("sync" if rank == 1 else "train"):
            wait_in_a_collective(60.0)

    with forked(body, RANKS, tmp_path) as ranks:
        all_wait(ranks)
        line = end_of(ranks, time.monotonic())
        assert "no rank has made progress for" in line and "(3 in train, 1 in sync)" in line
        assert "The slowest is rank 1 (node 0), in phase sync of step 4 for" in line and "wait_in_a_collective" in line


def test_long_work_that_is_no_fault_trips_nothing(tmp_path, store):
    """A slow reward, an engine that starts, a save that writes, a script's own work: each longer than all limits."""

    def body(rank: int) -> None:
        me = enter(rank, store.port, replace(LIMITS, stuck_s=4.0), synced=False)
        with me.activity.inside():
            with me.phases("set-up"):
                time.sleep(5.0)
            me.activity.synced = True
            with me.phases("reward"):
                time.sleep(6.0 if rank == 2 else 0.0)
            me.meeting.wait()
            with me.phases("checkpoint"), open(tmp_path / f"model{rank}", "wb") as file:
                for _ in range(60 if rank == 0 else 1):
                    file.write(bytes(2**20))
                    time.sleep(0.1)
            me.meeting.wait()
        time.sleep(6.0 if rank == 0 else 0.0)
        me.watch.close()

    with forked(body, RANKS, tmp_path) as ranks:
        assert [rank.wait(60) for rank in ranks] == [0] * RANKS, "\n".join(rank.text for rank in ranks)


def test_a_judge_that_was_suspended_forgives_all(tmp_path, store, monkeypatch):
    monkeypatch.setattr(beats_module, "SUSPENDED_S", 2.0)
    monkeypatch.setattr(judges_module, "JUDGE_LATE_S", 1.5)

    def body(rank: int) -> None:
        me = enter(rank, store.port)
        with me.activity.inside(), me.phases("train"):
            wait_in_a_collective(10.0)
        me.watch.close()

    with forked(body, RANKS, tmp_path) as ranks:
        all_wait(ranks)
        for number in (signal.SIGSTOP, signal.SIGCONT):  # a batch system suspends the job, and resumes it
            for rank in ranks:
                os.kill(rank.process.pid, number)
            time.sleep(LIMIT_S + 2 if number == signal.SIGSTOP else 0.0)
        assert [rank.wait(60) for rank in ranks] == [0] * RANKS, "\n".join(rank.text for rank in ranks)


def test_without_a_limit_a_stopped_rank_is_waited_for(tmp_path, store):
    def body(rank: int) -> None:
        me = enter(rank, store.port, replace(LIMITS, heartbeat_s=0.0, stuck_s=0.0), store_s=STORE_S)
        with me.activity.inside(), me.phases("train"):
            wait_in_a_collective(LIMIT_S + 5)
        me.watch.close()

    with forked(body, RANKS, tmp_path) as ranks:
        all_wait(ranks)
        os.kill(ranks[3].process.pid, signal.SIGSTOP)
        time.sleep(LIMIT_S + 1)
        os.kill(ranks[3].process.pid, signal.SIGCONT)
        assert [rank.wait(60) for rank in ranks] == [0] * RANKS, "\n".join(rank.text for rank in ranks)
