"""Signals of an update: what workers may take and when, what ends their waits, and the order of the stages."""

import os
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from served import Keeper, serving
from waiting import HANG_S, until

from trl_multinode.engine.client import EngineClient
from trl_multinode.errors import EngineError, WeightSyncError
from trl_multinode.transports.base import OpenedSlots
from trl_multinode.transports.signals import BucketSignals, FollowedSignals, UpdateEndedError
from trl_multinode.weights import timings
from trl_multinode.weights.buckets import WeightMeta, slot_layout
from trl_multinode.weights.source import ModuleSource
from trl_multinode.weights.sync import WeightSync
from trl_multinode.weights.timings import SyncTimings
from trl_multinode.wire.messages import UpdateWeights, WeightVersion


@pytest.fixture
def ends(tmp_path):
    """The sender's end, and that of the only worker of engine 3."""
    sender = BucketSignals()
    path = sender.listen(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    worker = FollowedSignals(str(path), 3, 1)
    sender.opened()
    assert not path.exists()
    yield sender, worker
    sender.close()
    worker.close()


def in_thread(call) -> tuple[threading.Thread, list]:
    found: list = []

    def run() -> None:
        try:
            found.append(call())
        except UpdateEndedError as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def heard(sender: BucketSignals, bucket: int, engine: int = 3) -> None:
    """Wait until the workers of an engine have taken a bucket."""

    def is_taken() -> bool:
        for stream in sender.streams(engine):
            stream.read()
        return sender.taken(engine) == bucket

    until(is_taken, f"bucket {bucket} is taken")


def test_a_worker_waits_for_its_bucket_and_one_signal_may_say_several(ends):
    sender, worker = ends
    worker.begin(sender.begin())
    thread, _ = in_thread(lambda: worker.wait(2))
    sender.send(1)
    assert sender.taken(3) == -1
    worker.took(1)
    heard(sender, 1)
    assert thread.is_alive()
    sender.send(2)
    thread.join(HANG_S)
    assert not thread.is_alive()


def test_what_is_left_of_an_earlier_update_is_ignored_on_both_ends(ends):
    sender, worker = ends
    worker.begin(sender.begin())
    sender.send(7)
    sender.end()
    worker.took(7)
    heard(sender, 7)
    worker.begin(sender.begin())
    assert sender.taken(3) == -1
    sender.send(0)
    worker.wait(0)
    sender.end()
    with pytest.raises(UpdateEndedError, match="before bucket 1"):
        worker.wait(1)


@pytest.mark.parametrize("how", ["close", "end", "abandon"])
def test_a_wait_ends_with_the_sender_with_the_update_and_with_its_own_process(ends, how):
    sender, worker = ends
    worker.begin(sender.begin())
    thread, found = in_thread(lambda: worker.wait(0))
    {"close": sender.close, "end": sender.end, "abandon": worker.abandoned.set}[how]()
    thread.join(HANG_S)
    assert isinstance(found[0], UpdateEndedError)


def test_a_worker_whose_sender_does_not_read_goes_on(ends):
    sender, worker = ends
    worker.begin(sender.begin())
    for bucket in range(5000):
        worker.took(bucket)
    heard_at_least = sender.streams(3)[0]
    heard_at_least.read()
    assert 0 < heard_at_least.taken < 5000


def test_an_engine_with_a_worker_that_does_not_follow_gets_no_update(ends, tmp_path):
    sender = BucketSignals()
    one = FollowedSignals(str(sender.listen(tmp_path)), 0, 2)
    sender.opened()
    for engine in (0, 1):
        with pytest.raises(WeightSyncError, match=f"of engine {engine} follow"):
            sender.taken(engine)
    one.close()
    sender.close()


# ---- a worker's slots -----------------------------------------------------------------------------------------------

LAYOUTS = [slot_layout((WeightMeta(f"w{index}", torch.float32, (4,)),)) for index in range(4)]


class Recording(OpenedSlots):
    """Two slots whose takes are recorded."""

    def __init__(self):
        super().__init__(
            [torch.zeros(64, dtype=torch.uint8) for _ in range(2)], torch.device("cpu")
        )
        self.events: list[tuple[str, int]] = []

    def take(self, slot, specs):
        self.events.append(("take", int(specs[0].name[1:])))
        return super().take(slot, specs)


@contextmanager
def following(ends, takes_ahead: bool):
    sender, worker = ends
    slots = Recording()
    slots.connect(worker, LAYOUTS)
    slots.takes_ahead = takes_ahead
    turn = sender.begin()
    sender.send(len(LAYOUTS) - 1)
    yield slots, slots.follow(turn, 0)


@pytest.mark.parametrize("takes_ahead", [False, True])
def test_a_gpus_worker_takes_the_next_bucket_while_it_loads_one(ends, takes_ahead):
    with following(ends, takes_ahead) as (slots, buckets):
        next(buckets)
        if takes_ahead:  # bucket 0 is not loaded yet
            until(lambda: ("take", 1) in slots.events, "bucket 1 is taken")
        assert slots.events == [("take", index) for index in range(1 + takes_ahead)]
        assert len(list(buckets)) == len(LAYOUTS) - 1
    assert slots.events == [("take", index) for index in range(4)]


def test_a_load_that_fails_leaves_no_thread_that_waits_for_the_next_bucket(ends):
    sender, worker = ends
    slots = Recording()
    slots.connect(worker, LAYOUTS)
    slots.takes_ahead = True
    turn = sender.begin()
    sender.send(0)
    buckets = slots.follow(turn, 0)
    next(buckets)
    buckets.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("weight slots")]


# ---- the sender -----------------------------------------------------------------------------------------------------


def linears(count: int) -> torch.nn.Module:
    return torch.nn.Sequential(*[torch.nn.Linear(8, 8, bias=False) for _ in range(count)])


def test_an_update_of_many_buckets_is_one_request_and_no_bucket_outruns_the_slots(tmp_path):
    taken: list[int] = []
    posted: list[str] = []
    post = EngineClient.post

    def record(client, message):
        posted.append(type(message).__name__)
        return post(client, message)

    with serving(Keeper(lambda _, bucket: taken.append(bucket)), folder=tmp_path) as engines:
        sync = WeightSync(ModuleSource(linears(9), torch.float32), engines, 256)
        with mock.patch.object(EngineClient, "post", record):
            sync.run(WeightVersion(1, 0))
            sync.run(WeightVersion(2, 0))
        sync.close()
    assert posted == ["OpenSlots", "UpdateWeights", "UpdateWeights"]
    assert taken == [*range(9), *range(9)]


def test_an_engine_that_is_slow_to_begin_is_waited_for_and_one_that_fails_is_named_once(tmp_path):
    slow = Keeper()
    begin = slow.begin_update

    async def begin_late(update: UpdateWeights) -> None:
        time.sleep(0.2)
        if update.version.update == 2:
            raise RuntimeError("no room")
        await begin(update)

    slow.begin_update = begin_late
    with serving(slow, folder=tmp_path) as engines:
        sync = WeightSync(ModuleSource(linears(5), torch.float32), engines, 256)
        sync.run(WeightVersion(1, 0))
        with pytest.raises(EngineError, match="no room"):
            sync.run(WeightVersion(2, 0))
        sync.run(WeightVersion(3, 0))
        sync.close()


# ---- clocks ---------------------------------------------------------------------------------------------------------


class GpuClock:
    """Stand-in for CUDA: work is queued on a stream, and its clock stands still until it runs."""

    def __init__(self):
        self.now = 0.0
        self.waits = 0

    def event(self, enable_timing: bool):
        found = SimpleNamespace(time=None)
        found.record = lambda stream: setattr(found, "time", self.now)
        found.synchronize = lambda: setattr(self, "waits", self.waits + 1)
        found.elapsed_time = lambda end: 1000 * (end.time - found.time)
        return found


def test_a_gpus_stages_are_timed_by_its_own_clock_and_read_at_the_end():
    clock, found = GpuClock(), SyncTimings()
    gpu = SimpleNamespace(type="cuda")
    stream = SimpleNamespace(record_event=lambda event: event.record(None) or event)
    with (
        mock.patch.object(timings.torch.cuda, "Event", clock.event),
        mock.patch.object(timings.torch.cuda, "current_stream", return_value=stream),
    ):
        for seconds in (2.0, 3.0):
            with found.stage("gather_s", gpu):
                clock.now += seconds
        with found.stage("copy_s", gpu):
            clock.now += 0.5
        assert (found.gather_s, found.copy_s, clock.waits) == (0.0, 0.0, 0)
        found.settle()
    assert (found.gather_s, found.copy_s, clock.waits) == (5.0, 0.5, 3)


def test_a_cpus_stages_are_timed_by_the_hosts_clock():
    found = SyncTimings()
    with found.stage("copy_s", torch.device("cpu")):
        os.sched_yield()
    assert found.copy_s > 0.0 and not found._events
