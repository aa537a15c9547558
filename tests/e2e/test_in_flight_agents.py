"""Tools and environments with rounds in flight on two nodes under ZeRO-3: turns continue."""

from collections import Counter
from pathlib import Path

import pytest
from in_flight_runs import GROUP, SLOW, WORLD, end, losses_of, results, start, trained, versions

from trl_multinode.testing.faults import FAKE
from trl_multinode.testing.nodes import Nodes

# `rollouts/test_agents.py` and `faults/test_tools.py` decide
pytestmark = [pytest.mark.zero3, pytest.mark.two_node, pytest.mark.nightly]

# An eighth of the first turns calls a tool; then a turn goes on, because `min_tokens` keeps it from ending at once.
# The fake engine computes the long prompt for every token, so there are few rows
TOOLS = {
    "name": "tools", "output": "tools", "prompts": 24, "num_train_epochs": 1, "tools": True, "min_tokens": 2,
    "per_device_train_batch_size": 4, "mean": 40, "max_completion_length": 300, "max_tool_calling_iterations": 2,
    "learning_rate": 1e-5,
}  # fmt: skip
# Whole rollouts one round ahead, and engines that are empty when they get new weights
AGENTS = TOOLS | {
    "name": "agents", "output": "agents", "tools": False, "environment": True, "weight_update": "drain",
    "open_rounds": 1, "max_staleness": 1, "prompts": 16, "mean": 1, "min_tokens": 0, "max_tool_calling_iterations": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    with Nodes(2, 2, folder=folder, env=SLOW.environment(FAKE), forked=True) as nodes:
        start(nodes, TOOLS, AGENTS)
        end(nodes)
    return folder


def test_tools_continue_from_first_turns_that_saw_several_updates(folder):
    runs = results(folder, "tools")
    assert sorted(Counter(prompt for run in runs for one in run["rounds"] for prompt in one["prompts"]).values()) == (
        [GROUP] * TOOLS["prompts"]
    )
    assert set(Counter(losses_of(runs)).values()) == {GROUP} and [run["rows_left"] for run in runs] == [0] * WORLD
    assert any(len(row) > 1 for row in versions(runs))
    assert max(entry.get("tools/call_frequency", 0.0) for entry in runs[0]["log"]) > 0
    rows = [pair for run in runs for one in run["rounds"] for pair in zip(one["made"], one["rows"], strict=True)]
    assert all(row[: len(made)] == made for made, row in rows)  # later turns are appended to the first
    assert any(len(row) > len(made) for made, row in rows)


@pytest.mark.parametrize("job", [TOOLS, AGENTS], ids=["in flight", "drain"])
def test_whole_rollouts_end_at_different_turns_on_every_rank(folder, job):
    runs = results(folder, job["name"])
    every = Counter({f"{i} + {i + 1} =" + " Add!" * (job is AGENTS): GROUP for i in range(job["prompts"])})
    assert trained(runs) == every and [run["rows_left"] for run in runs] == [0] * WORLD
    rounds = zip(*(run["rounds"] for run in runs), strict=True)
    assert any(len({max(one["turns"]) for one in ranks}) > 1 for ranks in rounds)
    turns = {count for run in runs for one in run["rounds"] for count in one["turns"]}
    assert turns >= ({1, 3, 5, 7} if job is AGENTS else {1, 3})
    assert max(one["lag"][0] for run in runs for one in run["rounds"]) > 0
