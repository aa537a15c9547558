"""A rank never fails alone: whatever goes wrong on one, all end within seconds and with the same line."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from forks import forked
from store_host import RANKS, enter
from waiting import HANG_S
from waiting import until as until_true

from trl_multinode.errors import EngineDiedError
from trl_multinode.run import store as run_store
from trl_multinode.run.endings import exit_codes
from trl_multinode.run.watch import watch_thread as watch_module
from trl_multinode.run.watch import watchdog
from trl_multinode.run.watch.watchdog import Watchdog

FAILED = "[trl_multinode] the run failed: "


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    """A rank that has failed waits for the others for a short time, and no starved rank loses the store."""
    monkeypatch.setattr(run_store, "GRACE_S", 1.5)
    monkeypatch.setattr(run_store, "STORE_TIMEOUT_S", 60.0)


def in_a_collective(watch: Watchdog | None) -> None:
    """The main thread waits for ranks that never come."""
    time.sleep(HANG_S)


def the_line(ranks, code: int = exit_codes.USER_CODE) -> str:
    """All `ranks` end in time with the same exit code, and all with one and the same last line."""
    statuses = [rank.wait() for rank in ranks]
    assert statuses == [code] * len(ranks), [rank.text for rank in ranks]
    last = {rank.text.splitlines()[-1] for rank in ranks}
    assert len(last) == 1, last
    (line,) = last
    assert line.startswith(FAILED)
    return line.removeprefix(FAILED)


def until(path: Path) -> None:
    until_true(path.exists, str(path))


def all_up(ranks) -> None:
    for rank in ranks:
        rank.wait_for("up")


@pytest.mark.fault("17")
def test_an_exception_on_one_rank_ends_all_with_its_line(tmp_path, store):
    def body(rank: int) -> None:
        watch = enter(rank, store)
        watch.add_cleanup(lambda: print("cleaned up", flush=True))
        with watch.guard():
            if rank == 2:
                until(tmp_path / "now")
                raise ValueError("no reward\nfor row 3")
            in_a_collective(watch)

    with forked(body, RANKS, tmp_path) as ranks:
        all_up(ranks)
        (tmp_path / "now").touch()
        assert the_line(ranks) == "node 1, rank 2, phase reward: ValueError: no reward for row 3"
        assert all(rank.text.count("cleaned up") == 1 for rank in ranks)
        assert 'raise ValueError("no reward\\nfor row 3")' in ranks[2].text  # its own log has the traceback


def test_of_two_failures_at_once_one_line_wins_everywhere(tmp_path, store):
    def body(rank: int) -> None:
        with enter(rank, store).guard():
            raise ValueError(f"of rank {rank}")

    with forked(body, RANKS, tmp_path) as ranks:
        assert "ValueError: of rank" in the_line(ranks)


def test_the_line_is_the_last_one_although_the_main_thread_is_printing_a_traceback(tmp_path, store):
    def body(rank: int) -> None:
        class Slow(Exception):  # the line of rank 0 arrives while this one is printed
            def __str__(self):
                time.sleep(1.0 if sys._getframe(1).f_globals["__name__"] == "traceback" else 0.0)
                return "printed slowly"

        watch = enter(rank, store)
        with watch.guard():
            until(tmp_path / "now")
            if rank == 0:
                raise ValueError("of rank 0")
            raise Slow

    with forked(body, RANKS, tmp_path) as ranks:
        all_up(ranks)
        (tmp_path / "now").touch()
        by_others = "printed slowly" in the_line(ranks)
        for rank in ranks[1:]:
            assert rank.text.count("printed slowly") == 1 + by_others, "the traceback was cut"


@pytest.mark.fault("output_blocks")
def test_a_rank_whose_output_blocks_ends_all_ranks_all_the_same(tmp_path, store):
    def body(rank: int) -> None:
        watch = enter(rank, store)
        if rank == 3:  # Ctrl-S, or a pager that was stopped
            for stream in (1, 2):
                os.dup2(full_pipe(), stream)
        with watch.guard():
            if rank == 3:
                raise ValueError("the reward failed")
            time.sleep(HANG_S)

    with forked(body, RANKS, tmp_path) as ranks:
        assert "node 1, rank 3" in the_line(ranks[:3]) and "the reward failed" in the_line(ranks[:3])
        assert ranks[3].wait() == ranks[0].process.exitcode


def full_pipe() -> int:
    """Return the end of a pipe that takes no more bytes, as the output of a process has it."""
    _, end = os.pipe()
    os.set_blocking(end, False)
    with suppress(BlockingIOError):
        while True:
            os.write(end, b"x" * 512)
    os.set_blocking(end, True)
    return end


@pytest.mark.fault("10")
def test_a_killed_rank_is_named_by_its_node(tmp_path, store):
    with forked(lambda rank: in_a_collective(enter(rank, store)), RANKS, tmp_path) as ranks:
        all_up(ranks)
        ranks[2].process.kill()
        line = the_line([ranks[0], ranks[1], ranks[3]], exit_codes.PEER_LOST)
        assert line.startswith("node 1, rank 3, phase reward: the process of rank 2 (local main process) ended")
        assert f"(pid {ranks[2].process.pid})" in line


def test_a_stopped_rank_does_not_keep_the_others(tmp_path, store):
    def body(rank: int) -> None:
        with enter(rank, store).guard():
            if rank == 0:
                until(tmp_path / "now")
                raise ValueError("engine gone")
            in_a_collective(None)

    with forked(body, RANKS, tmp_path) as ranks:
        all_up(ranks)
        os.kill(ranks[3].process.pid, signal.SIGSTOP)
        (tmp_path / "now").touch()
        assert "ValueError: engine gone" in the_line(ranks[:3])


def test_a_closed_store_ends_all_with_the_same_line(tmp_path, store):
    with forked(lambda rank: in_a_collective(enter(rank, store)), RANKS, tmp_path) as ranks:
        all_up(ranks)
        store.end()
        line = the_line(ranks, exit_codes.PEER_LOST)
        assert "PeerFailureError: the launcher of node 0" in line and f"127.0.0.1:{store.port}" in line


@pytest.mark.fault("launcher_frozen")
def test_a_store_that_stops_answering_ends_all_with_the_same_line(tmp_path, store):
    def body(rank: int) -> None:
        watch = enter(rank, store)
        until(tmp_path / "now")
        watch.limit_store(3.0)
        in_a_collective(watch)

    with forked(body, RANKS, tmp_path) as ranks:
        all_up(ranks)
        os.kill(store.process.pid, signal.SIGSTOP)
        (tmp_path / "now").touch()
        assert "PeerFailureError: the launcher of node 0" in the_line(ranks, exit_codes.PEER_LOST)


def test_the_end_of_a_watched_process_is_told_with_its_cause_and_before_its_symptoms(tmp_path, store, monkeypatch):
    monkeypatch.setattr(watch_module, "SYMPTOM_DELAY_S", 2 * HANG_S)

    def body(rank: int) -> None:
        watch = enter(rank, store)
        with watch.guard():
            if rank == 1:  # sees an end of file first, as a rank without the engine's pid does
                raise EngineDiedError("engine 0 of node 0 ended; see its log")
            if rank == 0:
                engine = subprocess.Popen(["sleep", "0.3"])
                watch.add_process(engine.pid, lambda: "engine 0 of node 0 was killed by SIGKILL")
            in_a_collective(watch)

    with forked(body, RANKS, tmp_path) as ranks:
        line = the_line(ranks, exit_codes.ENGINE)
        assert line == "node 0, rank 0, phase reward: engine 0 of node 0 was killed by SIGKILL"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_though_the_main_thread_is_in_a_collective(tmp_path, store, number):
    def body(rank: int) -> None:
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # a suite in the background ignores it, and so would we
        in_a_collective(enter(rank, store, launched=True))

    with forked(body, RANKS, tmp_path) as ranks:
        all_up(ranks)
        os.kill(ranks[1].process.pid, number)
        code = exit_codes.PREEMPTED if number == signal.SIGTERM else exit_codes.OTHER
        assert the_line(ranks, code) == f"node 0, rank 1, phase reward: stopped by {number.name}"


def test_ranks_end_together_and_well_though_the_store_goes_with_node_0(tmp_path, store, monkeypatch):
    monkeypatch.setattr(watchdog, "POLL_S", 1.5)  # node 0 stays for twice as long; a busy machine may need it

    def body(rank: int) -> tuple[float, float]:
        watch = enter(rank, store)
        with watch.guard():
            time.sleep(0.4 * rank)  # the last one still saves the model
            through = time.monotonic()  # on one computer: one clock
            watch.close()
        return through, time.monotonic()

    with forked(body, RANKS, tmp_path) as ranks:
        assert [rank.wait() for rank in ranks[:2]] == [0, 0], ranks[0].text + ranks[1].text
        store.end()
        assert [rank.wait() for rank in ranks[2:]] == [0, 0], ranks[2].text + ranks[3].text
        assert not any(FAILED in rank.text for rank in ranks)
        assert min(rank.result[1] for rank in ranks) >= max(rank.result[0] for rank in ranks)


def test_a_failure_reaches_ranks_that_are_through_and_wait(tmp_path, store):
    def body(rank: int) -> None:
        watch = enter(rank, store)
        with watch.guard():
            if rank == 1:
                time.sleep(1)
                raise OSError("disk full")
            watch.close()

    with forked(body, RANKS, tmp_path) as ranks:
        assert the_line(ranks) == "node 0, rank 1, phase reward: OSError: disk full"


def test_a_rank_that_leaves_by_sys_exit_with_an_error_does_not_leave_the_others_waiting(tmp_path, store):
    def body(rank: int) -> None:
        watch = enter(rank, store)
        try:
            with watch.guard():
                if rank == 1:
                    sys.exit(3)
                in_a_collective(watch)
        finally:
            watch.close()  # as at exit

    with forked(body, RANKS, tmp_path) as ranks:
        assert the_line(ranks).startswith("node 0, rank 1, phase reward: ")


@pytest.mark.parametrize(
    ("status", "expected"),
    [(3, "exit code 3"), (True, "exit code 1"), ("no data", "the message 'no data'")],
)
def test_a_rank_whose_script_ends_with_an_error_outside_the_trainer_ends_all(tmp_path, store, status, expected):
    def body(rank: int) -> None:
        watch = enter(rank, store)
        if rank == 1:
            with suppress(SystemExit):  # as Python at the end of a script, before it calls the functions of `atexit`
                sys.exit(status)
            watch.close_at_exit()
        in_a_collective(watch)

    with forked(body, RANKS, tmp_path) as ranks:
        line = "node 0, rank 1, phase reward: SystemExit: the script of this rank ended with "
        assert the_line(ranks) == line + expected


def test_a_trainer_that_is_closed_while_its_script_leaves_with_an_error_does_not_wait(tmp_path, store):
    def body(rank: int) -> None:
        watch = enter(rank, store)
        try:
            if rank == 1:
                raise SystemExit(3)
            in_a_collective(watch)
        finally:
            watch.close()

    with forked(body, RANKS, tmp_path) as ranks:
        assert the_line(ranks).endswith(
            "rank 1, phase reward: SystemExit: the script of this rank ended with exit code 3"
        )


def test_a_rank_that_leaves_well_before_the_others_waits_for_them(tmp_path, store):
    def body(rank: int) -> float:
        watch = enter(rank, store)
        with suppress(SystemExit):
            sys.exit(0) if rank == 2 else time.sleep(1.0)  # ranks of node 0 linger in any case
        left = time.time()
        watch.close_at_exit()
        return time.time() - left

    with forked(body, RANKS, tmp_path) as ranks:
        assert ranks[2].result > 0.8
