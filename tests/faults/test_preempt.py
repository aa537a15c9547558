"""Row 15: a signal at one rank is a decision of all ranks, with a deadline; nothing else of a run obeys it."""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest
from forks import Rank, forked
from refusals import refused
from store_host import RANKS, StoreHost, enter, enter_early, topology_of
from torch.distributed import HashStore
from waiting import HANG_S, until

from multinode_kit.engines import ENGINE_ARGS, FAKE
from multinode_kit.models import tiny_qwen2, tiny_tokenizer
from trl_multinode import GRPOConfig
from trl_multinode.engine.process import EngineProcess, wait_until_ready
from trl_multinode.engine.run_folder import RunFolder
from trl_multinode.engine.settings import save_without_weights
from trl_multinode.run import preemption as preemption_module
from trl_multinode.run import store as run_store
from trl_multinode.run.endings.ending import ALSO_TO
from trl_multinode.run.endings.exit_codes import PEER_LOST, PREEMPTED
from trl_multinode.run.meeting import Meeting
from trl_multinode.run.preemption import (
    TIMEOUT_VARIABLE,
    Preemption,
    grace_after,
    grace_note,
    launcher_would_end,
)
from trl_multinode.run.store import connect_store
from trl_multinode.run.topology import Topology
from trl_multinode.run.watch import early
from trl_multinode.run.watch import watch_thread as watch_module
from trl_multinode.run.watch.signals import Preempted, StopSignals, noop_handler
from trl_multinode.run.watch.watchdog import Watchdog
from trl_multinode.saving.callbacks import SaveAtPreemption
from trl_multinode.saving.checkpoint_files import MARKERS, newest_whole
from trl_multinode.wire.messages import EngineSpec
from trl_multinode.wire.stop_signals import (
    END_ENGINE,
    OF_LAUNCHERS,
    PREEMPT_VARIABLE,
    check_preempt_signal,
    preempt_signals,
)

LAUNCHED = Topology(0, 1, 0, 1, 0, 1, launched=True)
STEPS = 1_000_000  # more than any test waits for


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(run_store, "GRACE_S", 1.5)


def train(rank: int, store: StoreHost, grace_s: float = HANG_S, stuck_at: int = 0) -> None:
    """Steps of different lengths, each with a point where all ranks meet, as in a collective."""
    for number in OF_LAUNCHERS:  # `nohup` may have ignored one
        signal.signal(number, signal.SIG_DFL)
    watch, topology = enter(rank, store, launched=True), topology_of(rank, launched=True)
    client = connect_store(topology, watch.run)
    preemption, meeting = Preemption(topology, client, grace_s, watch), Meeting(topology, client)
    watch.ending.checkpoint = lambda: "/run/checkpoint-3"
    preemption.decision.begin_training()
    watch.ticks.append(
        lambda: print("found a failure", flush=True) if watch.of_process._failures else None
    )
    with watch.guard():
        try:
            for step in range(1, STEPS):
                preemption.step = step
                time.sleep(random.uniform(0.0, 0.04))
                meeting.wait()
                if step == stuck_at:
                    print("stuck", flush=True)
                    time.sleep(HANG_S)
                time.sleep(random.uniform(0.0, 0.04))
                print(f"step {step} ends", flush=True)
                if preemption.end_step(step):
                    print(f"saved {step}", flush=True)
                    preemption.leave(f"/run/checkpoint-{step}")
        finally:
            watch.close()


def saved(rank: Rank) -> list[str]:
    return [line for line in rank.text.splitlines() if line.startswith("saved")]


@pytest.mark.parametrize(
    ("signalled", "number"),
    [([3], signal.SIGTERM), ([0], signal.SIGHUP), ([0, 1, 2, 3], signal.SIGTERM)],
    ids=["rank 3", "rank 0, its ssh session was closed", "all"],
)
def test_row_15_all_ranks_save_the_same_step_and_leave_with_143(tmp_path, store, signalled, number):
    with forked(lambda rank: train(rank, store), RANKS, tmp_path) as ranks:
        ranks[3].wait_for("step 3 ends")
        for rank in signalled * 2:  # a second one changes nothing
            os.kill(ranks[rank].process.pid, number)
        assert [rank.wait() for rank in ranks] == [PREEMPTED] * RANKS, ranks[0].text
        assert len({tuple(saved(rank)) for rank in ranks}) == 1 and len(saved(ranks[0])) == 1
        ended = [rank.text.count("ends") for rank in ranks]
        asked = [
            line
            for rank in ranks
            for line in rank.text.splitlines()
            if f"received {number.name}" in line
        ]
        nodes = len({k // 2 for k in signalled})
        # once per node, unless the other node's signal has ended the run before
        assert 1 <= len(asked) <= nodes
        step = min(int(line.partition("at the end of step ")[2].split(",")[0]) for line in asked)
        # one more only if another rank had ended the step already
        assert step <= ended[0] <= step + 1


def test_row_15_a_step_that_does_not_end_ends_the_run_at_the_deadline(tmp_path, store):
    with forked(lambda rank: train(rank, store, grace_s=2.0, stuck_at=4), RANKS, tmp_path) as ranks:
        ranks[1].wait_for("stuck")
        os.kill(ranks[1].process.pid, signal.SIGTERM)
        assert [rank.wait() for rank in ranks] == [PREEMPTED] * RANKS
        (line,) = {rank.text.splitlines()[-1] for rank in ranks}
        assert "node 0, rank 1, phase reward: pre-empted by SIGTERM: " in line and "step 4" in line
        assert "`preemption_grace` (2 s)" in line and "/run/checkpoint-3" in line


def test_row_16_a_sigterm_after_ctrl_c_preempts_nothing(tmp_path, store, monkeypatch):
    monkeypatch.setattr(watch_module, "SYMPTOM_DELAY_S", 3.0)
    with forked(lambda rank: train(rank, store), RANKS, tmp_path) as ranks:
        ranks[3].wait_for("step 3 ends")
        os.kill(ranks[1].process.pid, signal.SIGINT)
        ranks[1].wait_for("found a failure")
        os.kill(ranks[1].process.pid, signal.SIGTERM)  # torchrun's, within the delay of a symptom
        assert [rank.wait() for rank in ranks] == [1] * RANKS
        # the main thread trains until the end, and may end one more step behind that line
        (line,) = {line for rank in ranks for line in rank.text.splitlines() if " failed: " in line}
        assert "node 0, rank 1, phase reward: stopped by SIGINT" in line
        assert not any("received SIGTERM" in rank.text or saved(rank) for rank in ranks)


def test_row_16_a_ctrl_c_and_a_sigterm_that_are_pending_together_are_a_ctrl_c(tmp_path):
    """The kernel runs the handler of the later number first, so the pipe has SIGTERM before SIGINT."""

    def body(rank: int) -> list[int]:
        signals = StopSignals()
        signals.catch()
        both = (signal.SIGINT, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_BLOCK, both)
        for number in both:
            os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
        return signals.received()

    with forked(body, 1, tmp_path) as (rank,):
        assert rank.result == [signal.SIGINT, signal.SIGTERM]


def test_row_15_the_signal_of_the_environment_is_received_although_the_launcher_ignores_it(
    tmp_path, monkeypatch
):
    def body(rank: int) -> list:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # inherited from `trap '' USR1`
        watch = Watchdog(LAUNCHED)
        preemption = Preemption(LAUNCHED, HashStore(), 60.0, watch)
        found = [signal.getsignal(signal.SIGUSR1) is noop_handler]
        preemption.step = 1
        found.append(preemption.end_step(1))
        os.kill(os.getpid(), signal.SIGUSR1)
        until(lambda: preemption.asked, "the watch thread to receive the signal")
        found.append(preemption.end_step(2))
        watch.close()
        return [*found, signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN]

    monkeypatch.setenv(PREEMPT_VARIABLE, "USR1")
    with forked(body, 1, tmp_path) as (rank,):
        assert rank.result == [True, False, True, True], rank.text


def test_row_15_a_launcher_that_the_signal_would_end_is_named_at_the_start(tmp_path, monkeypatch):
    def launcher(rank: int) -> list:
        found = []
        for handler in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(signal.SIGUSR1, handler)
            found.append(launcher_would_end(os.getpid()))
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        monkeypatch.setattr(os, "getppid", os.getpid)
        Preemption(LAUNCHED, HashStore(), 60.0, SimpleNamespace(chores=[]))
        return found

    assert not launcher_would_end(os.getpid())  # no signal is named
    monkeypatch.setenv(PREEMPT_VARIABLE, "USR1")
    with forked(launcher, 1, tmp_path) as (parent,):
        assert parent.result == [True, False]
        assert "node 0: a SIGUSR1" in parent.text and "trap '' USR1; exec" in parent.text


@pytest.mark.parametrize(
    ("resumes", "then"),
    [(True, "continues from it"), (False, "begins at step 1"), (None, "begins")],
)
def test_row_15_the_line_says_what_a_new_launch_of_this_script_does(tmp_path, resumes, then):
    def body(rank: int) -> None:
        watch = Watchdog(LAUNCHED)
        watch.ending.resumes = resumes
        with suppress(Preempted):
            Preemption(LAUNCHED, HashStore(), 60.0, watch).leave("/run/checkpoint-3")

    with forked(body, 1, tmp_path) as (rank,):
        assert rank.wait() == 0
        assert then in rank.text and "/run/checkpoint-3 is saved" in rank.text


def test_row_15_ranks_that_leave_ignore_the_signals_of_their_launcher(tmp_path):
    """torchrun sends SIGTERM to the local main process, which still ends its engines, when another rank has left."""

    def body(rank: int) -> None:
        watch = Watchdog(LAUNCHED)
        preemption = Preemption(LAUNCHED, HashStore(), 60.0, watch)
        try:
            preemption.leave("/run/checkpoint-3")
        finally:
            watch.close()
            # it would end this process before the call returns
            os.kill(os.getpid(), signal.SIGTERM)

    with forked(body, 1, tmp_path) as (rank,):
        assert rank.wait() == PREEMPTED, rank.text


def leave_preempted(store: StoreHost, end: Callable[[Watchdog, int], None], rank: int) -> None:
    """Run a rank whose checkpoint is whole; `end` is the end of its script."""
    enter_early(rank, store)
    watch = Watchdog(topology_of(rank, launched=True))
    preemption = Preemption(watch.topology, connect_store(watch.topology, watch.run), 60.0, watch)
    try:
        preemption.leave("/run/checkpoint-3")
    finally:
        end(watch, rank)


def test_row_15_a_rank_that_still_ends_its_engine_may_outlive_the_launcher_of_node_0(
    tmp_path, store
):
    """torchrun ends that launcher, and the store with it, when the ranks of node 0 have left with 143."""

    def end(watch: Watchdog, rank: int) -> None:
        watch.close()
        if rank >= 2:  # ends its engine until its watch thread has seen that the store is gone
            until(
                watch.of_process.stopped.is_set,
                "the watch thread to let this rank outlive the store",
            )

    with forked(partial(leave_preempted, store, end), RANKS, tmp_path) as ranks:
        assert [rank.wait() for rank in ranks[:2]] == [PREEMPTED] * 2, ranks[0].text + ranks[1].text
        store.end()
        assert [rank.wait() for rank in ranks[2:]] == [PREEMPTED] * 2, ranks[2].text + ranks[3].text
        assert not any("the run failed" in rank.text for rank in ranks)


def test_row_15_a_checkpoint_is_whole_so_a_rank_that_waits_for_the_others_may_outlive_the_store(
    tmp_path, store
):
    """A rank of another node was so slow that it had not seen all ranks finished when the store ended."""

    def end(watch: Watchdog, rank: int) -> None:
        os.environ[ALSO_TO] = str(tmp_path / f"ending{rank}.json")
        print("waits", flush=True)
        time.sleep(HANG_S if rank == 0 else 0.0)
        watch.close()
        early._early._at_exit()

    with forked(partial(leave_preempted, store, end), RANKS, tmp_path) as ranks:
        for rank in ranks[2:]:
            rank.wait_for("waits")
        store.end()
        assert [rank.wait() for rank in ranks[2:]] == [PREEMPTED] * 2, ranks[2].text + ranks[3].text
        assert not any("the run failed" in rank.text for rank in ranks[2:])
        assert json.loads((tmp_path / "ending2.json").read_text())["code"] == PREEMPTED


def test_row_15_a_rank_that_does_not_close_yet_may_not_outlive_the_store(tmp_path, store):
    """It may wait in a collective for ranks that are gone."""

    def end(watch: Watchdog, rank: int) -> None:
        print("waits", flush=True)
        time.sleep(HANG_S)

    with forked(partial(leave_preempted, store, end), RANKS, tmp_path) as ranks:
        for rank in ranks:
            rank.wait_for("waits")
        store.end()
        assert [rank.wait() for rank in ranks] == [PEER_LOST] * RANKS


def test_row_15_before_the_first_step_the_run_ends_at_once_with_143(tmp_path):
    def body(rank: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        Preemption(LAUNCHED, HashStore(), HANG_S, Watchdog(LAUNCHED))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(HANG_S)

    with forked(body, 1, tmp_path) as (rank,):
        assert rank.wait() == PREEMPTED and "SIGTERM" in rank.text.splitlines()[-1]


def test_row_15_the_grace_is_the_smaller_of_the_setting_and_what_torchrun_leaves(monkeypatch):
    monkeypatch.delenv(TIMEOUT_VARIABLE, raising=False)
    assert grace_after(signal.SIGTERM, 600.0) == 25.0 and grace_after(signal.SIGTERM, 10.0) == 10.0
    assert grace_after(signal.SIGUSR1, 600.0) == 600.0
    note = grace_note(600.0)
    assert "25 s are left" in note and "torchrun kills the ranks after 30 s" in note
    assert "torchrun" not in grace_note(10.0)
    monkeypatch.setenv(PREEMPT_VARIABLE, "SIGUSR2")
    assert "after a SIGUSR2 600 s" in grace_note(600.0)
    for limit, grace_s in (("600", 595.0), ("4", 2.0)):
        monkeypatch.setenv(TIMEOUT_VARIABLE, limit)
        assert grace_after(signal.SIGTERM, 600.0) == grace_s


@pytest.mark.parametrize("name", ["USR3", "KILL", "TERM", "INT", "10"])
def test_row_15_a_signal_that_cannot_preempt_is_refused(name, monkeypatch):
    monkeypatch.setenv(PREEMPT_VARIABLE, name)
    assert preempt_signals() == (signal.SIGTERM, signal.SIGHUP)
    with refused(PREEMPT_VARIABLE, got=name, expected=("USR1", "USR2")):
        check_preempt_signal()


def test_row_15_transformers_own_checkpoint_at_sigterm_is_refused(tmp_path):
    with refused("enable_jit_checkpoint", got=True, expected=False):
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, enable_jit_checkpoint=True)
    GRPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        enable_jit_checkpoint=True,
        use_vllm=False,
    )


# ---- the trainer's loop ---------------------------------------------------------------------------------------------


def callback(asked: bool) -> SaveAtPreemption:
    preemption = Preemption(
        LAUNCHED,
        HashStore(),
        60.0,
        SimpleNamespace(
            chores=[],
            store=SimpleNamespace(is_first=lambda _: False),
            ending=SimpleNamespace(resumes=True),
        ),
    )
    found = SaveAtPreemption(preemption)
    found.on_train_begin(None, None, None)
    found.on_step_begin(None, SimpleNamespace(global_step=7), None)
    if asked:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                preemption_module.threading, "Timer", lambda *_: SimpleNamespace(start=lambda: None)
            )
            assert preemption.ask(signal.SIGTERM)
    return found


def control(**values: bool) -> SimpleNamespace:
    return SimpleNamespace(
        **{"should_save": False, "should_training_stop": False, "should_evaluate": True} | values
    )


def test_row_15_the_step_is_saved_and_its_evaluation_left_out(monkeypatch):
    # it would ignore the signals from now on
    monkeypatch.setattr(preemption_module.signal, "signal", lambda *_: None)
    state, given, asked = SimpleNamespace(global_step=8), control(), callback(True)
    asked.on_step_end(None, state, given)
    assert vars(given) == {
        "should_save": True,
        "should_training_stop": True,
        "should_evaluate": False,
    }
    with pytest.raises(Preempted) as error:
        asked.on_epoch_end(SimpleNamespace(output_dir="run"), state, given)
    assert error.value.code == PREEMPTED


AFTER_THE_LAST = {"should_save": True, "should_training_stop": True, "should_evaluate": True}
UNCHANGED = {"should_save": False, "should_training_stop": False, "should_evaluate": True}


@pytest.mark.parametrize(
    ("asked", "last", "expected"), [(True, True, AFTER_THE_LAST), (False, False, UNCHANGED)]
)
def test_row_15_the_script_goes_on_after_the_last_step_and_without_a_signal(asked, last, expected):
    state, given, saves = (
        SimpleNamespace(global_step=8),
        control(should_training_stop=last),
        callback(asked),
    )
    saves.on_step_end(None, state, given)
    saves.on_epoch_end(None, state, given)
    assert vars(given) == expected


def test_row_15_a_decision_for_a_step_that_all_ranks_have_ended_does_not_count():
    """The watch thread's request may be late, and rank 0 deletes the keys of old steps, so it makes the key anew."""
    preemption = callback(True)._preemption
    preemption.step = 8
    keys: dict[str, bytes] = {}

    class Late:
        def compare_set(self, key: str, expected: str, value: str) -> bytes:
            if not keys:
                preemption.step = 11
            return keys.setdefault(key, value.encode())

    preemption.publish(Late())
    preemption.publish(Late())
    assert list(keys) == ["preempt/1/8", "preempt/1/9", "preempt/1/11"]
    preemption.publish(Late())
    assert len(keys) == 3, "it is decided, once"


def test_row_15_the_newest_whole_checkpoint_is_found(tmp_path):
    assert newest_whole(tmp_path) is None
    for step in (2, 10, 9, 11):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(
            '{"epoch": 0}' if step != 9 else "{"
        )
    (tmp_path / MARKERS).mkdir(parents=True)
    (tmp_path / MARKERS / "checkpoint-11.rank3").touch()
    assert newest_whole(tmp_path) == tmp_path / "checkpoint-10"


# ---- engines --------------------------------------------------------------------------------------------------------


@pytest.mark.real
def test_row_15_an_engine_ignores_signals_from_its_first_moment_on_and_ends_by_its_owners(
    tmp_path, monkeypatch
):
    """The owner blocks the signals around the start, so that none arrives before the engine can ignore it."""
    monkeypatch.setenv(PREEMPT_VARIABLE, "USR1")
    folder = RunFolder(0)
    save_without_weights(tiny_qwen2(), tiny_tokenizer(), folder.path / "model")
    args = ENGINE_ARGS | {"model": str(folder.path / "model")}
    engine = EngineProcess(
        EngineSpec(0, str(folder.path), os.getpid(), args), tmp_path / "engine0.log", {}, FAKE
    )
    try:
        for _ in range(5):  # during its first imports
            send_all(engine)
        assert not {signal.SIGTERM, signal.SIGUSR1} & signal.pthread_sigmask(signal.SIG_BLOCK, ())
        wait_until_ready([engine], HANG_S, print)
        send_all(engine)
        os.kill(engine.pid, END_ENGINE)  # the kernel delivers it after the others
        assert engine._process.wait(HANG_S) == 1 and "ended by its owner" in engine.why_ended()
    finally:
        engine.kill()
        folder.remove()


def send_all(engine: EngineProcess) -> None:
    time.sleep(0.1)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(engine.pid, number)
