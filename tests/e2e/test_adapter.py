"""LoRA on two nodes under ZeRO-3 with rounds in flight and a reference model, sent in both ways."""

from pathlib import Path

import pytest
from in_flight_runs import SLOW, check_whole, end, results, start

from trl_multinode.testing.faults import FAKE
from trl_multinode.testing.models import tiny_qwen2
from trl_multinode.testing.nodes import Nodes

# `weights/test_adapter_sync.py` decides, and `test_features.py` that LoRA trains as TRL's
pytestmark = [pytest.mark.two_node, pytest.mark.zero3, pytest.mark.nightly]

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
