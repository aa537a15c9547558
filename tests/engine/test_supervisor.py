"""What an engine says when one of its processes ends: which one ended first, and nothing that only follows from it."""

import asyncio
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from trl_multinode.engine_process import server
from trl_multinode.engine_process.server import EngineServer
from trl_multinode.wire.messages import CheckSlot, EngineSpec
from trl_multinode.wire.supervisor import descendants, first_ended, is_resource_tracker, title_of


@pytest.fixture
def tree():
    """Two processes in the place of vLLM's core and its worker."""
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def ended(process: subprocess.Popen) -> int:
    process.kill()
    process.wait()
    return process.pid


@pytest.mark.parametrize("core_ended", [False, True])
def test_a_worker_that_ended_is_named_unless_its_core_ended_too(tree, core_ended):
    core, worker = tree
    if core_ended:
        ended(core)
    first = core if core_ended else worker
    assert first_ended(ended(worker), [core.pid, worker.pid]) == first.pid


@pytest.mark.nightly
def test_a_process_that_ended_after_it_was_listed_has_no_title():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        (listed,) = [child for child in descendants() if child.pid == process.pid]
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert (
            listed.status() == psutil.STATUS_ZOMBIE
            and title_of(listed) == ""
            and not is_resource_tracker(listed)
        )
    assert title_of(listed) == "" and not is_resource_tracker(listed)


@pytest.mark.nightly
@pytest.mark.real
def test_an_engine_that_ends_does_not_wait_for_the_tracker_of_its_shared_memory():
    """The tracker waits for this process, so it would end only when it is killed: after half of the deadline."""
    script = (
        "import psutil, time; from multiprocessing import resource_tracker, shared_memory\n"
        "from trl_multinode.wire import supervisor\n"
        "from trl_multinode.wire.supervisor import kill_descendants, release_resource_tracker\n"
        "memory = shared_memory.SharedMemory(create=True, size=8); memory.unlink()\n"
        "while not any(map(supervisor.is_resource_tracker, supervisor.descendants())): time.sleep(0.01)  # it starts\n"
        "killed = []; psutil.Process.kill = lambda process: killed.append(process.pid)\n"
        "release_resource_tracker(); kill_descendants(120.0); print(killed)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "[]\n"


class Broken:
    """A backend whose vLLM fails, because one of its processes has ended."""

    async def check_slot(self, slot, num_bytes):
        raise RuntimeError("Call to collective_rpc method failed: cancelled")


@pytest.mark.parametrize("leaving", [False, True])
def test_an_error_of_vllm_is_not_sent_by_an_engine_that_ends_with_the_cause(leaving, monkeypatch):
    monkeypatch.setattr(server, "CAUSE_S", 0.0)
    sent = []
    writer = SimpleNamespace(write=sent.append, drain=lambda: asyncio.sleep(0))

    async def answered() -> None:
        engine = EngineServer(EngineSpec(0, "", 0, {}), Broken())
        if leaving:
            engine.leaving.set()
        check = CheckSlot(slot=0, num_bytes=1, crc=0)
        answering = asyncio.create_task(engine._answer(check, writer))
        for _ in range(10):  # turns of the event loop, in which nothing else runs
            await asyncio.sleep(0)
        assert answering.done() is not leaving
        answering.cancel()

    asyncio.run(answered())
    assert len(sent) == int(not leaving)
