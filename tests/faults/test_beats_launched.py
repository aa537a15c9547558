"""Heartbeats in a launch with trainers, engines and a network: a stopped rank, a link that is cut."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from trl_multinode.testing.faults import FAKE
from trl_multinode.testing.namespaces import namespaces_available
from trl_multinode.testing.nodes import Nodes

SCRIPT = Path(__file__).parents[1] / "e2e" / "scripts" / "endless.py"
LIMIT_S = 5.0
SLACK_S = 20.0  # 10 s are promised; this machine runs other tests
pytestmark = [pytest.mark.zero3, pytest.mark.two_node, pytest.mark.timeout(300)]


def stop_rank_3(nodes: Nodes) -> None:
    os.kill(nodes.rank_pid(3), signal.SIGSTOP)


def cut_the_link(nodes: Nodes) -> None:
    subprocess.run(["ip", "-n", nodes._network.hub, "link", "set", "node1", "down"], check=True)


FAULTS = {
    "row_12_stopped_rank": (
        stop_rank_3,
        [r"rank 3 \(node 1\) has neither sent a heartbeat nor used the CPU for \d+ s .*in phase \w+ of step \d+.* at "]
        * 3,
    ),
    "row_30_cut_link": (
        cut_the_link,
        [r"node 1 \(ranks 2 to 3\) has sent no heartbeat for \d+ s"] * 2
        + [r"the launcher of node 0, which hosts the rendezvous store, ended or cannot be reached"] * 2,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_silent_fault_ends_both_nodes(fault, tmp_path):
    inject, lines = FAULTS[fault]
    if fault == "row_30_cut_link" and (reason := namespaces_available()) is not None:
        pytest.skip(reason)
    env = {"TRL_MULTINODE_ENGINE_MODULE": FAKE, "HEARTBEAT_TIMEOUT": str(LIMIT_S)}
    with Nodes(2, 2, folder=tmp_path, namespaces="link" in fault, forked=True, env=env) as nodes:
        nodes.launch(SCRIPT, str(tmp_path), "-1")
        for rank in range(4):
            nodes.wait_for(rank, "RUNNING", timeout_s=200)
        inject(nodes)
        start = time.monotonic()
        while not all(line_of(nodes, rank) for rank in range(len(lines))):
            assert time.monotonic() - start < LIMIT_S + SLACK_S, [nodes.rank_log(rank)[-2000:] for rank in range(4)]
            time.sleep(0.1)
        print(f"{fault}: all ranks ended after {time.monotonic() - start:.1f} s")
        for rank, expected in enumerate(lines):
            assert re.search(expected, line_of(nodes, rank)), line_of(nodes, rank)
        assert all(code != 0 for code in nodes.wait(timeout_s=30))
        assert nodes.pids(0) + nodes.pids(1) == []


def line_of(nodes: Nodes, rank: int) -> str | None:
    return next((line for line in nodes.rank_log(rank).splitlines() if "the run failed" in line), None)
