"""Whatever ends a run, with vLLM's processes: nothing is left, and the last line of every rank is the same.

Two ways decide, because only vLLM has them or only a launch with it: its core dies, and an engine dies while a rank of
the other node is stopped. `faults/test_kills.py` has the other ways on the fake engine.
"""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from left_behind import left_in
from waiting import HANG_S, until

from multinode_kit.engines import below
from multinode_kit.faults import HOOK, TREE
from multinode_kit.namespaces import namespaces_available
from multinode_kit.nodes import Nodes
from trl_multinode.saving.checkpoint_files import newest_whole
from trl_multinode.wire.supervisor import title_of

SCRIPT = Path(__file__).parent / "scripts" / "endless.py"
RANKS = {0, 1, 2, 3}
pytestmark = [pytest.mark.engine, pytest.mark.zero3, pytest.mark.two_node]
NAMESPACES = namespaces_available() is None
# No silence may end a run before what a test does ends it
ENVIRONMENT = {"HEARTBEAT_TIMEOUT": str(2 * HANG_S)}


def engine_pid(nodes: Nodes, node: int) -> int:
    found = re.search(r"RUNNING engine (\d+)", nodes.rank_log(2 * node))
    assert found is not None, nodes.rank_log(2 * node)[-2000:]
    return int(found[1])


def vllm_process(nodes: Nodes, node: int, title: str) -> int:
    return next(child.pid for child in below(engine_pid(nodes, node)) if title in title_of(child))


def stop_a_rank_and_kill_the_other_nodes_engine(nodes: Nodes) -> None:
    """gloo notices a dead peer and hides this case; a stopped one it does not notice, nor does NCCL."""
    stopped = psutil.Process(nodes.rank_pid(3))
    stopped.suspend()
    until(lambda: stopped.status() == psutil.STATUS_STOPPED, "rank 3 to stop")
    os.kill(engine_pid(nodes, 0), signal.SIGKILL)


# name: (what is done, what the line must contain, ranks that cannot print any more)
ENDINGS: dict[str, tuple[Callable[[Nodes], None], str, set[int]]] = {
    "vLLM's core killed": (
        lambda nodes: os.kill(vllm_process(nodes, 0, "EngineCore"), signal.SIGKILL),
        r"engine 0 of node 0 .*EngineCore \(pid \d+\).*engine0\.log",
        set(),
    ),
    "vLLM's worker killed": (
        lambda nodes: os.kill(vllm_process(nodes, 0, "Worker"), signal.SIGKILL),
        r"engine 0 of node 0 .*engine0\.log",
        set(),
    ),
    "SIGKILL of the launcher of node 1": (
        lambda nodes: os.kill(nodes.launcher_pid(1), signal.SIGKILL),
        r"launcher of node 1 \(pid \d+\)",
        set(),
    ),
    "a rank stopped, then the other node's engine killed": (
        stop_a_rank_and_kill_the_other_nodes_engine,
        r"engine 0 of node 0",
        {3},
    ),
}
# One launch forks nothing, and one has vLLM's own process tree below forked ranks. Elsewhere vLLM's processes are
# forked, too; `test_forked.py` and `test_conformance.py` hold forks to be the same.
ORDINARY = "SIGKILL of the launcher of node 1"
VLLMS_OWN_TREE = {ORDINARY, "vLLM's worker killed"}
CASES = [
    "vLLM's core killed",
    "a rank stopped, then the other node's engine killed",
    pytest.param("vLLM's worker killed", marks=pytest.mark.nightly),
    pytest.param(ORDINARY, marks=[pytest.mark.nightly, pytest.mark.fault("14")]),
]


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_left_and_all_ranks_say_the_same(name, tmp_path, fault_seconds):
    end, expected, silent = ENDINGS[name]
    env = ENVIRONMENT | ({} if name in VLLMS_OWN_TREE else {HOOK: TREE})
    with Nodes(
        2, 2, folder=tmp_path, namespaces=NAMESPACES, forked=name != ORDINARY, env=env
    ) as nodes:
        start_training(nodes)
        end(nodes)
        start = time.monotonic()
        lines = until(lambda: last_lines(nodes, RANKS - silent), nodes.what_ranks_do)
        assert len(lines) == 1 and re.search(expected, *lines), lines
        for rank in silent:
            # a stopped process waits for torchrun's own SIGKILL
            os.kill(nodes.rank_pid(rank), signal.SIGKILL)
        until(lambda: not nodes.pids(0) + nodes.pids(1), nodes.tails)
        fault_seconds(time.monotonic() - start)
        assert all(code != 0 for code in nodes.wait(timeout_s=HANG_S))
        assert left_files(nodes) == []


@pytest.mark.nightly
def test_row_15_a_preempted_run_saves_a_checkpoint_and_leaves_nothing(tmp_path):
    """SIGTERM to the launcher of node 1 and, as a scheduler sends it, to vLLM's processes."""
    with Nodes(
        2, 2, folder=tmp_path, namespaces=NAMESPACES, forked=True, env=ENVIRONMENT | {HOOK: TREE}
    ) as nodes:
        start_training(nodes)
        engine = psutil.Process(engine_pid(nodes, 1))
        for process in [engine, *engine.children(recursive=True)]:
            process.terminate()
        os.kill(nodes.launcher_pid(1), signal.SIGTERM)
        until(lambda: not nodes.pids(0) + nodes.pids(1), nodes.tails)
        assert all(code != 0 for code in nodes.wait(timeout_s=HANG_S))
        saved = re.search(r"pre-empted: (\S+) is saved", nodes.rank_log(0))
        assert saved and newest_whole(tmp_path) == Path(saved[1]), nodes.rank_log(0)[-3000:]
        assert not any("the run failed" in nodes.rank_log(rank) for rank in RANKS)
        assert left_files(nodes) == []


def start_training(nodes: Nodes) -> None:
    nodes.launch(SCRIPT, str(nodes.folder))
    for rank in RANKS:
        nodes.wait_for(rank, "RUNNING", timeout_s=HANG_S)


def last_lines(nodes: Nodes, ranks: set[int]) -> set[str] | None:
    """Return the ranks' lines about the failure when each is among the last ones of its log."""
    found = set()
    for rank in ranks:
        lines = [
            line for line in nodes.rank_log(rank).splitlines()[-5:] if "the run failed" in line
        ]
        if not lines:
            return None
        found.add(lines[-1])
    return found


def left_files(nodes: Nodes) -> list[str]:
    """Return all files and folders; only namespaces have a /dev/shm of their own to look into."""
    folders = [nodes.tmpdir(0), nodes.tmpdir(1)]
    if NAMESPACES:
        folders += [nodes.shared_memory(node) for node in (0, 1)]
    return left_in(folders)
