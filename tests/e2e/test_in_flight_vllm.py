"""vLLM swaps weights under rows of a whole run, on two nodes under ZeRO-3."""

import shutil
from math import isfinite
from pathlib import Path

import pytest
from in_flight_runs import check_whole, end, losses, results, start, versions

from trl_multinode.testing.faults import FORKED, Faults
from trl_multinode.testing.nodes import Nodes

# Swaps under vLLM's rows decide in `engine/`, in-flight rounds of whole runs in `test_in_flight.py`
pytestmark = [pytest.mark.engine, pytest.mark.zero3, pytest.mark.two_node, pytest.mark.nightly]

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
            jobs = [job for job in jobs if not any(len(row) > 1 for row in versions(results(folder, job["name"], 2)))]
            if not jobs:
                break
            for job in jobs:
                shutil.rmtree(folder / job["output"])
    return folder


@pytest.mark.parametrize("job", [REAL, REAL_ADAPTER], ids=["full", "adapter-tp2"])
def test_vllm_swaps_weights_under_rows_of_a_whole_run(real, job):
    """The log-probs of the rows' newest weights are the trainer's in every round."""
    runs = results(real, job["name"], world=2)
    check_whole(runs, job["prompts"])
    for run in runs:
        assert run["compared"][0] == [] and 0.0 < run["spot_check"] < 1e-3
        assert all(map(isfinite, losses(run)))
