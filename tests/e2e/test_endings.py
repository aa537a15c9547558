"""However a run ends, on vLLM's real process tree: nothing is left, and every rank's last words are the same line."""

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from left_behind import left_in

from trl_multinode.saving.newest import newest_whole
from trl_multinode.testing.faults import FORKED
from trl_multinode.testing.namespaces import namespaces_available
from trl_multinode.testing.nodes import Nodes
from trl_multinode.wire.supervisor import descendants, title_of

SCRIPT = Path(__file__).parent / "scripts" / "endless.py"
LIMIT_S = 30.0
pytestmark = [pytest.mark.engine, pytest.mark.zero3, pytest.mark.two_node]
NAMESPACES = namespaces_available() is None


def engine_pid(nodes: Nodes, node: int) -> int:
    line = next(line for line in nodes.rank_log(2 * node).splitlines() if "RUNNING engine" in line)
    return int(re.search(r"RUNNING engine (\d+)", line).group(1))


def vllm_process(nodes: Nodes, node: int, title: str) -> int:
    return next(child.pid for child in descendants(engine_pid(nodes, node)) if title in title_of(child))


def stop_a_rank_and_kill_the_other_nodes_engine(nodes: Nodes) -> None:
    """gloo notices a dead peer and hides this case; a stopped one it does not notice, nor does NCCL."""
    os.kill(nodes.rank_pid(3), signal.SIGSTOP)
    time.sleep(2.0)
    os.kill(engine_pid(nodes, 0), signal.SIGKILL)


# name: (what is done, what the line must say, ranks that cannot speak any more)
ENDINGS: dict[str, tuple[Callable[[Nodes], None], str, set[int]]] = {
    "reward raises on rank 3": (lambda nodes: None, r"node 1, rank 3, phase reward: ValueError: this reward", set()),
    "engine killed": (
        lambda nodes: os.kill(engine_pid(nodes, 1), signal.SIGKILL),
        r"engine 0 of node 1 (ended: .*killed by SIGKILL.*|ended\.) ?Log: \S+engine0.log",
        set(),
    ),
    "vLLM's core killed": (
        lambda nodes: os.kill(vllm_process(nodes, 0, "EngineCore"), signal.SIGKILL),
        r"engine 0 of node 0 ended: VLLM::EngineCore \(pid \d+\) (was killed by SIGKILL|ended).*engine0.log",
        set(),
    ),
    "vLLM's worker killed": (
        lambda nodes: os.kill(vllm_process(nodes, 0, "Worker"), signal.SIGKILL),
        r"engine 0 of node 0 .*engine0.log",
        set(),
    ),
    "Ctrl-C on node 0": (
        lambda nodes: os.killpg(nodes.launcher_pid(0), signal.SIGINT),
        r"stopped by SIG|ended",
        set(),
    ),
    "SIGKILL of the launcher of node 1": (
        lambda nodes: os.kill(nodes.launcher_pid(1), signal.SIGKILL),
        r"the launcher of node 1 \(pid \d+\) ended",
        set(),
    ),
    "SIGKILL of the launcher of node 0": (
        lambda nodes: os.kill(nodes.launcher_pid(0), signal.SIGKILL),
        r"the launcher of node 0",
        set(),
    ),
    "a rank stopped, then the other node's engine killed": (
        stop_a_rank_and_kill_the_other_nodes_engine,
        r"engine 0 of node 0 ended",
        {3},
    ),
}
# One launch forks nothing, and three have vLLM's own process tree below forked ranks. Elsewhere vLLM's processes are
# forked, too. `test_forked.py` and `test_conformance.py` hold forks to be the same. On two cores, forked ranks save
# 37 s and forked vLLM processes 20 s.
ORDINARY = "SIGKILL of the launcher of node 1"
VLLMS_OWN_TREE = {ORDINARY, "engine killed", "vLLM's core killed", "vLLM's worker killed"}


FAULTS = {
    "reward raises on rank 3": pytest.mark.fault("17"),
    "Ctrl-C on node 0": pytest.mark.fault("16"),
    "SIGKILL of the launcher of node 1": pytest.mark.fault("14"),
    "SIGKILL of the launcher of node 0": pytest.mark.fault("14"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=FAULTS.get(name, ())) for name in ENDINGS])
def test_nothing_is_left_and_all_ranks_say_the_same(name, tmp_path, fault_seconds):
    end, expected, silent = ENDINGS[name]
    failing = 3 if name.startswith("reward") else -1
    env = {} if name in VLLMS_OWN_TREE else {"TRL_MULTINODE_ENGINE_MODULE": FORKED}
    with Nodes(2, 2, folder=tmp_path, namespaces=NAMESPACES, forked=name != ORDINARY, env=env) as nodes:
        nodes.launch(SCRIPT, str(tmp_path), str(failing))
        for rank in range(4):
            nodes.wait_for(rank, "RUNNING", timeout_s=300)
        end(nodes)
        start = time.monotonic()
        spoken = wait_until(lambda: all(line_of(nodes, rank) for rank in {0, 1, 2, 3} - silent), start + LIMIT_S)
        print(f"{name}: all ranks ended after {time.monotonic() - start:.1f} s")
        assert spoken, "\n".join(f"rank {rank}: {what_it_does(nodes, rank)}" for rank in range(4))
        lines = {line_of(nodes, rank) for rank in {0, 1, 2, 3} - silent}
        assert len(lines) == 1 and re.search(expected, lines.pop()), lines
        for rank in silent:
            os.kill(nodes.rank_pid(rank), signal.SIGKILL)  # a stopped process waits for torchrun's own SIGKILL
        assert wait_until(lambda: not nodes.pids(0) + nodes.pids(1), start + LIMIT_S + 5 * len(silent))
        fault_seconds(time.monotonic() - start)
        assert all(code != 0 for code in nodes.wait(timeout_s=5))
        assert left_files(nodes) == []


def test_row_15_a_preempted_run_saves_a_checkpoint_and_leaves_nothing(tmp_path):
    """SIGTERM to the launcher of node 1 and, as a scheduler sends it, to vLLM's processes."""
    env = {"TRL_MULTINODE_ENGINE_MODULE": FORKED}
    with Nodes(2, 2, folder=tmp_path, namespaces=NAMESPACES, forked=True, env=env) as nodes:
        nodes.launch(SCRIPT, str(tmp_path), "-1")
        for rank in range(4):
            nodes.wait_for(rank, "RUNNING", timeout_s=300)
        engine = psutil.Process(engine_pid(nodes, 1))
        for process in [engine, *engine.children(recursive=True)]:
            process.terminate()
        os.kill(nodes.launcher_pid(1), signal.SIGTERM)
        start = time.monotonic()
        assert wait_until(lambda: not nodes.pids(0) + nodes.pids(1), start + 2 * LIMIT_S), nodes.tails()
        print(f"pre-empted: all ranks ended after {time.monotonic() - start:.1f} s")
        assert all(code != 0 for code in nodes.wait(timeout_s=5))
        saved = re.search(r"pre-empted: (\S+) is saved", nodes.rank_log(0))
        assert saved and newest_whole(tmp_path) == Path(saved[1]), nodes.rank_log(0)[-3000:]
        assert not any("the run failed" in nodes.rank_log(rank) for rank in range(4))
        assert left_files(nodes) == []


def line_of(nodes: Nodes, rank: int) -> str | None:
    """The failure line, if it is among the last ones of the rank's log."""
    lines = [line for line in nodes.rank_log(rank).splitlines()[-5:] if "the run failed" in line]
    return lines[-1] if lines else None


def what_it_does(nodes: Nodes, rank: int) -> str:
    """The end of a rank's log, with the stacks of all its threads if it is still there."""
    with suppress(ProcessLookupError):
        os.kill(nodes.rank_pid(rank), signal.SIGUSR1)
        time.sleep(1.0)
    return nodes.rank_log(rank)[-6000:]


def wait_until(condition: Callable[[], bool], deadline: float) -> bool:
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def left_files(nodes: Nodes) -> list[str]:
    """All files and folders; only namespaces have a /dev/shm of their own to look into."""
    places = [nodes.tmpdir(0), nodes.tmpdir(1)] + ([nodes.shared_memory(k) for k in (0, 1)] if NAMESPACES else [])
    return left_in(places)
