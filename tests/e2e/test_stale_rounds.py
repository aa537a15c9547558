"""Overlap on the real stack: two nodes, vLLM, ZeRO-3. The weights arrive beside generation, and a lie is noticed."""

import json
from pathlib import Path

import pytest
from waiting import HANG_S

from trl_multinode.testing.faults import FORKED, Faults
from trl_multinode.testing.nodes import Nodes

SCRIPT = Path(__file__).parent / "scripts" / "stale.py"
pytestmark = [pytest.mark.engine, pytest.mark.zero3, pytest.mark.two_node, pytest.mark.nightly]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stale")
    with Nodes(2, 1, folder=folder, env=Faults().lie_about_load(6).environment(FORKED), forked=True) as nodes:
        nodes.launch(SCRIPT, str(folder))
        codes = nodes.wait(timeout_s=HANG_S)
        logs = [nodes.rank_log(rank) for rank in range(2)]
        assert (folder / "result_rank1.json").exists(), logs[0][-3000:]
        results = [json.loads((folder / f"result_rank{rank}.json").read_text()) for rank in range(2)]
        return {"codes": codes, "logs": logs, "results": results}


def test_engines_hold_the_trainers_weights_after_rounds_that_were_made_ahead(run):
    for found in run["results"]:
        assert [lag for lag, _ in found["rounds"]] == [0, 1, 1, 1]
        assert found["before"] > 0.01, "the weights did not move enough for this test to mean anything"
        assert found["after"] < 1e-3


def test_the_alarm_measures_the_newest_weights_in_stale_rounds(run):
    for found in run["results"]:
        assert max(difference for _, difference in found["rounds"]) < 1e-3
        assert all(difference > 0.0 for _, difference in found["rounds"])  # it did look


def test_a_load_that_lies_is_noticed_in_a_stale_round(run):
    assert all(run["codes"])
    for log in run["logs"]:
        assert "NOBODY NOTICED" not in log
        assert "LogprobDivergenceError: node " in log and "with the weights of update 6 (step 5)" in log
