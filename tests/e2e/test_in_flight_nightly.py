"""More rounds in flight on two nodes under ZeRO-3: adapters beside a reference model, tools and environments, vLLM."""

import shutil
from collections import Counter
from math import isfinite
from pathlib import Path

import pytest
from in_flight_runs import (
    GROUP,
    SLOW,
    WORLD,
    check_whole,
    end,
    losses,
    losses_of,
    results,
    start,
    trained,
    versions,
)

from multinode_kit.faults import FAKE, FORKED, Faults
from multinode_kit.models import tiny_qwen2
from multinode_kit.nodes import Nodes

# `weights/test_adapter_sync.py`, `rollouts/test_agents.py`, `engine/` and `test_in_flight.py` decide
pytestmark = [pytest.mark.zero3, pytest.mark.two_node, pytest.mark.nightly]

# ---- adapters

# Two ranks: six rounds of 4 prompts; the reference model is the base without its adapter
ADAPTER = {
    "name": "adapter", "output": "adapter", "prompts": 24, "num_train_epochs": 1, "compare": 3, "lora": True,
    "lora_sync": "adapter", "learning_rate": 0.1, "beta": 0.05, "mean": 24,
}  # fmt: skip
MERGED = ADAPTER | {"name": "merged", "output": "merged", "lora_sync": "merged"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    tiny_qwen2(seed=1).save_pretrained(folder / "reference")
    with Nodes(2, 1, folder=folder, env=SLOW.environment(FAKE), forked=True) as nodes:
        start(nodes, ADAPTER, MERGED)
        end(nodes)
    return folder


@pytest.mark.parametrize("name", ["adapter", "merged"])
def test_an_adapter_beside_a_reference_model(pair, name):
    runs = results(pair, name, world=2)
    check_whole(runs, ADAPTER["prompts"])
    for run in runs:
        different, (expected, loss), names = run["compared"]
        assert different == [] and expected == loss and names > 7  # with the reference's log-probs
        assert run["spot_check"] < 1e-3
    assert any(run["spot_check"] > 0.0 for run in runs)
    log = [entry for entry in runs[0]["log"] if "loss" in entry]
    assert [entry["kl"] > 0 for entry in log] == [False, *[True] * 5]
    sent = [entry["sync/mib"] for entry in log]
    assert (max(sent[1:]) < 0.1 * sent[0]) == (name == "adapter")


# ---- tools and environments

# An eighth of the first turns calls a tool; then a turn goes on, because `min_tokens` keeps it from ending at once.
# The fake engine computes the long prompt for every token, so there are few rows
TOOLS = {
    "name": "tools", "output": "tools", "prompts": 24, "num_train_epochs": 1, "tools": True, "min_tokens": 2,
    "per_device_train_batch_size": 4, "mean": 40, "max_completion_length": 300, "max_tool_calling_iterations": 2,
    "learning_rate": 1e-5,
}  # fmt: skip
# Whole rollouts one round ahead, and engines that are empty when they get new weights
AGENTS = TOOLS | {
    "name": "agents", "output": "agents", "tools": False, "environment": True,
    "max_staleness": 1, "prompts": 16, "mean": 1, "min_tokens": 0, "max_tool_calling_iterations": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def agents(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    with Nodes(2, 2, folder=folder, env=SLOW.environment(FAKE), forked=True) as nodes:
        start(nodes, TOOLS, AGENTS)
        end(nodes)
    return folder


def test_tools_continue_from_first_turns_that_saw_several_updates(agents):
    runs = results(agents, "tools")
    assert sorted(
        Counter(
            prompt for run in runs for one in run["rounds"] for prompt in one["prompts"]
        ).values()
    ) == ([GROUP] * TOOLS["prompts"])
    assert (
        set(Counter(losses_of(runs)).values()) == {GROUP}
        and [run["rows_left"] for run in runs] == [0] * WORLD
    )
    assert any(len(row) > 1 for row in versions(runs))
    assert max(entry.get("tools/call_frequency", 0.0) for entry in runs[0]["log"]) > 0
    rows = [
        pair
        for run in runs
        for one in run["rounds"]
        for pair in zip(one["made"], one["rows"], strict=True)
    ]
    # later turns are appended to the first
    assert all(row[: len(made)] == made for made, row in rows)
    assert any(len(row) > len(made) for made, row in rows)


@pytest.mark.parametrize("job", [TOOLS, AGENTS], ids=["in flight", "drain"])
def test_whole_rollouts_end_at_different_turns_on_every_rank(agents, job):
    runs = results(agents, job["name"])
    every = Counter(
        {f"{i} + {i + 1} =" + " Add!" * (job is AGENTS): GROUP for i in range(job["prompts"])}
    )
    assert trained(runs) == every and [run["rows_left"] for run in runs] == [0] * WORLD
    rounds = zip(*(run["rounds"] for run in runs), strict=True)
    assert any(len({max(one["turns"]) for one in ranks}) > 1 for ranks in rounds)
    turns = {count for run in runs for one in run["rounds"] for count in one["turns"]}
    assert turns >= ({1, 3, 5, 7} if job is AGENTS else {1, 3})
    assert max(one["lag"][0] for run in runs for one in run["rounds"]) > 0


# ---- vLLM

# Six rounds of 4 prompts; vLLM makes thousands of tokens a second, so every row must be long to see a swap
REAL = {
    "name": "real", "output": "real", "prompts": 24, "num_train_epochs": 1, "compare": 3, "ignore_eos": True,
    "max_completion_length": 700,
}  # fmt: skip
# Two workers on a CPU make hundreds of tokens a second
REAL_ADAPTER = REAL | {
    "name": "real_adapter", "output": "real_adapter", "lora": True, "lora_sync": "adapter", "learning_rate": 0.1,
    "vllm_tensor_parallel_size": 2, "prompts": 16, "max_completion_length": 300,
}  # fmt: skip


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> Path:
    """vLLM and ZeRO-3 on two nodes of one rank.

    On a busy machine, vLLM may end all rows within the first step, so that none sees a swap: then the job runs again.
    """
    folder, jobs = tmp_path_factory.mktemp("real"), [REAL, REAL_ADAPTER]
    with Nodes(2, 1, folder=folder, env=Faults().environment(FORKED), forked=True) as nodes:
        for _ in range(3):
            start(nodes, *jobs)
            end(nodes)
            jobs = [
                job
                for job in jobs
                if not any(len(row) > 1 for row in versions(results(folder, job["name"], 2)))
            ]
            if not jobs:
                break
            for job in jobs:
                shutil.rmtree(folder / job["output"])
    return folder


@pytest.mark.engine
@pytest.mark.parametrize("job", [REAL, REAL_ADAPTER], ids=["full", "adapter-tp2"])
def test_vllm_swaps_weights_under_rows_of_a_whole_run(real, job):
    """The log-probs of the rows' newest weights are the trainer's in every round."""
    runs = results(real, job["name"], world=2)
    check_whole(runs, job["prompts"])
    for run in runs:
        assert run["compared"][0] == [] and 0.0 < run["spot_check"] < 1e-3
        assert all(map(isfinite, losses(run)))
