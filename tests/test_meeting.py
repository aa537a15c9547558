"""Ranks wait for the slowest one on the store: without a limit, with few lines, and only as long as the run lives."""

import os
import re
import threading
import time

import beating
import pytest
from forks import forked
from store_host import RANKS, StoreHost, topology_of
from torch.distributed import HashStore
from waiting import HANG_S, until

from trl_multinode.run import meeting as meeting_module
from trl_multinode.run import store as run_store
from trl_multinode.run.endings import exit_codes
from trl_multinode.run.heartbeats import judges
from trl_multinode.run.meeting import Meeting
from trl_multinode.run.store import connect_store
from trl_multinode.run.topology import Topology
from trl_multinode.run.watch.watchdog import Watchdog


@pytest.fixture
def store(monkeypatch):
    for module in (run_store, meeting_module):
        monkeypatch.setattr(module, "GRACE_S", 1.5)
    host = StoreHost()
    yield host
    host.end()


def enter(rank: int, store: StoreHost) -> tuple[Watchdog, Meeting]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    watch = Watchdog(topology_of(rank), lambda: "wait")
    return watch, Meeting(watch.topology, connect_store(watch.topology, watch.run))


def test_nobody_leaves_a_meeting_before_the_last_one_has_come(tmp_path, store):
    def body(rank: int) -> list[list[float]]:
        watch, meeting = enter(rank, store)
        times = []
        for number in range(6):
            # another one is the last every time, on most machines
            time.sleep(0.2 if number % RANKS == rank else 0.0)
            came = time.monotonic()
            meeting.wait()
            times.append([came, time.monotonic()])
        watch.close()
        return times

    with forked(body, RANKS, tmp_path) as ranks:
        for meeting in zip(*(rank.result for rank in ranks), strict=True):
            last = max(came for came, _ in meeting)
            assert all(left >= last for _, left in meeting)  # on one computer: one clock


def test_late_ranks_are_named_with_their_node_and_state_by_one_rank_per_side(
    tmp_path, store, monkeypatch
):
    monkeypatch.setattr(judges, "LATE_EVERY_S", 1.5)
    monkeypatch.setattr(judges, "READ_STATES_EVERY_S", 0.5)

    def body(rank: int) -> None:
        entered = beating.enter(rank, store.port)
        if rank == 3:
            with entered.phases("reward"):
                until((tmp_path / "come").exists)
        entered.meeting.wait()
        entered.meeting.wait()  # a quick one, about which there is nothing to report
        entered.watch.close()

    def waiting(ranks) -> list[list[str]]:
        return [[line for line in rank.text.splitlines() if " waiting " in line] for rank in ranks]

    late = re.compile(
        r" 3 ranks waiting \d+ s for rank 3 \(node 1\), in phase reward of step 4 for "
    )
    with forked(body, RANKS, tmp_path) as ranks:
        for side in (ranks[:2], ranks[2:]):
            until(lambda side=side: any(late.search(line) for line in sum(waiting(side), [])))
        (tmp_path / "come").touch()
        assert [rank.wait() for rank in ranks] == [0] * RANKS, [rank.text for rank in ranks]
        lines = waiting(ranks)
        assert not (lines[0] and lines[1]) and not (lines[2] and lines[3])
        # a slow machine may show the rank without a trainer first
        assert all(" s for rank 3 (node 1), " in line for line in sum(lines, []))


def test_a_store_that_ends_during_a_meeting_ends_the_run_with_its_line(tmp_path, store):
    def body(rank: int) -> None:
        watch, meeting = enter(rank, store)
        with watch.guard():
            if rank == 2:
                time.sleep(HANG_S)
            print("in the meeting", flush=True)
            meeting.wait()

    with forked(body, RANKS, tmp_path) as ranks:
        for rank in (*ranks[:2], ranks[3]):
            rank.wait_for("in the meeting")
        store.end()
        assert [rank.wait() for rank in ranks] == [exit_codes.PEER_LOST] * RANKS
        assert all(
            "PeerFailureError" in rank.text.splitlines()[-1]
            and "node 0" in rank.text.splitlines()[-1]
            for rank in ranks
        )


def words_of(rank: int, number: int) -> str:
    return f"{number}from{rank} all" if number % 5 == rank else ""


def expected_words(number: int) -> list[str]:
    return sorted({word for rank in range(RANKS) for word in words_of(rank, number).split()})


def test_words_reach_all(tmp_path, store):
    def body(rank: int) -> list:
        watch, meeting = enter(rank, store)
        words = [meeting.wait(words_of(rank, number)) for number in range(300)]
        watch.close()
        return words

    with forked(body, RANKS, tmp_path) as ranks:
        found = [rank.result for rank in ranks]
    assert found == [[expected_words(n) for n in range(300)]] * RANKS


def test_a_rank_that_has_left_finds_that_others_wait_for_it(tmp_path, store):
    def body(rank: int) -> bool:
        watch, meeting = enter(rank, store)
        for _ in range(3):
            meeting.wait()
        client = connect_store(watch.topology, watch.run)
        if rank == 3:
            until(lambda: meeting.is_missed(client))
        meeting.wait()
        found = meeting.is_missed(client)
        watch.close()
        return found

    with forked(body, RANKS, tmp_path) as ranks:
        assert [rank.result for rank in ranks] == [False] * RANKS


def test_a_single_process_meets_itself():
    meeting = Meeting(Topology(0, 1, 0, 1, 0, 1, launched=False), HashStore())
    for number in range(1, 5):
        assert meeting.wait("b a b") == ["a", "b"] and meeting.wait() == []
        assert meeting.arrivals == 2 * number and not meeting.is_missed(meeting._store)


class Repeating:
    """A store whose connection is always reset after it has executed a call, and before it has answered."""

    def __init__(self, store: HashStore):
        self.store = store

    def __getattr__(self, name: str):
        def call(*args):
            getattr(self.store, name)(*args)
            return getattr(self.store, name)(*args)

        return getattr(self.store, name) if name == "wait" else call


def test_a_rank_that_counts_twice_after_a_reset_ends_no_meeting_early():
    store, found = HashStore(), {}

    def enter(rank: int, client) -> threading.Thread:
        meeting = Meeting(Topology(rank, 3, 0, 1, rank, 3, launched=False), client)

        def meet() -> None:
            found[rank] = [meeting.wait(f"{number}-{rank}") for number in range(3)]

        thread = threading.Thread(target=meet)
        thread.start()
        return thread

    ranks = [enter(0, Repeating(store)), enter(1, store)]
    until(lambda: store.check(["arrived/1"]) and store.add("arrived/1", 0) == 3)
    assert not store.check(["met/1"]) and found == {}
    for thread in [*ranks, enter(2, store)]:
        thread.join(HANG_S)
    assert found == dict.fromkeys(range(3), [[f"{n}-{r}" for r in range(3)] for n in range(3)])
