"""What an engine records of itself: real servers with a backend of a test."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import HANG_S

from trl_multinode.engine.process import EngineProcess
from trl_multinode.engine_process.backend import CompletionBuffer, Refused
from trl_multinode.engine_process.server import EngineServer
from trl_multinode.engine_process.states import EngineStates
from trl_multinode.wire.messages import (
    EngineSpec,
    Generate,
    UpdateWeights,
    WeightVersion,
    pack_ids,
)


def recorded(path: Path) -> list[tuple]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["start"] for line in lines] == sorted(line["start"] for line in lines)
    assert all((line["node"], line["engine"], line["attempt"]) == (3, 1, 2) for line in lines)
    return [(line["phase"], line["rows"], line["update"]) for line in lines]


def spec_in(path: Path) -> EngineSpec:
    return EngineSpec(1, "", 0, {}, state_path=str(path / "states.jsonl"), node=3, attempt=2)


class Swapping:
    """Backend whose rows end when a test says so."""

    def __init__(self, commits: bool = True):
        self.commits = commits
        self.end = asyncio.Event()
        self.running = asyncio.Event()

    async def generate(self, *_):
        self.running.set()
        await self.end.wait()
        return [CompletionBuffer([1], [-0.5])] * 4

    load_s = 0.0

    def tokens_done(self):
        return 0

    async def begin_update(self, update):
        self.version = update.version

    async def load_buckets(self, update): ...

    async def commit_update(self):
        if not self.commits:
            raise Refused("WeightSyncError", "a worker lost a bucket")
        return [self.version]

    async def take_kv_use(self):
        return 0.0

    async def resume(self, version):
        pass


async def story(server: EngineServer, backend: Swapping, in_flight: bool) -> None:
    writer = SimpleNamespace(write=lambda data: None, drain=lambda: asyncio.sleep(0))

    async def send(request) -> None:
        await server._answer(request, writer)

    async def swap(number: int) -> None:
        await send(UpdateWeights(version=WeightVersion(number, number), in_flight=in_flight))

    await swap(1)
    rows = Generate(
        prompt=pack_ids([5]), num_completions=4, max_tokens=1, sampling={}, min_update=1
    )
    generating = asyncio.create_task(send(rows))
    await backend.running.wait()
    swapping = asyncio.create_task(swap(2))
    if in_flight:
        await swapping
    else:
        for _ in range(20):  # turns of the loop in which a swap could begin
            await asyncio.sleep(0)
        assert not swapping.done()
    backend.end.set()
    await asyncio.gather(generating, swapping)


@pytest.mark.parametrize(
    ("in_flight", "expected"),
    [
        (
            False,
            [
                ("sync", 0, 1),
                ("idle", 0, 1),
                ("generate", 4, 1),
                ("idle", 0, 1),
                ("sync", 0, 2),
                ("idle", 0, 2),
            ],
        ),
        (
            True,
            [
                ("sync", 0, 1),
                ("idle", 0, 1),
                ("generate", 4, 1),
                ("sync", 4, 2),
                ("generate", 4, 2),
                ("idle", 0, 2),
            ],
        ),
    ],
    ids=["drain", "in flight"],
)
def test_an_update_in_flight_has_its_frozen_rows_and_one_that_drains_has_none(
    tmp_path, in_flight, expected
):
    async def run():
        backend = Swapping()
        await asyncio.wait_for(
            story(EngineServer(spec_in(tmp_path), backend), backend, in_flight),
            HANG_S,
        )

    asyncio.run(run())
    assert recorded(tmp_path / "states.jsonl") == expected


def test_an_update_that_fails_ends_its_state(tmp_path):
    async def run():
        backend = Swapping(commits=False)
        server = EngineServer(spec_in(tmp_path), backend)
        writer = SimpleNamespace(write=lambda data: None, drain=lambda: asyncio.sleep(0))
        request = UpdateWeights(version=WeightVersion(1, 1))
        await asyncio.wait_for(server._answer(request, writer), HANG_S)

    asyncio.run(run())
    assert recorded(tmp_path / "states.jsonl") == [("sync", 0, 1), ("idle", 0, 1)]


@pytest.mark.nightly
def test_the_lines_of_a_round_are_few_and_show_its_tail(tmp_path):
    states = EngineStates.of(spec_in(tmp_path))
    for rows in [*range(1, 1025), *range(1023, -1, -1)]:
        states.count(1 if rows else 0, rows)
    found = recorded(tmp_path / "states.jsonl")
    assert 40 < len(found) < 70 and found[-1] == ("idle", 0, 0)
    assert {3, 2, 1} <= {rows for _, rows, _ in found[len(found) // 2 :]}


def test_a_full_disk_costs_one_line_of_the_log_and_no_engine(capsys):
    spec = EngineSpec(1, "", 0, {}, state_path="/dev/full")
    states = EngineStates.of(spec)
    for rows in (1, 2, 3):
        states.count(1, rows)
    assert capsys.readouterr().out.count("engine 1: ") == 1


def test_the_owner_records_the_loss_of_a_process_that_cannot(tmp_path):
    process = object.__new__(EngineProcess)
    process._spec = EngineSpec(
        1, "", 0, {}, state_path=str(tmp_path / "states.jsonl"), node=3, attempt=2
    )
    process.record_loss("killed by SIGKILL")
    (line,) = [json.loads(line) for line in (tmp_path / "states.jsonl").read_text().splitlines()]
    assert (line["phase"], line["cause"], line["process"]) == (
        "lost",
        "killed by SIGKILL",
        0,
    ) and line["start"] > 1e9
