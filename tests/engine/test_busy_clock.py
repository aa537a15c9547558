"""An engine's own account of how long it worked: overlapping requests count once, and updates not at all."""

import asyncio
from types import SimpleNamespace

import pytest
from waiting import HANG_S

from trl_multinode.engine_process import gate
from trl_multinode.engine_process.backend import CompletionBuffer, Growing
from trl_multinode.engine_process.gate import BusyClock
from trl_multinode.engine_process.server import EngineServer
from trl_multinode.wire.messages import Await, EngineSpec, Generate, WeightVersion, pack_ids


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves by hand."""
    clock = SimpleNamespace(now=50.0)
    monkeypatch.setattr(gate.time, "perf_counter", lambda: clock.now)
    return clock


def test_requests_side_by_side_count_once_up_to_now_and_to_their_end_even_if_one_fails(clock):
    busy = BusyClock()
    clock.now += 1
    with busy.request():
        clock.now += 2
        with pytest.raises(ValueError, match="refused"), busy.request():  # noqa: PT012
            clock.now += 4
            raise ValueError("refused")
        assert busy.read().busy_s == 6.0
        clock.now += 8
    clock.now += 16
    times = busy.read()
    assert (times.busy_s, times.clock_s) == (14.0, 31.0)


def test_slot_seconds_are_row_seconds_over_slots_and_a_pause_is_not_busy(clock):
    busy = BusyClock()
    busy.slots = 4
    with busy.request(rows=3):
        clock.now += 2
        with busy.request(rows=3):  # two of these rows wait for a slot
            clock.now += 1
            busy.freeze(True)
            clock.now += 8
            busy.freeze(False)
        clock.now += 2
    busy.freeze(True)  # no request is running, so none is frozen
    clock.now += 16
    busy.freeze(False)
    times = busy.read()
    assert times.slot_s == 3 / 4 * 2 + 1 + 3 / 4 * 2
    assert (times.busy_s, times.frozen_s, times.clock_s) == (5.0, 8.0, 29.0)


def test_a_tail_is_the_time_with_fewer_than_a_tenth_of_the_rows_that_ran_at_once(clock):
    busy = BusyClock()
    busy.slots = 40
    with busy.request(rows=30) as end_row:
        clock.now += 4
        for _ in range(27):
            end_row()
        clock.now += 2  # three of 30 rows are a tenth
        end_row()
        clock.now += 8
        busy.freeze(True)
        clock.now += 1
        busy.freeze(False)
    clock.now += 16
    with busy.request(rows=2):  # the engine was idle, so these are all rows, and no tail
        clock.now += 32
    times = busy.read()
    assert times.tail_s == 8.0 and times.busy_s == 46.0
    assert times.slot_s == (30 * 4 + 3 * 2 + 2 * 8 + 2 * 32) / 40


def test_a_server_says_with_every_done_how_busy_it_was_and_waiting_for_weights_is_not_work(clock):
    class Backend:
        def tokens_done(self):
            return 0

        async def generate(self, request, growing):
            clock.now += 3
            growing.rows = [CompletionBuffer([1], [-0.5])]

    async def story():
        server = EngineServer(EngineSpec(0, "", 0, {}), Backend())
        request = Generate(
            prompt=pack_ids([5]), num_completions=1, max_tokens=1, sampling={}, min_update=1
        )
        waiting = asyncio.create_task(server._serve_one(request, None, Growing()))
        await asyncio.sleep(0)
        clock.now += 10  # the weights are not there yet
        await server._weights.begin(0)
        await server._weights.end(1, WeightVersion(1, 0))
        await waiting
        return await server._serve_one(Await(min_update=1), None, Growing())

    done = asyncio.run(asyncio.wait_for(story(), HANG_S))
    assert (done.times.busy_s, done.times.clock_s) == (3.0, 13.0) and done.version == WeightVersion(
        1, 0
    )
