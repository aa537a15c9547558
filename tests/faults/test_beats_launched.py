"""Heartbeats in a launch with trainers, engines and a network: a link that loses one direction.

`test_beats.py` decides: it has a link that is cut both ways, a stopped rank, and the rest.
"""

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from store_host import topology_of
from waiting import HANG_S, until

from multinode_kit.faults import FAKE
from multinode_kit.namespaces import INTERFACE, namespaces_available
from multinode_kit.nodes import Nodes
from trl_multinode.run.heartbeats.judges import READ_STATES_EVERY_S
from trl_multinode.run.heartbeats.node_slots import NAME, NodeSlots

SCRIPT = Path(__file__).parents[1] / "e2e" / "scripts" / "endless.py"
LIMIT_S = 6.0
pytestmark = [pytest.mark.zero3, pytest.mark.two_node, pytest.mark.nightly]


def lose_what_node_1_sends(nodes: Nodes) -> None:
    drop_what_leaves(nodes._network.namespace(1), INTERFACE)


def lose_what_node_1_gets(nodes: Nodes) -> None:
    drop_what_leaves(nodes._network.hub, "node1")


def drop_what_leaves(namespace: str, device: str) -> None:
    """Lose all packets of one direction, as a half-open link does: no end of it sees that it is down."""
    subprocess.run(
        f"tc -n {namespace} qdisc replace dev {device} root blackhole".split(), check=True
    )


BOTH_SIDES = [r"node 1 \(ranks 2 to 3\) .*`heartbeat_timeout` 6 s"] * 2 + [
    r"launcher of node 0"
] * 2


@pytest.mark.parametrize("lose", [lose_what_node_1_sends, lose_what_node_1_gets])
def test_row_30_a_link_of_a_launch_that_is_cut_ends_both_nodes(lose, tmp_path, fault_seconds):
    if (reason := namespaces_available()) is not None:
        pytest.skip(reason)
    fault_seconds(seconds_until(lose, BOTH_SIDES, tmp_path, namespaces=True))


def seconds_until(
    inject: Callable[[Nodes], None], lines: list[str], folder: Path, namespaces: bool = False
) -> float:
    """Launch two nodes, inject the fault, and return the seconds until the first ranks have printed `lines`."""
    env = {"TRL_MULTINODE_ENGINE_MODULE": FAKE, "HEARTBEAT_TIMEOUT": str(LIMIT_S)}
    with Nodes(2, 2, folder=folder, namespaces=namespaces, forked=True, env=env) as nodes:
        nodes.launch(SCRIPT, str(folder))
        for rank in range(4):
            nodes.wait_for(rank, "RUNNING", timeout_s=HANG_S)
        for node in range(2):
            wait_until_judged(nodes, node)
        inject(nodes)
        start = time.monotonic()
        until(lambda: all(line_of(nodes, rank) for rank in range(len(lines))), nodes.tails)
        seconds = time.monotonic() - start
        for rank, expected in enumerate(lines):
            assert re.search(expected, line_of(nodes, rank)), line_of(nodes, rank)
        assert all(code != 0 for code in nodes.wait(timeout_s=HANG_S))
        assert nodes.pids(0) + nodes.pids(1) == []
    return seconds


def wait_until_judged(nodes: Nodes, node: int) -> None:
    """Wait until the judges know that all ranks of a node have synced: `engine_start_timeout` is their limit before.

    The ranks write it into the memory of their node, and a judge reads it from there, through a beat, at most
    `READ_STATES_EVERY_S` later. Until then each rank must have gone on with its heartbeats.
    """
    slots = NodeSlots(topology_of(2 * node + 1))
    slots.open(MemoryOf(nodes.rank_pid(2 * node)))
    until(
        lambda: len(found := slots.read()) == 2 and all(slot["synced"] for slot in found.values()),
        "a sync",
    )
    synced = max(slot["at"] for slot in slots.read().values())
    until(
        lambda: (
            min(slot["at"] for slot in slots.read().values()) > synced + 1.5 * READ_STATES_EVERY_S
        ),
        "heartbeats",
    )


class MemoryOf:
    """Stand-in of the run's store that knows where the memory of a node is: in its local main process."""

    def __init__(self, pid: int):
        self._pid = pid

    def check(self, keys: list[str]) -> bool:
        return True

    def get(self, key: str) -> bytes:
        files = Path(f"/proc/{self._pid}/fd").iterdir()
        number = next(file.name for file in files if NAME in os.readlink(file))
        return f"{self._pid} {number}".encode()


def line_of(nodes: Nodes, rank: int) -> str | None:
    return next(
        (line for line in nodes.rank_log(rank).splitlines() if "the run failed" in line), None
    )
