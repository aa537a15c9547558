"""A pool of agents that join, leave in order and die: the losses are those of a run whose engines never changed."""

import re
import subprocess
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import in_flight_runs
import pytest
from test_agents_join import pass_steps
from waiting import HANG_S, until

from multinode_kit.agents import SECRET_OF_TESTS, running_agent
from multinode_kit.engines import FAKE, TREE
from multinode_kit.faults import HOOK, Faults
from multinode_kit.nodes import Nodes

pytestmark = [pytest.mark.zero3, pytest.mark.two_node]
RANKS = [2, 1]
OWN = {"ENGINES_OF_NODES": "11", **SECRET_OF_TESTS}
POOL = {"ENGINES_OF_NODES": "00", "REMOTE_ENGINES": "2", **SECRET_OF_TESTS}
SLOW = Faults().slow_tokens(0.005).environment(FAKE)
# three ranks x 8 rows are 6 prompts a step
JOB = {
    "prompts": 54,
    "num_train_epochs": 1,
    "max_completion_length": 32,
    "ignore_eos": True,
    "engine_kwargs": {"max_num_seqs": 8},
}
SYNCHRONOUS = JOB | {"name": "sync", "output": "sync", "max_staleness": 0}
IN_FLIGHT = JOB | {"name": "flight", "output": "flight"}
# what is equal of a step, whatever its seconds are
EQUAL = ("loss", "reward", "reward_std", "grad_norm", "entropy", "completions/mean_length")


def run_on_own_engines(folder: Path, job: dict, engine: dict[str, str]) -> list[dict]:
    with Nodes(2, RANKS, folder=folder, env=engine | OWN, forked=True) as nodes:
        in_flight_runs.start(nodes, job)
        in_flight_runs.end(nodes)
    return in_flight_runs.results(folder, job["name"], sum(RANKS))


def run_on_a_pool(folder: Path, job: dict, engine: dict[str, str]) -> list[dict]:
    """Run a job on two of four agents: the first that serves leaves in order, the second one is killed.

    The run waits for the others, because it needs two engines.
    """
    with (
        Nodes(2, RANKS, folder=folder, env=engine | POOL, forked=True) as nodes,
        ExitStack() as ends,
    ):
        in_flight_runs.start(nodes, job)
        agents: list[subprocess.Popen] = []

        def start() -> subprocess.Popen:
            name = folder / f"agent{len(agents)}"
            agents.append(ends.enter_context(running_agent(nodes, name, engine)))
            return agents[-1]

        def wait_until_served_by(count: int) -> list[str]:
            """Wait until so many agents have joined, and return their numbers in that order."""
            serving = partial(re.findall, r"number (\d+) serves with")
            until(lambda: len(serving(nodes.rank_log(0))) >= count, nodes.tails)
            return serving(nodes.rank_log(0))

        one, other = start(), start()
        nodes.wait_for(0, "step 2/", timeout_s=HANG_S)
        number = wait_until_served_by(2)[0]
        if f"node {number} of the run" not in (folder / "agent0" / "agent.log").read_text():
            one, other = other, one
        one.terminate()
        assert one.wait(HANG_S) == 0
        start()
        wait_until_served_by(3)
        pass_steps(nodes, 1)
        other.kill()
        start()
        wait_until_served_by(4)
        in_flight_runs.end(nodes)
        assert [agent.poll() for agent in agents[2:]] == [None, None]
    return in_flight_runs.results(folder, job["name"], sum(RANKS))


def steps_of(run: dict) -> list[list]:
    return [[entry.get(name) for name in EQUAL] for entry in run["log"] if "loss" in entry]


def check_equal(pool: list[dict], own: list[dict]) -> None:
    """Rows, rewards and losses are bit by bit equal."""
    for rank, expected in zip(pool, own, strict=True):
        assert [one["rows"] for one in rank["rounds"]] == [
            one["rows"] for one in expected["rounds"]
        ]
        assert steps_of(rank) == steps_of(expected)
    assert steps_of(own[0]) and None not in steps_of(own[0])[0]


@pytest.mark.fault("agent_leaves")
def test_rows_rewards_and_losses_are_those_of_engines_that_never_changed(tmp_path):
    own = run_on_own_engines(tmp_path / "own", SYNCHRONOUS, SLOW)
    check_equal(run_on_a_pool(tmp_path / "pool", SYNCHRONOUS, SLOW), own)


@pytest.mark.nightly
@pytest.mark.engine
def test_they_are_also_with_vllm(tmp_path):
    """In float32, where a row does not depend on the others of its batch."""
    job, engine = SYNCHRONOUS | {"max_completion_length": 256}, {HOOK: TREE}
    own = run_on_own_engines(tmp_path / "own", job, engine)
    check_equal(run_on_a_pool(tmp_path / "pool", job, engine), own)


@pytest.mark.fault("agent_leaves")
@pytest.mark.fault("agent_lost")
@pytest.mark.nightly
def test_in_flight_every_id_is_trained_once(tmp_path):
    runs = run_on_a_pool(tmp_path, IN_FLIGHT, SLOW)
    every = Counter({f"{i} + {i + 1} =": in_flight_runs.GROUP for i in range(JOB["prompts"])})
    assert in_flight_runs.trained(runs) == every
    assert Counter(in_flight_runs.losses_of(runs)) == every
