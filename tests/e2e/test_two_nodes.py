"""The deciding tests on the real stack: vLLM, ZeRO-3, several `accelerate launch`. Two launches check all of it.

The launch of two nodes is an ordinary one with vLLM's own process tree. The other forks its ranks and engines.
"""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from left_behind import left_in
from listening import listeners
from waiting import HANG_S, until

from multinode_kit.faults import FORKED, HOOK, Faults
from multinode_kit.namespaces import namespaces_available
from multinode_kit.nodes import Nodes
from trl_multinode.wire.secret import SECRET

SCRIPTS = Path(__file__).parent / "scripts"
FAULTS = Faults().lie_about_load(8).lose_load(10).stale_head(12).environment()
pytestmark = [pytest.mark.engine, pytest.mark.zero3, pytest.mark.two_node]
NAMESPACES = namespaces_available() is None


def results(folder: Path, name: str, num_ranks: int) -> list[dict]:
    return [
        json.loads((folder / f"{name}_rank{rank}.json").read_text()) for rank in range(num_ranks)
    ]


@pytest.fixture(scope="module")
def two_by_two(tmp_path_factory):
    """2 nodes x 2 ranks, up to the point where it would run for ever; then the local main process of node 1 dies."""
    folder = tmp_path_factory.mktemp("two_by_two")
    with Nodes(2, 2, folder=folder, namespaces=NAMESPACES, env=FAULTS) as nodes:
        nodes.launch(SCRIPTS / "story.py", str(folder), "all")
        for rank in range(4):
            nodes.wait_for(rank, "LOOPING", timeout_s=HANG_S)
        found = {
            "folder": folder,
            "story": results(folder, "story", 4),
            "layout": results(folder, "layout", 4),
        }
        found["listening"] = [(name, at) for k in range(2) for name, at in listening(nodes, k)]
        os.kill(nodes.rank_pid(2), signal.SIGKILL)
        found["codes"] = nodes.wait(timeout_s=HANG_S)
        until(lambda: not nodes.pids(0) + nodes.pids(1), nodes.tails)
        found["logs"] = [nodes.rank_log(rank) for rank in range(4)]
        # else /dev/shm is the machine's
        kinds = [nodes.tmpdir, nodes.shared_memory] if NAMESPACES else [nodes.tmpdir]
        found["files"] = left_in([kind(k) for k in range(2) for kind in kinds])
        yield found


def listening(nodes: Nodes, node: int) -> list[tuple[str, str]]:
    """Kind of process and address of every TCP listener of a node."""
    ranks = {nodes.rank_pid(rank) for rank in (2 * node, 2 * node + 1)}
    found = []
    for pid in nodes.pids(node):
        name = (
            "rank" if pid in ranks else "launcher" if pid == nodes.launcher_pid(node) else "other"
        )
        found += [(f"{name} of node {node}", address) for address in listeners(pid)]
    return found


def story(run, key: str) -> list:
    return [rank[key] for rank in run["story"]]


def test_parameters_were_sharded_before_the_sync(two_by_two):
    assert all(numel == 0 for rank in story(two_by_two, "sharded") for numel in rank)


def test_log_probs_agree_after_1_and_5_syncs_and_not_before(two_by_two):
    for stale, fresh in zip(story(two_by_two, "stale"), story(two_by_two, "fresh"), strict=True):
        assert min(stale) > 0.1 and len(stale) == 5
        assert max(fresh) < 1e-3


def test_a_suppressed_load_is_missed_by_more_than_a_tenth_and_healed(two_by_two):
    assert min(story(two_by_two, "suppressed")) > 0.1
    assert max(story(two_by_two, "healed")) < 1e-3 and max(story(two_by_two, "healed_again")) < 1e-3


def test_a_lost_load_is_a_wrong_version_on_every_rank(two_by_two):
    for rank, text in enumerate(story(two_by_two, "lost")):
        assert re.match(
            rf"WeightVersionError: engine 0 of node {rank // 2} .*update 9 .*update 10", text
        ), text


def test_a_stale_head_trips_the_alarm_with_node_and_version(two_by_two):
    for rank, text in enumerate(story(two_by_two, "stale_head")):
        assert (
            text.startswith(f"LogprobDivergenceError: node {rank // 2}, rank {rank}:")
            and "update 12" in text
        )


def test_engines_folders_and_buffers_belong_to_their_node(two_by_two):
    assert len(set(story(two_by_two, "engine_pid"))) == 2
    assert len(set(story(two_by_two, "folder"))) == 2
    slots = [set(slots) for slots in story(two_by_two, "slots")]
    assert slots[0] and slots[2] and not slots[0] & slots[2] and not slots[1] and not slots[3]


@pytest.mark.skipif(not NAMESPACES, reason=f"namespaces: {namespaces_available()}")
def test_rollouts_do_not_cross_the_link_and_nodes_do_not_see_each_other(two_by_two):
    assert story(two_by_two, "visible_folders_of_others") == [[], [], [], []]
    for rank in (0, 2):
        run = two_by_two["story"][rank]
        extra = {
            tokens: run[f"bytes_{tokens}"] - run[f"bytes_idle_{tokens}"] for tokens in (16, 512)
        }
        # A heartbeat more or less has 3,000 bytes; the rollouts of 512 tokens would have 32,000
        assert max(extra.values()) < 16_000, f"rank {rank}: {extra} beyond the idle link, {run}"


@pytest.mark.skipif(not NAMESPACES, reason=f"namespaces: {namespaces_available()}")
def test_another_host_reaches_the_store_and_the_trainers_collectives_only(two_by_two):
    reached = {
        (name, address)
        for name, address in two_by_two["listening"]
        if address not in ("127.0.0.1", "::1")
    }
    ranks = {(f"rank of node {node}", f"10.77.0.{node + 1}") for node in range(2)}  # gloo
    assert ranks <= reached and {name for name, _ in reached - ranks} == {"launcher of node 0"}, (
        reached
    )
    # engines, on lo
    assert {"other of node 0", "other of node 1"} <= {name for name, _ in two_by_two["listening"]}


def test_sigkill_of_a_local_main_process_ends_everything_with_one_line(two_by_two):
    assert all(two_by_two["codes"])
    lines = [failure_line(two_by_two["logs"][rank]) for rank in (0, 1, 3)]
    assert len(set(lines)) == 1 and "rank 2 (local main process)" in lines[0]
    assert two_by_two["files"] == []  # a killed owner cannot remove its own: its engine does


def failure_line(log: str) -> str:
    """Return the line about the failure, which must be among the last ones."""
    lines = [line for line in log.splitlines()[-5:] if "the run failed" in line]
    assert lines, log[-2000:]
    return lines[-1]


@pytest.mark.parametrize(
    ("ranks", "engines"),
    [
        ([3, 1], "10"),
        pytest.param([3, 1], "11", marks=pytest.mark.nightly),
        pytest.param([4], "1", marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_other_nodes_with_four_ranks_give_the_same_completions_and_losses(
    ranks, engines, two_by_two, tmp_path
):
    """Also with engines on one of both nodes only, which serve the ranks of the other one through a port."""
    env = {HOOK: FORKED, "ENGINES_OF_NODES": engines, SECRET: "secret of these tests"}
    with Nodes(len(ranks), ranks, folder=tmp_path, env=env, forked=True) as nodes:
        nodes.launch(SCRIPTS / "story.py", str(tmp_path), "layout")
        assert nodes.wait(timeout_s=HANG_S) == [0] * len(ranks), nodes.rank_log(0)[-3000:]
        until(lambda: not any(map(nodes.pids, range(len(ranks)))), nodes.tails)
    # in both, each update was checked against the trainer's log-probs
    one, two = results(tmp_path, "layout", 4), two_by_two["layout"]
    assert [rank["world"] for rank in one + two] == [4] * 8
    assert [rank["rows"] for rank in one] == [rank["rows"] for rank in two]
    assert one[0]["losses"] == pytest.approx(two[0]["losses"], rel=1e-5, abs=1e-7)
    # they were sampled, not constant
    assert len({tuple(ids) for rank in one for _, ids in rank["rows"]}) > 8
