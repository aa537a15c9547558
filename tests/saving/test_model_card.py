"""What the model card says of the machines."""

import pytest
import torch
from places import topology_on

from trl_multinode.run.topology import EngineDevices, NodeShape
from trl_multinode.run.versions import local_versions
from trl_multinode.saving.model_card import add_section, run_section

pytestmark = pytest.mark.nightly  # a page for readers; e2e/test_pushes reads a pushed one
LOGS = [
    {"step": 1, "perf/tokens_per_s": 5.0},  # the warm-up
    {"step": 1, "eval_loss": 1.0},
    {"step": 3, "perf/tokens_per_s": 100.0},
    {"step": 4, "perf/tokens_per_s": 160.0},
    {"step": 5, "perf/tokens_per_s": 180.0},
    {"step": 5, "train_runtime": 9.0},
]


def rows(section: str) -> dict[str, str]:
    lines = [
        line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")
    ]
    return {line[0]: line[1] for line in lines if len(line) == 2}


def test_a_run_on_gpus_counts_training_and_reserved_ones(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    devices = EngineDevices((("6",), ("7",)), shared_with_training=False, sender="0")
    table = rows(run_section(topology_on([NodeShape(7, 2, 2)] * 2), devices, LOGS))
    assert table["Training GPUs"] == "14 (7 per node, H100)"
    assert table["Reserved GPUs"] == "4 (2 per node)"
    assert table["Throughput"].startswith("160.0 tokens/s, 8.9 per device on 18 devices")
    shared = EngineDevices((("0",),), shared_with_training=True, sender="0")
    nodes = topology_on([NodeShape(7, 1, 0)] * 2)
    table = rows(run_section(nodes, shared, LOGS[:2]))
    assert table["Reserved GPUs"] == "0 (0 per node; engines use training GPUs)"
    assert table["Throughput"].startswith("5.0 tokens/s") and "on 14 devices" in table["Throughput"]
    assert rows(run_section(nodes, shared, []))["Throughput"].startswith("not logged yet")
    assert table["TRL"] == local_versions()["trl"]


def test_nodes_that_differ_are_listed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    devices = EngineDevices((("7",),), shared_with_training=False, sender="0")
    nodes = topology_on([NodeShape(7, 1, 1), *[NodeShape(8, 0, 0)] * 3])
    table = rows(run_section(nodes, devices, LOGS))
    assert table["Training GPUs"] == "31 (7, 3 x 8 per node, H100)"
    assert table["Reserved GPUs"] == "1 (1, 3 x 0 per node)"
    assert table["vLLM engines"] == "1 (1, 3 x 0 per node)"


@pytest.mark.parametrize("after", ["\n## Citations\n\nCite TRL as: ...\n", ""])
def test_the_section_stands_before_the_citations_if_there_are_any(tmp_path, after):
    card = tmp_path / "README.md"
    card.write_text("---\ntags: []\n---\n\n# Model\n" + after)
    add_section(card, "## Machines\n")
    assert card.read_text() == "---\ntags: []\n---\n\n# Model\n\n## Machines\n" + after
