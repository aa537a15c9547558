"""Ranks wait for the slowest one on the store: without a limit, with few lines, and only as long as the run lives."""

import os
import re
import time

import pytest
from forks import forked
from store_host import RANKS, StoreHost, topology_of
from waiting import HANG_S, until

from trl_multinode.run import meeting as meeting_module
from trl_multinode.run import store as run_store
from trl_multinode.run.endings import exit_codes
from trl_multinode.run.meeting import Meeting
from trl_multinode.run.store import connect_store
from trl_multinode.run.topology import Topology
from trl_multinode.run.watch.watchdog import Watchdog


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(meeting_module, "PROGRESS_EVERY_S", 1.5)
    monkeypatch.setattr(meeting_module, "STATE_EVERY_S", 0.0)
    for module in (run_store, meeting_module):
        monkeypatch.setattr(module, "GRACE_S", 1.5)
    host = StoreHost()
    yield host
    host.end()


def enter(rank: int, store: StoreHost, state: str = "in phase train") -> tuple[Watchdog, Meeting]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    watch = Watchdog(topology_of(rank), lambda: "wait")
    meeting = Meeting(watch.topology, connect_store(watch.topology, watch.run), lambda: state)
    watch.add_chore(meeting.report_progress)
    return watch, meeting


def test_nobody_leaves_a_meeting_before_the_last_one_has_come(tmp_path, store):
    def body(rank: int) -> list[list[float]]:
        watch, meeting = enter(rank, store)
        times = []
        for number in range(6):
            time.sleep(0.2 if number % RANKS == rank else 0.0)  # another one is the last every time, on most machines
            came = time.monotonic()
            meeting.wait()
            times.append([came, time.monotonic()])
        watch.close()
        return times

    with forked(body, RANKS, tmp_path) as ranks:
        for meeting in zip(*(rank.result for rank in ranks), strict=True):
            last = max(came for came, _ in meeting)
            assert all(left >= last for _, left in meeting)  # on one computer: one clock


def test_late_ranks_are_named_with_their_node_and_state_by_one_rank_per_side(tmp_path, store):
    def body(rank: int) -> None:
        watch, meeting = enter(rank, store, f"generating, {rank} rows left")
        if rank == 3:
            until((tmp_path / "come").exists)
        meeting.wait()
        meeting.wait()  # a quick one, about which there is nothing to report
        watch.close()

    def waiting(ranks) -> list[list[str]]:
        return [[line for line in rank.text.splitlines() if " waiting " in line] for rank in ranks]

    with forked(body, RANKS, tmp_path) as ranks:
        for side in (ranks[:2], ranks[2:3]):
            until(lambda side=side: sum(map(len, waiting(side))) >= 2)
        (tmp_path / "come").touch()
        assert [rank.wait() for rank in ranks] == [0] * RANKS, [rank.text for rank in ranks]
        lines = waiting(ranks)
        assert lines[3] == []
        assert not (lines[0] and lines[1])
        for text in (*lines[0], *lines[1], *lines[2]):
            assert text.endswith(" s for rank 3 (node 1), generating, 3 rows left"), text
        assert re.search(r"node 1, rank 2: waiting \d+ s for", lines[2][0])


@pytest.mark.nightly
def test_many_late_ranks_are_counted_and_three_are_named():
    class Store:
        def check(self, keys) -> bool:
            return keys[0] in self.values

        def get(self, key) -> bytes:
            return self.values[key]

        values = {"state/4": b"in phase reward", "at/0": b"7"}

    meeting = Meeting(Topology(0, 14, 0, 7, 0, 2, True), Store(), lambda: "")
    assert meeting._names(Store(), [4, 8, 9, 10]) == (
        "4 ranks: rank 4 (node 0), in phase reward; rank 8 (node 1), in an unknown phase; "
        "rank 9 (node 1), in an unknown phase; ..."
    )


def test_a_store_that_ends_during_a_meeting_ends_the_run_with_its_line(tmp_path, store):
    def body(rank: int) -> None:
        watch, meeting = enter(rank, store)
        with watch.guard():
            if rank == 2:
                time.sleep(HANG_S)
            meeting.wait()

    with forked(body, RANKS, tmp_path) as ranks:
        for side in (ranks[:2], ranks[3:]):
            until(lambda side=side: any(" waiting " in rank.text for rank in side))
        store.end()
        assert [rank.wait() for rank in ranks] == [exit_codes.PEER_LOST] * RANKS
        assert all(
            "PeerFailureError" in rank.text.splitlines()[-1] and "node 0" in rank.text.splitlines()[-1]
            for rank in ranks
        )


def test_a_single_process_meets_nobody():
    meeting = Meeting(Topology(0, 1, 0, 1, 0, 1, launched=False), None, lambda: "")
    meeting.wait()
    assert meeting._number == 0
