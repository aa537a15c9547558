"""What the watch leaves alone: single processes, pools of a reward function, handlers after its end."""

import builtins
import os
import select
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from beating import Link
from forks import FORK, forked
from pidfds import forbid_pidfds
from torch.distributed import HashStore
from waiting import HANG_S

from trl_multinode.rollouts.rewards import RewardCalls
from trl_multinode.rollouts.tool_calls import ToolCalls
from trl_multinode.run import store as run_store
from trl_multinode.run.endings.exit_codes import PEER_LOST, USER_CODE
from trl_multinode.run.heartbeats import beats as beats_module
from trl_multinode.run.heartbeats import judges as judges_module
from trl_multinode.run.heartbeats.beats import Activity, Beats
from trl_multinode.run.heartbeats.judges import Limits
from trl_multinode.run.store import connect_store
from trl_multinode.run.topology import Topology
from trl_multinode.run.watch import watch_thread as watch_module
from trl_multinode.run.watch.signals import noop_handler
from trl_multinode.run.watch.watchdog import Watchdog

ALONE = Topology(0, 1, 0, 1, 0, 1, launched=False)
LAUNCHED = Topology(0, 1, 0, 1, 0, 1, launched=True)
LAUNCHED_2 = Topology(0, 2, 0, 2, 0, 1, launched=True)


def test_a_single_process_raises_its_exceptions_as_python_does():
    watch = Watchdog(ALONE)
    with pytest.raises(ValueError, match="mine"), watch.guard():
        raise ValueError("mine")
    watch.close()
    watch.close()  # once is enough, twice is fine
    assert isinstance(connect_store(ALONE, 0), HashStore)


def test_a_rank_leaves_when_the_store_knows_it(store, monkeypatch):
    """Its neighbour sees the end of the process at once, and asks the store through another connection."""
    link = Link(store.port)
    monkeypatch.setattr(run_store, "STORE_TIMEOUT_S", HANG_S)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(link.port))
    leaving, neighbour = (
        run_store.RunStore(LAUNCHED_2, connect_store(LAUNCHED_2, None)) for _ in range(2)
    )
    link.cut()
    thread = threading.Thread(target=leaving.leave, args=("closed",))
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    link.heal()
    thread.join(HANG_S)
    assert not thread.is_alive() and neighbour.have_left([0])
    link.close()


def test_a_neighbour_that_ends_while_the_trainer_is_closed_is_no_failure():
    """The main thread closes the last trainer between two looks of the watch thread."""
    watch = watch_module.WatchThread(ALONE)
    watch.trainers = [SimpleNamespace(store=SimpleNamespace(all_have=lambda counter: True))]
    watch.store = SimpleNamespace(have_left=lambda ranks: True, fatal=watch.trainers.clear)
    assert not watch._neighbour_ended("the process of rank 1 ended", 1)
    assert not watch._failures


def test_plain_python_keeps_its_signal_handlers():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    watch = Watchdog(ALONE)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    watch.close()


def test_a_rank_that_is_late_is_waited_for_and_named(monkeypatch, capsys):
    monkeypatch.setattr(run_store, "PROGRESS_EVERY_S", 0.15)

    class Late:
        asked = 0

        def check(self, keys) -> bool:
            self.asked += 1
            return self.asked > 4

        def get(self, key) -> bytes:
            return b"17"

    assert run_store.when_written(Late(), "pid/1", "rank 1 has no trainer yet") == "17"
    assert "rank 1 has no trainer yet" in capsys.readouterr().out


def test_a_wait_goes_on_when_the_watch_thread_gives_the_store_up(monkeypatch):
    class Store:
        done = 0

        def add(self, key, amount) -> int:
            of_the_run.give_up()  # at any moment, in the other thread
            self.done += 1
            return self.done

    monkeypatch.setattr(run_store, "LINGER_S", 0.0)
    of_the_run = run_store.RunStore(LAUNCHED_2, Store())
    of_the_run.wait_for_all(threading.Event(), look=lambda: None)
    assert not of_the_run.all_have("done")


def hang_in_a_reward(host: SimpleNamespace) -> None:
    RewardCalls.of(host).limit(lambda **_: time.sleep(HANG_S), "hang")(prompts=[], completions=[])


def hang_in_a_tool(host: SimpleNamespace) -> None:
    with ToolCalls.of(host, False).named("the tool `hang`", ""):
        time.sleep(HANG_S)


def hang_in_a_step(host: SimpleNamespace) -> None:
    beats_module.BEAT_S = beats_module.WRITE_EVERY_S = judges_module.READ_STATES_EVERY_S = 0.2
    limits = Limits(heartbeat_s=HANG_S, stuck_s=1.0, start_s=HANG_S)
    Beats(host.watch, limits, lambda: Activity("train", 0.0, 4, synced=True))
    time.sleep(HANG_S)


HANGS = {
    hang_in_a_reward: ("`hang`", "`call_timeout` (got 0.5 s)", USER_CODE),
    hang_in_a_tool: ("`hang`", "`call_timeout` (got 0.5 s)", USER_CODE),
    hang_in_a_step: ("rank 0", "`stuck_timeout` 1 s", PEER_LOST),
}


@pytest.mark.fault("one_process")
@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize("hang", HANGS, ids=lambda hang: hang.__name__)
def test_limits_hold_in_a_world_of_one_rank(tmp_path, hang, launched):
    """A notebook, or the config file for one GPU: no other rank and no store."""

    def body(rank: int) -> None:
        topology = LAUNCHED if launched else ALONE
        settings = SimpleNamespace(call_timeout=0.5, tool_errors="answer")
        hang(SimpleNamespace(topology=topology, settings=settings, watch=Watchdog(topology)))

    with forked(body, 1, tmp_path) as (rank,):
        what, setting, code = HANGS[hang]
        assert rank.wait() == code, rank.text
        assert what in rank.text.splitlines()[-1] and setting in rank.text.splitlines()[-1]


@pytest.mark.parametrize(
    "prepare", [pytest.param(lambda: None, marks=pytest.mark.fault("14")), forbid_pidfds]
)
def test_a_killed_launcher_ends_its_ranks_also_in_a_container_without_pidfds(tmp_path, prepare):
    def rank_body() -> None:
        prepare()
        Watchdog(LAUNCHED)
        print(f"up, pid {os.getpid()}.", flush=True)
        time.sleep(HANG_S)

    def launcher(rank: int) -> None:
        FORK.Process(target=rank_body).start()
        time.sleep(HANG_S)

    with forked(launcher, 1, tmp_path) as (parent,):
        parent.wait_for("up, pid ")
        child = int(parent.text.partition("up, pid ")[2].partition(".")[0])
        pidfd = os.pidfd_open(child)
        parent.process.kill()
        parent.process.join()
        assert select.select([pidfd], [], [], HANG_S)[0], "the rank runs on"
        assert f"launcher of node 0 (pid {parent.process.pid})" in parent.text.splitlines()[-1]
        os.close(pidfd)


def test_a_closed_watch_leaves_nothing_in_the_process(tmp_path, store):
    def body(rank: int) -> list:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        # for the other rank, which does not exist
        run_store.RunStore.wait_for_all = lambda *_, **__: None
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write)  # the script's own

        def state() -> list:
            pipes = sum(is_pipe(fd) for fd in os.listdir("/proc/self/fd"))
            handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
            return [sys.excepthook, sys.exit, builtins.exit, handlers, pipes]

        before, found = state(), []
        for _ in range(3):
            watch = Watchdog(LAUNCHED_2)
            found.append(
                state()[0] is not before[0] and signal.getsignal(signal.SIGTERM) is noop_handler
            )
            watch.close()
            watch.report("too late to matter")
            watch.forget_processes()
        return [*found, state() == before, signal.set_wakeup_fd(-1) == write]

    with forked(body, 1, tmp_path) as (rank,):
        assert rank.result == [True] * 5


def is_pipe(fd: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:")
    except OSError:
        return False
