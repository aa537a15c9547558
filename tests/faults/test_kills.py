"""Processes that are killed or fail, on two nodes of two ranks: one line on every survivor, nothing is left."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from waiting import HANG_S, until

from multinode_kit.faults import FAKE
from multinode_kit.namespaces import namespaces_available
from multinode_kit.nodes import Nodes

SCRIPT = Path(__file__).parents[1] / "e2e" / "scripts" / "endless.py"
LOADING = Path(__file__).parent / "scripts" / "loading.py"
RANKS = {0, 1, 2, 3}
pytestmark = [pytest.mark.zero3, pytest.mark.two_node]
nightly = pytest.mark.nightly  # the same on the other node, and what `test_ways_to_end.py` decides


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    # No silence may end a run before its fault does
    environment = {"TRL_MULTINODE_ENGINE_MODULE": FAKE, "HEARTBEAT_TIMEOUT": str(2 * HANG_S)}
    with Nodes(
        2, 2, folder=tmp_path_factory.mktemp("kills"), env=environment, forked=True
    ) as nodes:
        yield nodes


def launch(nodes: Nodes, *words: str) -> None:
    nodes.launch(SCRIPT, str(nodes.folder), *words)
    for rank in range(4):
        nodes.wait_for(rank, "RUNNING", timeout_s=HANG_S)


def line_after(nodes: Nodes, inject: Callable[[], None], survivors: set[int]) -> tuple[str, float]:
    """The line that ended all survivors of `inject`, and the seconds until the last process was gone."""
    start = time.monotonic()
    inject()
    wait_until_all_ended(nodes)
    seconds = time.monotonic() - start
    assert left_files(nodes, {rank // 2 for rank in survivors}) == []
    lines = {nodes.rank_log(rank).splitlines()[-1] for rank in survivors}
    assert len(lines) == 1, lines
    return lines.pop(), seconds


def wait_until_all_ended(nodes: Nodes) -> None:
    """Wait for all processes of both nodes; no launcher may end with 0."""
    until(lambda: not nodes.pids(0) + nodes.pids(1), nodes.tails)
    assert all(nodes.wait(HANG_S))


def left_files(nodes: Nodes, of_nodes: set[int]) -> list[str]:
    return [path.name for node in of_nodes for path in nodes.tmpdir(node).glob("trl_multinode_*")]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=nightly), 2])
def test_row_10_a_killed_local_main_process_ends_all_with_one_line(nodes, rank, fault_seconds):
    launch(nodes)
    line, seconds = line_after(
        nodes, lambda: os.kill(nodes.rank_pid(rank), signal.SIGKILL), RANKS - {rank}
    )
    assert f"rank {rank} (local main process)" in line
    fault_seconds(seconds)


@nightly
def test_row_11_a_segmentation_fault_of_a_rank_ends_all_with_one_line(nodes, fault_seconds):
    """The seconds count from its end: torch prints its C++ stack before that, for 4 to 5 s."""
    launch(nodes)
    pid = nodes.rank_pid(3)
    os.kill(pid, signal.SIGSEGV)
    until(lambda: pid not in nodes.pids(1), "rank 3 to end")
    line, seconds = line_after(nodes, lambda: None, {0, 1, 2})
    assert "process of rank 3 " in line
    fault_seconds(seconds)


def test_row_3_an_engine_that_may_not_be_started_again_ends_all_with_its_log(nodes, fault_seconds):
    launch(nodes)
    engine = int(re.search(r"RUNNING engine (\d+)", nodes.rank_log(2))[1])
    line, seconds = line_after(nodes, lambda: os.kill(engine, signal.SIGKILL), RANKS)
    assert re.search(r"engine 0 of node 1 .*engine0\.log", line), line
    fault_seconds(seconds)


def test_an_engine_that_ends_beside_the_load_of_the_model_ends_all_at_once(nodes):
    """All ranks are inside of TRL's load, from which they never return."""
    nodes.launch(LOADING, str(nodes.folder), "waits")
    logs = [nodes.wait_for(rank, "LOADING", timeout_s=HANG_S) for rank in range(4)]
    engine = int(re.search(r"LOADING engine (\d+)", logs[2])[1])
    line, _ = line_after(nodes, lambda: os.kill(engine, signal.SIGKILL), RANKS)
    assert re.search(r"node 1, rank 2.*engine 0 of node 1 did not start.*engine0\.log", line), line


@nightly
def test_a_load_that_fails_on_one_rank_ends_all_and_the_engines(nodes):
    nodes.launch(LOADING, str(nodes.folder), "raises")
    line, _ = line_after(nodes, lambda: None, RANKS)
    assert "node 1, rank 3, phase set-up: OSError: no weights" in line


@pytest.mark.parametrize("node", [pytest.param(0, marks=nightly), 1])
def test_row_14_a_killed_launcher_ends_all_with_one_line(nodes, node, fault_seconds):
    launch(nodes)
    line, seconds = line_after(
        nodes, lambda: os.kill(nodes.launcher_pid(node), signal.SIGKILL), RANKS
    )
    assert f"launcher of node {node}" in line
    fault_seconds(seconds)


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=nightly)])
def test_row_16_ctrl_c_leaves_one_line_and_no_process(nodes, times, fault_seconds):
    def interrupt() -> None:
        for _ in range(times):
            with suppress(ProcessLookupError):  # it has ended already
                os.killpg(nodes.launcher_pid(0), signal.SIGINT)
            time.sleep(0.5)  # between two presses; it decides nothing

    launch(nodes)
    survivors = RANKS if times == 1 else {2, 3}  # torchrun kills its own ranks at the second one
    line, seconds = line_after(nodes, interrupt, survivors)
    assert re.search(r"SIGINT|SIGTERM|ended", line), line
    fault_seconds(seconds)


@pytest.mark.parametrize("node", [0, pytest.param(1, marks=nightly)])
def test_row_node_killed_at_once_ends_the_other_node_with_one_line(nodes, node, fault_seconds):
    def kill_node() -> None:
        for pid in nodes.pids(node):
            with suppress(ProcessLookupError):  # an engine ends with its rank
                os.kill(pid, signal.SIGKILL)

    launch(nodes)
    line, seconds = line_after(nodes, kill_node, RANKS - {2 * node, 2 * node + 1})
    # nothing was left there that could remove it
    for folder in nodes.tmpdir(node).glob("trl_multinode_*"):
        shutil.rmtree(folder)
    # whichever collective noticed it
    assert re.search(rf"node {node}|[Cc]onnection|peer|Read error", line), line
    fault_seconds(seconds)


def test_row_17_a_reward_that_raises_is_named_with_its_rank_on_all(nodes, fault_seconds):
    launch(nodes, "3")
    line, seconds = line_after(nodes, lambda: None, RANKS)  # it follows the second reward at once
    assert "node 1, rank 3, phase reward: ValueError" in line
    fault_seconds(seconds)


@nightly  # `test_disk.py` has a full temporary folder
def test_row_tmpdir_full_ends_all_ranks_before_step_1(nodes, fault_seconds):
    if reason := namespaces_available():
        pytest.skip(f"a small file system cannot be mounted: {reason}")
    small = nodes.tmpdir(1)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", small], check=True)
    try:
        start = time.monotonic()
        nodes.launch(SCRIPT, str(nodes.folder))
        wait_until_all_ended(nodes)
        fault_seconds(time.monotonic() - start)
    finally:
        subprocess.run(["umount", small], check=True)
    lines = {nodes.rank_log(rank).splitlines()[-1] for rank in range(4)}
    assert len(lines) == 1, lines
    assert "No space left on device" in lines.pop()
