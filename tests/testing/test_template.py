"""The process that forks launchers and fake engines ends with the process that started it, and so do its forks."""

import os
import signal
import socket
import subprocess
import time

import psutil
import pytest
from forks import forked
from waiting import HANG_S, until

from multinode_kit import template
from multinode_kit.forked_process import Inherited
from multinode_kit.forking import ForkedProcess
from trl_multinode.wire.supervisor import is_running

pytestmark = [pytest.mark.real, pytest.mark.nightly]


def test_a_killed_owner_leaves_neither_the_template_nor_a_fork_nor_its_child(tmp_path, monkeypatch):
    pids = tmp_path / "pids"

    def launcher(request: dict, log: int, inherited: Inherited) -> None:
        os.setsid()  # as launchers and ranks do
        rank = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (tmp_path / "part").write_text(f"{os.getppid()} {os.getpid()} {rank.pid}")
        (tmp_path / "part").rename(pids)
        time.sleep(600)

    def own(rank: int) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(tmp_path / "socket"))
            listener.listen()
            if os.fork() == 0:
                template.Template(listener, Inherited(frozenset(), {}, "")).serve()
        ForkedProcess(str(tmp_path / "socket"), "launcher", [], {}, 1).wait()

    monkeypatch.setitem(template.PROGRAMS, "launcher", launcher)
    with forked(own, 1, tmp_path) as (owner,):
        processes = [
            psutil.Process(int(pid))
            for pid in until(lambda: pids.exists() and pids.read_text()).split()
        ]
        assert len(processes) == 3 and all(is_running(process.pid) for process in processes)
        os.kill(owner.process.pid, signal.SIGKILL)
        _, left = psutil.wait_procs(processes, HANG_S)
        left = [process for process in left if is_running(process.pid)]
        for process in left:
            process.kill()
    assert not left
