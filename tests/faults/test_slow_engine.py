"""An engine that is slow ends nothing, and the metrics name its node."""

import json
from pathlib import Path

import pytest
from waiting import HANG_S

from trl_multinode.testing.faults import FAKE, HOOK, Faults
from trl_multinode.testing.nodes import Nodes

SCRIPT = Path(__file__).parents[1] / "e2e" / "scripts" / "continued.py"
STALL_S, TOKEN_S, TOKENS, STEPS = 6.0, 1.0, 8, 1


@pytest.mark.zero3
@pytest.mark.two_node
def test_row_5_a_round_longer_than_the_stall_limit_ends_nothing_and_the_metrics_name_the_node(tmp_path, fault_seconds):
    job = {
        "name": "slow", "output": "slow", "prompts": 8, "max_steps": STEPS, "save_steps": STEPS,
        "per_device_train_batch_size": 4, "max_completion_length": TOKENS, "engine_stall_timeout": STALL_S,
    }  # fmt: skip
    slow = Faults().slow_tokens(TOKEN_S).environment(FAKE)
    with Nodes(2, 1, folder=tmp_path / "nodes", forked=True) as nodes:
        nodes.launch(SCRIPT, str(tmp_path), json.dumps([job]), env_of=lambda node: slow if node else {HOOK: FAKE})
        assert nodes.wait(HANG_S) == [0, 0], nodes.tails()
    state = json.loads((tmp_path / "slow" / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    logs = [entry for entry in state["log_history"] if "perf/generate_s" in entry]
    assert len(logs) == STEPS
    for entry in logs:
        assert entry["perf/generate_s/slowest_node"] == 1 and entry["perf/generate_s/max"] > STALL_S
    fault_seconds(max(entry["perf/generate_s/max"] for entry in logs))
