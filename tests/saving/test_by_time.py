"""`save_minutes`: rank 0's clock decides, and all ranks save at the end of the same step."""

import os

import pytest
from forks import forked
from store_host import RANKS, StoreHost, topology_of
from torch.distributed import HashStore
from transformers import TrainerControl, TrainerState

from trl_multinode.run.decision import StepDecision
from trl_multinode.run.store import connect_store
from trl_multinode.run.topology import Topology
from trl_multinode.saving import callbacks
from trl_multinode.saving.callbacks import SaveByTime

MINUTE = 60.0
ALONE = Topology(0, 1, 0, 1, 0, 1, launched=False)


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


def run(
    callback: SaveByTime,
    clock: Clock,
    steps: list[float],
    also_saved: tuple[int, ...] = (),
    save_s=0.0,
    rank=0,
) -> list[int]:
    """The steps, counted from 1, at whose end a trainer would save, with the seconds that each one takes."""
    state, saved = TrainerState(is_world_process_zero=rank == 0), []
    callback.on_train_begin(None, state, TrainerControl())
    for seconds in steps:
        control = TrainerControl()
        callback.on_step_begin(None, state, control)
        clock.now += seconds
        state.global_step += 1
        callback.on_step_end(None, state, control)
        if control.should_save or state.global_step in also_saved:
            saved.append(state.global_step)
            clock.now += save_s
            callback.on_save(None, state, control)
    return saved


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(callbacks, "time", clock := Clock())
    return clock


@pytest.fixture
def callback(clock):
    return SaveByTime(10.0, StepDecision(ALONE, HashStore(), "save"))


@pytest.mark.parametrize(
    ("minutes", "saved"),
    [([4] * 9, [3, 6, 9]), ([1, 40, 1, 1, 1], [3]), ([1] * 10 + [10] * 3, [10, 12, 13])],
    ids=["equal steps", "an unexpectedly long step", "steps of ten times the length"],
)
def test_the_step_in_which_the_minutes_will_have_passed_ends_with_a_checkpoint(
    minutes, saved, callback, clock
):
    assert run(callback, clock, [each * MINUTE for each in minutes]) == saved


def test_other_checkpoints_count_and_so_does_the_time_that_saving_takes(callback, clock):
    assert run(callback, clock, [4 * MINUTE] * 7, also_saved=(2,)) == [2, 5]
    # counted from the end of a save
    assert run(callback, clock, [4 * MINUTE] * 6, save_s=30 * MINUTE) == [
        3,
        6,
    ]


@pytest.mark.nightly  # e2e/test_continued decides that all ranks save
def test_all_ranks_follow_the_clock_of_rank_0(tmp_path):
    """Without a collective of its own: a step ends when all ranks have begun it."""

    def body(rank: int) -> list:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        clock, client = Clock(), connect_store(topology_of(rank), 0)
        meetings = connect_store(topology_of(rank), 1)
        callbacks.time = clock
        callback = SaveByTime(10.0, StepDecision(topology_of(rank), client, "save"))
        train = callback.on_step_end

        def meet(name: str) -> None:
            meetings.add(name, 1)
            while meetings.add(name, 0) < RANKS:
                pass

        def collective_first(args, state, control):
            meet(f"step{state.global_step}")
            train(args, state, control)

        callback.on_step_end = collective_first
        # other clocks would save at once
        minutes = 4.0 if rank == 0 else 100.0
        saved = run(callback, clock, [minutes * MINUTE] * 12, rank=rank)
        # rank 0 deletes an old decision after it has written a new one
        meet("over")
        keys = [step for step in range(13) if client.check([f"save/1/{step}"])]
        return [saved, keys]

    store = StoreHost()
    try:
        with forked(body, RANKS, tmp_path) as ranks:
            for rank in ranks:
                saved, keys = rank.result
                assert saved == [3, 6, 9, 12]
                assert set(keys) <= {11, 12}, "old decisions are deleted"
    finally:
        store.end()
