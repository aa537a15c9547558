"""LoRA through the real trainer under ZeRO-3: the base travels once, then the adapter alone. On the fake engine."""

import json

import pytest
from waiting import HANG_S

from trl_multinode.testing.engines import FAKE
from trl_multinode.testing.faults import Faults
from trl_multinode.testing.launch_files import ZERO3
from trl_multinode.testing.nodes import Nodes

pytestmark = [pytest.mark.two_node, pytest.mark.zero3, pytest.mark.nightly]


def test_an_adapter_that_did_not_arrive_stops_the_run(tmp_path, request):
    script = request.path.parent / "scripts" / "adapter.py"
    env = Faults().lie_about_load(3).environment(FAKE)
    with Nodes(1, 2, folder=tmp_path, env=env, deepspeed=ZERO3, forked=True) as nodes:
        nodes.launch(script, str(tmp_path), "adapter")
        assert nodes.wait(timeout_s=HANG_S) != [0]
        assert "LogprobDivergenceError" in nodes.rank_log(0)


def test_adapter_and_merged_syncs_train_alike_and_the_adapters_bytes_are_small(tmp_path, request):
    script = request.path.parent / "scripts" / "adapter.py"
    found, env = {}, {"TRL_MULTINODE_ENGINE_MODULE": FAKE}
    for lora_sync in ("auto", "merged"):
        folder = tmp_path / lora_sync
        with Nodes(1, 2, folder=folder, env=env, deepspeed=ZERO3, forked=True) as nodes:
            nodes.launch(script, str(folder), lora_sync)
            assert nodes.wait(timeout_s=HANG_S) == [0], nodes.rank_log(0)[-3000:]
        found[lora_sync] = json.loads((folder / "result_rank0.json").read_text())
    adapter, merged = found["auto"], found["merged"]
    for run in (adapter, merged):
        assert run["world"] == 2 and run["sharded"] and run["version"] == 3
        assert run["difference"] < 1e-3  # the monitor's, of the last step
    assert adapter["mib"][0] == pytest.approx(adapter["model_mib"] + adapter["adapter_mib"])
    assert adapter["mib"][1:] == pytest.approx([adapter["adapter_mib"]] * 2)
    assert merged["mib"] == pytest.approx([merged["model_mib"]] * 3)
    assert adapter["grad_norms"] == pytest.approx(merged["grad_norms"], rel=1e-3)
    assert adapter["grad_norms"][0] > 0
