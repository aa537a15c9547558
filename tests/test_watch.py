"""Ranks that end well wait for each other; the ways to fail are in `faults/test_ways_to_end.py`."""

import json
import os
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from forks import forked
from store_host import FAILED, PER_NODE, RANKS, begin_early, enter, enter_early, num_finished
from torch.distributed import HashStore
from waiting import HANG_S, until

from trl_multinode.node_settings import NodeSettings
from trl_multinode.run import store as run_store
from trl_multinode.run.phase_file import PhaseFile
from trl_multinode.run.phases import Phases
from trl_multinode.run.topology import Topology
from trl_multinode.run.watch import arrivals, early, leaving, watch_thread
from trl_multinode.run.watch.watch_thread import WatchThread


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    """No starved rank loses the store, the others or its traceback."""
    monkeypatch.setattr(run_store, "STORE_TIMEOUT_S", 60.0)
    monkeypatch.setattr(run_store, "GRACE_S", HANG_S)
    monkeypatch.setattr(leaving, "PRINTING_S", HANG_S)


def test_the_line_is_the_last_one_although_the_main_thread_is_printing_a_traceback(
    tmp_path, store, monkeypatch
):
    def body(rank: int) -> None:
        is_leaving = tmp_path / f"leaving{rank}"
        leave = watch_thread.leave

        def leave_noted(*arguments) -> None:
            is_leaving.touch()
            leave(*arguments)

        watch_thread.leave = leave_noted

        class Slow(Exception):
            def __str__(self):
                if sys._getframe(1).f_globals["__name__"] == "traceback":
                    until(is_leaving.exists, "the end of this process begins")
                    time.sleep(1.0)  # in which a process without the lock would end
                return "printed slowly"

        with enter(rank, store).guard():
            raise ValueError("of rank 0") if rank == 0 else Slow

    with forked(body, RANKS, tmp_path) as ranks:
        assert len({rank.wait() for rank in ranks}) == 1
        (line,) = {rank.text.splitlines()[-1] for rank in ranks}
        assert line.startswith(FAILED)
        for rank in ranks[1:]:
            assert rank.text.count("printed slowly") == 1 + ("printed slowly" in line), (
                "the traceback was cut"
            )


def test_a_rank_that_leaves_writes_the_phases_of_the_step_under_way(tmp_path, store):
    def body(rank: int) -> None:
        watch, file = enter(rank, store), PhaseFile(tmp_path, rank, node=rank // PER_NODE)
        phases = Phases(file)
        watch.closings.append(file.flush)
        with watch.guard(), phases("train"):
            with phases("reward"):
                pass
            (tmp_path / f"inside{rank}").touch()
            if rank == 1:
                until(lambda: len(list(tmp_path.glob("inside*"))) == RANKS, "all ranks")
                raise ValueError("of rank 1")
            time.sleep(HANG_S)

    with forked(body, RANKS, tmp_path) as ranks:
        assert len({rank.wait() for rank in ranks}) == 1
    found = [(tmp_path / f"rank{rank}.jsonl").read_text().split(",")[0] for rank in range(RANKS)]
    assert found == ['{"phase": "reward"'] * RANKS


def test_a_neighbour_that_registers_between_two_requests_is_watched_all_the_same():
    """All ranks may have registered at the second request of a look, whose first one found no neighbour."""
    client, seen = HashStore(), []
    topology = Topology(0, 2, 0, 2, 0, 1, launched=True)

    class Late:
        """The store of a run in which rank 1 registers just after the first look for it."""

        def __getattr__(self, name: str):
            return getattr(client, name)

        def check(self, keys: list[str]) -> bool:
            found = client.check(keys)
            if keys == ["pid/1"] and not found:
                client.set("pid/1", "17")
                client.add("here", 1)
            return found

    early_ranks = arrivals.Arrivals(topology, lambda rank, pid: seen.append((rank, pid)))
    for _ in range(2):
        early_ranks.look(Late(), has_trainer=False)
    assert seen == [(1, 17)]


def test_ranks_end_together_and_well_though_the_store_goes_with_node_0(
    tmp_path, store, monkeypatch
):
    """Node 0 lingers until the others have read that all are through; here for as long as they need."""
    monkeypatch.setattr(run_store, "LINGER_S", 77.0)

    def sleep_on_node_0(seconds: float) -> None:
        if seconds == 77.0:
            (tmp_path / f"lingers{os.getpid()}").touch()
            until(
                lambda: all((tmp_path / f"closed{rank}").exists() for rank in (2, 3)),
                "ranks of node 1 to close",
            )
        else:
            time.sleep(seconds)

    def sleep_on_node_1(seconds: float) -> None:
        """Look only when node 0 lingers, or has gone without that."""
        ended = tmp_path / "store ended"
        until(
            lambda: len(list(tmp_path.glob("lingers*"))) == PER_NODE or ended.exists(),
            "node 0 to be through",
        )

    def body(rank: int) -> tuple[float, float]:
        watch = enter(rank, store)
        sleep = sleep_on_node_0 if rank < PER_NODE else sleep_on_node_1
        run_store.time = SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
        with watch.guard():
            until(lambda: num_finished(watch) == rank, "the ranks before this one to be through")
            through = time.monotonic()  # on one computer: one clock
            watch.close()
            closed = time.monotonic()
        (tmp_path / f"closed{rank}").touch()
        if rank >= PER_NODE:
            until((tmp_path / "store ended").exists, "the end of the store")
        return through, closed

    with forked(body, RANKS, tmp_path) as ranks:
        assert [rank.wait() for rank in ranks[:2]] == [0, 0], ranks[0].text + ranks[1].text
        store.end()
        (tmp_path / "store ended").touch()
        assert [rank.wait() for rank in ranks[2:]] == [0, 0], ranks[2].text + ranks[3].text
        assert not any(FAILED in rank.text for rank in ranks)
        assert min(rank.result[1] for rank in ranks) >= max(rank.result[0] for rank in ranks)


def test_a_rank_that_leaves_well_before_the_others_waits_for_them(tmp_path, store):
    def body(rank: int) -> int:
        watch = enter(rank, store)
        if rank == 2:
            with suppress(SystemExit):
                sys.exit(0)
        else:
            until(lambda: num_finished(watch) > 0, "rank 2 to close")
            (tmp_path / f"ended{rank}").touch()
        watch.close_at_exit()
        return len(list(tmp_path.glob("ended*")))

    with forked(body, RANKS, tmp_path) as ranks:
        assert [rank.result for rank in ranks] == [RANKS - 1] * RANKS


# ---- ranks that have ended well


def note_good_ends(watch: WatchThread) -> list[int]:
    """Return a list to which the watch adds each neighbour that has ended, and that is no failure."""
    noted: list[int] = []
    judge = watch._neighbour_ended

    def neighbour_ended(cause: str, rank: int | None = None) -> bool:
        is_failure = judge(cause, rank)
        if not is_failure and rank is not None:
            noted.append(rank)
        return is_failure

    watch._neighbour_ended = neighbour_ended
    return noted


@pytest.mark.fault("script_error")
def test_a_script_that_ends_well_without_a_trainer_waits_for_no_rank(tmp_path, store):
    def body(rank: int) -> None:
        enter_early(rank, store)
        watch = early.early_watch()
        ended = note_good_ends(watch)
        until(lambda: not watch.arrivals._neighbours, "the pids of the node")
        if rank != 3:
            until((tmp_path / "rank 3 has ended").exists, "the end of rank 3")
        if rank == 2:
            until(lambda: ended == [3], "the end of rank 3 to be seen")
        early._early._at_exit()

    with forked(body, RANKS, tmp_path) as ranks:
        assert ranks[3].wait() == 0, ranks[3].text
        assert all(rank.process.is_alive() for rank in ranks[:3])
        (tmp_path / "rank 3 has ended").touch()
        assert [rank.wait() for rank in ranks[:3]] == [0, 0, 0], ranks[2].text


@pytest.mark.fault("exit_codes")
def test_a_closed_process_may_end_and_every_good_ending_is_written(tmp_path, store):
    """Rank 1 has closed its trainer and ends with `os._exit(0)` while the others finish."""

    def body(rank: int) -> None:
        watch = begin_early(rank, store, tmp_path / "good")
        ended = note_good_ends(watch.of_process)
        until(lambda: not watch.of_process.arrivals._neighbours, "the pids of the node")
        watch.close()
        if rank == 1:
            os._exit(0)
        if rank == 0:
            until(lambda: ended == [1], "the end of rank 1 to be seen")
        early._early._at_exit()

    with forked(body, RANKS, tmp_path) as ranks:
        assert [rank.wait() for rank in ranks] == [0] * RANKS, ranks[0].text
    assert not (tmp_path / "good/_multinode/owner.json").exists()
    endings = [
        json.loads((tmp_path / f"good/_multinode/ending-node{k}.json").read_text())
        for k in range(2)
    ]
    assert [ending["code"] for ending in endings] == [0, 0]


# ---- signs of life of ranks without a trainer


def test_the_limit_before_a_trainer_is_the_default_of_the_setting():
    assert NodeSettings().engine_start_timeout == arrivals.START_TIMEOUT_S


@pytest.fixture
def signs(monkeypatch):
    """Two ranks: rank 0 has a trainer and judges rank 1, on a clock that a test moves by hand."""
    made = SimpleNamespace(now=1000.0, store=HashStore())
    monkeypatch.setattr(arrivals, "time", SimpleNamespace(monotonic=lambda: made.now))
    judge, other = (
        arrivals.Signs(Topology(rank, 2, 0, 1, rank, 2, launched=True)) for rank in range(2)
    )

    def pass_(seconds: int, writes: bool) -> str:
        for _ in range(seconds):
            made.now += 1.0
            judge.write(made.store, True)
            if writes:
                other.write(made.store, False)
            if line := judge.judge(made.store, 50.0):
                return line
        return ""

    made.pass_ = pass_
    return made


def test_a_rank_that_works_without_a_trainer_is_no_fault_until_it_is_silent(signs):
    assert signs.pass_(1000, writes=True) == ""
    line = signs.pass_(100, writes=False)
    assert "rank 1 (node 1)" in line and "`engine_start_timeout` 50 s" in line
    assert 2050.0 <= signs.now <= 2075.0


def test_a_rank_that_has_left_is_not_silent_and_a_judge_that_was_suspended_begins_again(signs):
    assert signs.pass_(40, writes=True) == ""
    signs.now += 500.0
    assert signs.pass_(40, writes=False) == ""
    signs.store.set("left/1", "ended")
    assert signs.pass_(500, writes=False) == ""
