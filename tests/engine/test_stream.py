"""Where a rank's requests go, and what it hears of an engine that is slow, stalled or gone. On fake engines."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from forks import forked
from waiting import HANG_S, until

from multinode_kit import engines as testing_engines
from multinode_kit.engines import FAKE, SyncDriver, running_engines, sockets_of
from multinode_kit.faults import Faults
from multinode_kit.models import tiny_qwen2
from trl_multinode.engine.client import EngineClient
from trl_multinode.engine.load import EngineLoad
from trl_multinode.engine.node_engines import NodeEngines, local_places
from trl_multinode.engine.process import EngineProcess
from trl_multinode.engine.stream import Request, RequestStream
from trl_multinode.errors import EngineDiedError, EngineStalledError
from trl_multinode.wire.messages import Await, Done, Drain, Generate, pack_ids

SAMPLING = {"temperature": 1.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Two engines with weights, as rank 0 of the node sees them."""
    model, logs = tiny_qwen2(), tmp_path_factory.mktemp("log")
    with running_engines(model, logs, FAKE, num_engines=2, window=2) as engines:
        SyncDriver(model, engines).send()
        yield engines


def board(engines: NodeEngines) -> Path:
    return sockets_of(engines)[0].parent / "load"


@contextmanager
def another_rank(engines: NodeEngines, stall_timeout_s: float = 60.0, window: int = 1000):
    logs = engines[0]._connection.log_path.parent
    other = NodeEngines(
        local_places(sockets_of(engines), 0, logs), 0, 1, board(engines), stall_timeout_s, window
    )
    yield other
    other.close()


def requests(count: int, length: int = 3) -> list[Request]:
    return [Request([5] * length, 1, seed=i) for i in range(count)]


def places(groups) -> list[int]:
    return [rows[0].engine for rows in groups]


# ---- the board


def test_ranks_that_decide_at_once_spread_their_requests_evenly_and_give_all_back(tmp_path):
    def rank(index: int) -> None:
        own = EngineLoad(tmp_path / "board", 3)
        taken = [(own.take(tokens, range(3)), tokens) for tokens in [1 + index, 7, 3] * 200]
        (tmp_path / f"taken{index}").touch()
        while not (tmp_path / "go").exists():
            time.sleep(0.005)
        for engine, tokens in taken:
            own.give_back(engine, tokens)
        own.close()

    with forked(rank, 4, tmp_path) as ranks:
        until(lambda: len(list(tmp_path.glob("taken*"))) == 4, "all ranks have taken")
        outstanding = np.fromfile(tmp_path / "board", dtype=np.int64)
        (tmp_path / "go").touch()
        assert [rank.wait() for rank in ranks] == [0] * 4
    assert outstanding.sum() == 200 * (4 * (7 + 3) + 1 + 2 + 3 + 4)
    assert outstanding.max() - outstanding.min() <= 7
    assert np.fromfile(tmp_path / "board", dtype=np.int64).tolist() == [0, 0, 0]
    assert (tmp_path / "board").stat().st_mode & 0o777 == 0o600


def test_the_fewest_tokens_win_among_the_engines_with_room(tmp_path):
    mine, neighbour = EngineLoad(tmp_path / "board", 3), EngineLoad(tmp_path / "board", 3)
    assert [mine.take(100, [0, 1, 2]), neighbour.take(10, [0, 1, 2]), mine.take(50, [0, 1])] == [
        0,
        1,
        1,
    ]
    assert neighbour.take(1, [0, 1]) == 1 and neighbour.take(1, [0, 1, 2]) == 2
    neighbour.give_back(0, 100)
    assert mine.take(1, [0, 1, 2]) == 0
    mine.close()
    neighbour.close()


# ---- two engines


def test_requests_go_to_the_engine_with_the_fewest_outstanding_tokens(engines):
    long, short = Request([5] * 46, 1, 0), requests(6, length=6)
    with another_rank(engines) as rank:
        # costs at 4 tokens a completion: 50 on engine 0, then 10 each on engine 1 until it has as many
        assert places(rank.generate([long, *short], 4, SAMPLING, 1)) == [0, 1, 1, 1, 1, 1, 0]


@pytest.mark.nightly  # as `the_fewest_tokens_win`, through a rank
def test_what_another_rank_has_outstanding_counts(engines):
    neighbour = EngineLoad(board(engines), 2)
    neighbour.take(1000, [0])
    with another_rank(engines) as rank:
        assert places(rank.generate(requests(4), 4, SAMPLING, 1)) == [1] * 4
    neighbour.give_back(0, 1000)
    neighbour.close()
    assert np.fromfile(board(engines), dtype=np.int64).tolist() == [0, 0]


def test_a_stopped_engine_keeps_its_window_and_another_thread_sees_how_many_rows_are_left(engines):
    assert engines.rows_left == 0
    os.kill(engines[1].ready.pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as other:
            generated = other.submit(engines.generate, requests(30), 8, SAMPLING, 1)
            until(lambda: engines.rows_left == 2, "only the window of the stopped engine is left")
            os.kill(engines[1].ready.pid, signal.SIGCONT)
            groups = generated.result()
    finally:
        os.kill(engines[1].ready.pid, signal.SIGCONT)
    assert places(groups).count(1) == 2 and engines.rows_left == 0


def test_answers_come_in_the_order_of_the_requests_from_whichever_engine(engines):
    prompts = [Request([5 + i] * (1 + i % 5), 1 + i % 3, seed=100 * i) for i in range(12)]
    with another_rank(engines) as rank:
        spread = rank.generate(prompts, 4, SAMPLING, 1)
        alone = [rank.generate([prompt], 4, SAMPLING, 1)[0] for prompt in prompts]
    assert set(places(spread)) == {0, 1}
    assert [[row.tokens.tolist() for row in rows] for rows in spread] == [
        [row.tokens.tolist() for row in rows] for rows in alone
    ]


@pytest.mark.fault("4")
def test_a_stopped_engine_is_a_stall_in_time_and_what_it_says_later_is_not_taken_for_an_answer(
    engines,
):
    # only the stopped one can reach it: the other ends its rows at once
    limit_s, pid = (
        4.0,
        engines[1].ready.pid,
    )
    with another_rank(engines, stall_timeout_s=limit_s) as rank:
        os.kill(pid, signal.SIGSTOP)
        try:
            start = time.monotonic()
            with pytest.raises(
                EngineStalledError,
                match=r"Rank 1 \(node 0\): engine 1 of node 0 .* 3 requests open",
            ):
                rank.generate(requests(6), 4, SAMPLING, 1)
            assert time.monotonic() - start >= limit_s
        finally:
            os.kill(pid, signal.SIGCONT)
        assert np.fromfile(board(engines), dtype=np.int64).tolist() == [0, 0]
        again = rank.generate(requests(6, length=9), 7, SAMPLING, 1)
        assert [len(rows[0].tokens) for rows in again] == [7] * 6


@pytest.mark.fault("5")
def test_a_long_generation_that_makes_tokens_is_no_stall(engines, monkeypatch):
    """Each report of tokens begins the limit anew."""
    receive, reports = EngineClient.receive, []

    def noted(client: EngineClient):
        before = client.last_work
        message = receive(client)
        if message is None:
            reports.append(client.last_work > before)
        return message

    monkeypatch.setattr(EngineClient, "receive", noted)
    rows = 8
    with another_rank(engines) as rank:
        while len(reports) < 2 and rows < 10_000:  # an engine reports once a second
            rows *= 2
            (group,) = rank.generate([Request([5] * 100, rows, 0)], 150, SAMPLING, 1)
    assert len(reports) >= 2 and all(reports) and len(group) == rows


# ---- a stream of rows


def collected(stream, count: int) -> list:
    found = []
    while len(found) < count:
        found += stream.poll()
    return found


def rows_of(group: int, count: int, length: int = 3) -> list[Request]:
    return [
        Request(
            [5 + group] * length, seed=10 * group + row, min_update=1, group=(group, 0), row=row
        )
        for row in range(count)
    ]


def test_a_stream_takes_rows_while_others_run_and_returns_those_of_a_request_of_the_group(engines):
    with another_rank(engines, window=3) as rank:
        stream = rank.open_stream(4, SAMPLING)
        stream.add(rows_of(1, 4))
        ended = collected(stream, 1)
        stream.add(rows_of(2, 4))
        ended += collected(stream, 8 - len(ended))
        assert stream.rows_left == rank.rows_left == 0
        stream.close()
    with another_rank(engines) as rank:
        together = rank.generate(
            [Request([5 + group] * 3, 4, 10 * group) for group in (1, 2)], 4, SAMPLING, 1
        )
    expected = {
        (g, i): row.tokens.tolist()
        for g, rows in enumerate(together, 1)
        for i, row in enumerate(rows)
    }
    assert {
        (request.group[0], request.row): row.tokens.tolist() for request, (row,) in ended
    } == expected
    assert np.fromfile(board(engines), dtype=np.int64).tolist() == [0, 0]


def test_a_stream_keeps_a_window_per_engine_and_the_rows_of_a_group_on_one_engine(engines):
    with another_rank(engines, window=4) as rank:
        stream = rank.open_stream(4, SAMPLING)
        stream.add([*rows_of(1, 4), *rows_of(2, 4), *rows_of(3, 4)])
        stream._send_waiting()
        assert [lane.num_rows for lane in stream._lanes] == [4, 4]
        assert (stream.rows_left, stream.rows_under_way) == (12, 8)
        placed = collected(stream, 12)
        for group in (1, 2):
            assert len({row.engine for request, (row,) in placed if request.group[0] == group}) == 1
        stream.close()


@pytest.mark.nightly
def test_a_thread_that_polls_is_woken_by_new_rows(engines, monkeypatch):
    poll = RequestStream.poll
    polls: list[float] = []

    def slow_poll(stream: RequestStream) -> list:
        polls.append(time.monotonic())
        return poll(stream, 2 * HANG_S)

    monkeypatch.setattr(RequestStream, "poll", slow_poll)
    with another_rank(engines) as rank, ThreadPoolExecutor(1) as other:
        stream = rank.open_stream(4, SAMPLING)
        polled = other.submit(collected, stream, 1)
        until(lambda: polls, "the other thread polls")
        stream.add(rows_of(1, 1))
        assert len(polled.result(HANG_S)) == 1  # before the end of the first poll
        stream.close()


# ---- the end


def test_a_stream_that_is_closed_writes_into_no_file_that_has_its_numbers_now(tmp_path):
    message = Generate(prompt=b"", num_completions=1, max_tokens=4, sampling={})
    stream = RequestStream([], SimpleNamespace(), 4, message)
    stream.close()
    files = [(tmp_path / str(number)).open("w+b", buffering=0) for number in range(4)]
    stream.add(rows_of(0, 1))
    stream.peek()
    assert [file.seek(0, os.SEEK_END) for file in files] == [0] * 4
    for file in files:
        file.close()


def test_a_killed_engine_is_named_and_a_normal_end_of_the_other_leaves_nothing(
    tmp_path, monkeypatch
):
    # exit code by engine; None: it was still running when `stop` gave up
    ends: dict[int, int | None] = {}
    kill = EngineProcess.kill

    def noted_kill(process: EngineProcess) -> None:
        ends.setdefault(process.index, process._process.poll())
        kill(process)

    monkeypatch.setattr(EngineProcess, "kill", noted_kill)
    monkeypatch.setattr(testing_engines, "STOP_TIMEOUT_S", 60.0)
    model = tiny_qwen2()
    with running_engines(model, tmp_path, num_engines=2) as engines:
        SyncDriver(model, engines).send()
        pids, folder = [engine.ready.pid for engine in engines], board(engines).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        assert [path.stat().st_mode & 0o777 for path in sockets_of(engines)] == [0o600] * 2
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(EngineDiedError, match="engine 0 of node 0 .*engine0.log"):
            engines.generate(requests(4), 200, SAMPLING, 1)
    assert ends == {0: -signal.SIGKILL, 1: 0}, (
        "the engine that lives was not told to end, and ran into a deadline"
    )
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not folder.exists()


# ---- an engine that leaves


def test_an_engine_that_drains_ends_its_rows_and_gets_no_new_ones(tmp_path):
    """Its clients are those of another rank than the one that asks it to."""
    model, module = tiny_qwen2(), Faults().slow_tokens(0.05).engine(FAKE)
    with running_engines(model, tmp_path, module, num_engines=2, window=2) as owner:
        SyncDriver(model, owner).send()
        with another_rank(owner, window=2) as rank:
            stream = rank.open_stream(16, SAMPLING)
            first, later = requests(4), requests(8)[4:]
            stream.add(first)
            stream.poll(0.1)
            assert stream.rows_under_way == 4
            until(lambda: owner[0].ask(Await(min_update=0)).num_open == 2, "its rows")
            reply = owner[0].ask(Drain())
            assert isinstance(reply, Done) and reply.num_open == 2
            stream.add(later)
            ended = {}
            while stream.rows_left:
                ended |= {request.seed: rows[0] for request, rows in stream.poll()}
            engines = [ended[seed].engine for seed in range(8)]
            assert sorted(engines[:4]) == [0, 0, 1, 1] and engines[4:] == [1] * 4
            reply = owner[0].ask(Drain())
            assert isinstance(reply, Done) and reply.num_open == 0
            stream.close()
            assert np.fromfile(board(owner), dtype=np.int64).tolist() == [0, 0]
        # a row does not depend on the engine that makes it
        (expected,) = owner.serving([1])[0].rows(
            owner[1].ask(
                Generate(
                    prompt=pack_ids(later[0].prompt), num_completions=1, max_tokens=16, sampling=SAMPLING, seed=4
                )
            )
        )  # fmt: skip
        assert expected.tokens.tolist() == ended[4].tokens.tolist()
