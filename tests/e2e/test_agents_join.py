"""Engines of agents, on hosts without ranks, serve a run of uneven nodes that have none of their own."""

import json
import os
import re
import signal
from pathlib import Path

import in_flight_runs
import psutil
import pytest
from waiting import HANG_S, until

from multinode_kit.agents import SECRET_OF_TESTS, running_agent
from multinode_kit.engines import FAKE, TREE
from multinode_kit.faults import HOOK, Faults
from multinode_kit.namespaces import namespaces_available
from multinode_kit.nodes import Nodes

SCRIPTS = Path(__file__).parent / "scripts"
pytestmark = [pytest.mark.zero3, pytest.mark.two_node]
RANKS = [2, 1]
WITHOUT = {"ENGINES_OF_NODES": "00", "REMOTE_ENGINES": "1", **SECRET_OF_TESTS}
# nodes with engines of their own, and agents that relieve them
BESIDE = WITHOUT | {"ENGINES_OF_NODES": "11", "REMOTE_ENGINES": "2"}
# the run waits for no agent, and lasts longer than one needs to start
SLOW = Faults().slow_tokens(0.02).environment(FAKE)
RELIEVED = {
    "name": "relieved",
    "output": "relieved",
    "prompts": 126,
    "num_train_epochs": 1,
    "max_completion_length": 128,
    # the engines of the nodes are always full
    "engine_kwargs": {"max_num_seqs": 4},
    "engine_stall_timeout": 15.0,
}


def results(folder: Path, name: str) -> list[dict]:
    paths = [folder / f"{name}_rank{rank}.json" for rank in range(sum(RANKS))]
    return [json.loads(path.read_text()) for path in paths]


def pass_steps(nodes: Nodes, count: int) -> None:
    """Wait until the run has made so many more steps."""
    step = nodes.rank_log(0).count("\nstep ")
    nodes.wait_for(0, f"step {step + count}/", timeout_s=HANG_S)


@pytest.mark.nightly
def test_an_agent_on_another_host_joins_a_run_of_one_node(tmp_path):
    """On namespaces as hosts. The launcher of a single node names the loopback as the address of node 0."""
    if reason := namespaces_available():
        pytest.skip(reason)
    engine = {HOOK: FAKE}
    env = engine | WITHOUT | {"ENGINES_OF_NODES": "0"}
    with Nodes(1, 2, folder=tmp_path, env=env, forked=True, namespaces=True, more_hosts=1) as nodes:
        nodes.launch(SCRIPTS / "story.py", str(tmp_path), "layout")
        with running_agent(nodes, tmp_path / "agent", engine, host=1):
            assert nodes.wait(timeout_s=HANG_S) == [0], nodes.tails()
        assert "agents may join at" in nodes.rank_log(0)


@pytest.mark.nightly
@pytest.mark.engine
def test_each_of_five_updates_reaches_the_engine_of_another_host(tmp_path):
    """With vLLM, on namespaces as hosts: the log-probs are the trainer's after each update, and not before."""
    if reason := namespaces_available():
        pytest.skip(reason)
    engine = {HOOK: TREE}
    with Nodes(
        2, RANKS, folder=tmp_path, env=engine | WITHOUT, forked=True, namespaces=True, more_hosts=1
    ) as nodes:
        nodes.launch(SCRIPTS / "story.py", str(tmp_path), "parity")
        with running_agent(nodes, tmp_path / "agent", engine, host=2):
            assert nodes.wait(timeout_s=HANG_S) == [0, 0], nodes.tails()
    for rank in results(tmp_path, "parity"):
        assert min(rank["stale"]) > 0.1 and len(rank["stale"]) == 5
        assert max(rank["fresh"]) < 1e-3


@pytest.mark.fault("agent_lost")
@pytest.mark.nightly
@pytest.mark.engine
def test_rows_in_flight_go_on_when_an_agent_is_killed_and_another_one_has_joined(tmp_path):
    """With vLLM. Every id is trained once, with rows of both agents."""
    engine = {HOOK: TREE}
    job = {
        "name": "joined",
        "output": "joined",
        # on a busy machine the second agent comes half a minute after the first one
        "prompts": 168,
        "num_train_epochs": 1,
        "max_completion_length": 256,
        "ignore_eos": True,
        "logprob_divergence_limit": 1e-3,
    }
    with Nodes(2, RANKS, folder=tmp_path, env=engine | WITHOUT, forked=True) as nodes:
        in_flight_runs.start(nodes, job)
        # started together, because vLLM starts longer than this run trains; one of them serves first
        with (
            running_agent(nodes, tmp_path / "a", engine) as a,
            running_agent(nodes, tmp_path / "b", engine) as b,
        ):
            nodes.wait_for(0, "number 3 serves with", timeout_s=HANG_S)
            nodes.wait_for(0, "number 2 serves with", timeout_s=HANG_S)
            nodes.wait_for(0, "step 2/", timeout_s=HANG_S)
            (number, *_) = re.findall(r"number (\d) serves with", nodes.rank_log(0))
            is_a = f"node {number} of the run" in (tmp_path / "a" / "agent.log").read_text()
            (a if is_a else b).kill()
            in_flight_runs.end(nodes)
    runs = in_flight_runs.results(tmp_path, "joined", sum(RANKS))
    engines = {engine for run in runs for one in run["rounds"] for engine in one["engines"]}
    assert engines == {0, 1}
    rows = in_flight_runs.trained(runs)
    assert len(rows) == 168 and set(rows.values()) == {in_flight_runs.GROUP}


@pytest.mark.fault("agent_lost")
@pytest.mark.nightly
def test_rows_go_on_when_an_agent_is_killed_in_a_swap_and_another_one_is_frozen(tmp_path):
    """The nodes have engines of their own, which are full. Every id is trained once, with rows of all engines."""
    engine = SLOW
    with Nodes(2, RANKS, folder=tmp_path, env=engine | BESIDE, forked=True) as nodes:
        in_flight_runs.start(nodes, RELIEVED)
        with (
            running_agent(nodes, tmp_path / "first", engine) as first,
            running_agent(nodes, tmp_path / "second", engine) as second,
        ):
            for number in (2, 3):
                nodes.wait_for(0, f"number {number} serves with", timeout_s=HANG_S)
            pass_steps(nodes, 1)
            (process,) = psutil.Process(first.pid).children()
            process.suspend()
            # so that an update is in the agent's slots, for which it waits for its engine
            pass_steps(nodes, 2)
            first.kill()
            pass_steps(nodes, 1)
            os.kill(second.pid, signal.SIGSTOP)
            in_flight_runs.end(nodes)
            os.kill(second.pid, signal.SIGCONT)
            process.wait(HANG_S)
    check_relieved(tmp_path, engines={0, 1, 2})


@pytest.mark.fault("agent_lost")
@pytest.mark.fault("agent_pull")
@pytest.mark.nightly
def test_rows_go_on_when_an_agent_is_killed_in_a_pull_and_another_one_is_cut_off(tmp_path):
    """On namespaces as hosts. The nodes have engines of their own, which are full."""
    if reason := namespaces_available():
        pytest.skip(reason)
    engine = SLOW
    with Nodes(
        2, RANKS, folder=tmp_path, env=engine | BESIDE, forked=True, namespaces=True, more_hosts=2
    ) as nodes:
        pulling, serving = 2, 3
        # the weights of an update, 0.5 MB, then take 1 s
        nodes.limit_link(pulling, mbit_per_s=4)
        in_flight_runs.start(nodes, RELIEVED)
        with (
            running_agent(nodes, tmp_path / "pulling", engine, host=pulling) as one,
            running_agent(nodes, tmp_path / "serving", engine, host=serving) as other,
        ):
            log = tmp_path / "pulling" / "agent.log"
            until(lambda: "ready after" in log.read_text(), log.read_text)
            begin = nodes.link_bytes(pulling)
            until(lambda: nodes.link_bytes(pulling) > begin + 100_000, log.read_text)
            one.kill()
            pass_steps(nodes, 2)
            nodes.wait_for(0, "serves with", timeout_s=HANG_S)
            pass_steps(nodes, 1)
            nodes.cut_link(serving)
            in_flight_runs.end(nodes)
            assert other.poll() is None
        assert "overtaken" not in log.read_text()
    # the agent that was killed in its first pull never served
    check_relieved(tmp_path, engines={0, 1})


def check_relieved(folder: Path, engines: set[int]) -> None:
    """Every id was trained once, with rows of these engines by their places at a rank."""
    runs = in_flight_runs.results(folder, "relieved", sum(RANKS))
    assert engines == {one for run in runs for each in run["rounds"] for one in each["engines"]}
    rows = in_flight_runs.trained(runs)
    assert len(rows) == RELIEVED["prompts"] and set(rows.values()) == {in_flight_runs.GROUP}
