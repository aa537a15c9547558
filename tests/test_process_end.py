"""The end of processes with and without pidfds: old kernels, gVisor, seccomp filters, a Python without the call."""

import errno
import os
import select
import subprocess
import threading
import time

import pytest
from forks import forked
from pidfds import forbid_pidfds
from waiting import HANG_S, until

from multinode_kit.engines import ENGINE_ARGS, FAKE
from multinode_kit.models import tiny_qwen2, tiny_tokenizer
from trl_multinode.engine.cores import engine_cores, on_cores
from trl_multinode.engine.process import EngineProcess
from trl_multinode.engine.run_folder import RunFolder
from trl_multinode.engine.settings import CPU_ENVIRONMENT, cores_per_worker, save_without_weights
from trl_multinode.run.limits import launchers
from trl_multinode.run.topology import Topology
from trl_multinode.run.watch.watchdog import Watchdog
from trl_multinode.wire.connection import connect
from trl_multinode.wire.messages import EngineSpec
from trl_multinode.wire.process_end import open_end, start_time
from trl_multinode.wire.supervisor import is_running, watch_end

ALONE = Topology(0, 1, 0, 1, 0, 1, launched=False)


def refuse(number: int):
    def pidfd_open(pid: int, flags: int = 0) -> int:
        raise OSError(number, os.strerror(number))

    return pidfd_open


@pytest.fixture(params=["pidfds", errno.ENOSYS, errno.EPERM, "no function"])
def kernel(request, monkeypatch):
    """A kernel or container with pidfds, or without them in one of the ways."""
    if request.param == "no function":
        monkeypatch.delattr(os, "pidfd_open")
    elif request.param != "pidfds":
        monkeypatch.setattr(os, "pidfd_open", refuse(request.param))


@pytest.fixture
def child():
    process = subprocess.Popen(["sleep", str(HANG_S)])
    yield process
    process.kill()
    process.wait()


def threads_of(pid: int) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"end-of-{pid}"]


def test_the_end_of_a_process_is_seen_before_its_parent_has_waited_for_it(kernel, child):
    other = subprocess.Popen(["sleep", str(HANG_S)])
    ends = [open_end(process.pid) for process in (child, other)]
    child.kill()
    assert select.select(ends, [], [], HANG_S)[0] == ends[:1]  # the other one runs
    other.kill()
    assert select.select(ends[1:], [], [], HANG_S)[0] == ends[1:]
    other.wait()
    for end in ends:
        os.close(end)


def test_a_process_that_does_not_exist_is_an_error(kernel, child):
    child.kill()
    child.wait()
    with pytest.raises(ProcessLookupError, match=os.strerror(errno.ESRCH)):
        open_end(child.pid)


@pytest.mark.nightly
def test_a_closed_descriptor_ends_its_thread(monkeypatch, child):
    monkeypatch.setattr(os, "pidfd_open", refuse(errno.ENOSYS))
    end = open_end(child.pid)
    (thread,) = threads_of(child.pid)
    os.close(end)
    thread.join(HANG_S)
    assert not thread.is_alive() and child.poll() is None


def test_other_errors_are_not_taken_for_a_missing_pidfd(monkeypatch, child):
    monkeypatch.setattr(os, "pidfd_open", refuse(errno.EMFILE))
    with pytest.raises(OSError, match="Too many open files"):
        open_end(child.pid)


@pytest.mark.nightly
def test_the_start_time_is_found_for_any_name_of_a_process(tmp_path):
    program = tmp_path / "a) S 1 (b"
    program.symlink_to("/bin/sleep")
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    with subprocess.Popen([str(program), "60"]) as process:
        started = start_time(process.pid) / os.sysconf("SC_CLK_TCK")
        # it counts whole ticks
        assert before - 0.1 <= started <= time.clock_gettime(time.CLOCK_BOOTTIME)
        process.kill()


def test_watchers_report_the_end_of_each_process_once(kernel):
    """Both watchers: that of an engine, and that of a rank."""
    ended: list[int] = []
    watchdog = Watchdog(ALONE)
    pairs = [subprocess.Popen(["sleep", str(HANG_S)]) for _ in range(2)]
    for process in pairs:
        watch_end(process.pid, ended.append)
        watchdog.add_process(process.pid, lambda pid=process.pid: ended.append(-pid))
    pairs[1].kill()
    until(lambda: len(ended) >= 2)
    assert sorted(ended) == [-pairs[1].pid, pairs[1].pid]
    watchdog.close()
    for process in pairs:
        process.kill()
        process.wait()


# ---- cores


def test_without_a_launcher_an_engine_has_the_cores_of_its_process():
    assert engine_cores(launched=False) == os.sched_getaffinity(0)


def test_cores_that_this_machine_lacks_change_nothing():
    before = os.sched_getaffinity(0)
    with on_cores({4000}):
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2,
    reason="one core only: a rank cannot have fewer than its launcher",
)
def test_workers_of_an_engine_on_a_cpu_are_bound_to_cores_that_it_has(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    usable = sorted(os.sched_getaffinity(0))
    assert cores_per_worker(1) == {}
    assert cores_per_worker(2) == {"VLLM_CPU_OMP_THREADS_BIND": f"{usable[0]}|{usable[1]}"}
    assert cores_per_worker(2, {5, 9, 4}) == {"VLLM_CPU_OMP_THREADS_BIND": "4|5"}
    assert cores_per_worker(2, {7}) == {"VLLM_CPU_OMP_THREADS_BIND": "7|7"}
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "1")  # as the test kit sets it
    assert cores_per_worker(1) == {} and cores_per_worker(2) == {"VLLM_CPU_OMP_THREADS_BIND": "1|1"}
    # the user's own value is in the environment already
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    assert cores_per_worker(2) == {}


@pytest.mark.nightly  # the fake engine ends with its owner in engine/
@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2,
    reason="one core only: a rank cannot have fewer than its launcher",
)
@pytest.mark.real
def test_an_engine_without_pidfds_has_its_launchers_cores_and_ends_with_its_owner(tmp_path):
    """A real process with the fake backend, started by a rank that is bound to one core; this is its launcher."""
    cores = os.sched_getaffinity(0)

    def rank_body(rank: int) -> None:
        forbid_pidfds()
        os.sched_setaffinity(0, {min(cores)})
        folder = RunFolder(0)
        save_without_weights(tiny_qwen2(), tiny_tokenizer(), folder.path / "model")
        arguments = ENGINE_ARGS | {"model": str(folder.path / "model")}
        spec, cores_of_engine = (
            EngineSpec(0, str(folder.path), os.getpid(), arguments),
            engine_cores(launched=True),
        )
        process = EngineProcess(
            spec, tmp_path / "engine0.log", CPU_ENVIRONMENT, FAKE, cores_of_engine
        )
        assert os.sched_getaffinity(0) == {min(cores)}  # the rank keeps its own
        while not process.is_ready():
            time.sleep(0.05)
        connect(str(process.socket_path), "engine 0", tmp_path / "engine0.log").close()
        print(f"READY {process.pid} {sorted(os.sched_getaffinity(process.pid))}", flush=True)
        time.sleep(HANG_S)

    with forked(rank_body, 1, tmp_path) as (rank,):
        rank.wait_for("READY")
        pid = int(rank.text.split()[1])
        assert f"READY {pid} {sorted(cores)}\n" in rank.text
        rank.process.kill()
        rank.process.join()
        until(lambda: not is_running(pid), (tmp_path / "engine0.log").read_text)


@pytest.mark.nightly
@pytest.mark.parametrize(("program", "found"), [("python3.11", [1]), ("systemd", [])])
def test_process_1_is_the_launcher_only_if_it_runs_python(monkeypatch, program, found):
    """In a container `accelerate launch` may be process 1; on a host that is the system's own."""
    monkeypatch.setattr(os, "getppid", lambda: 1)
    monkeypatch.setattr(os, "readlink", lambda path: f"/usr/bin/{program}")
    assert launchers() == found
