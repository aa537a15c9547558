"""For tests of `trl-multinode check`: the shipped configs, a valid one to break, and what a check says of a file."""

import os
from pathlib import Path

import pytest
import yaml

from trl_multinode.tools.check import Launch, Problem, check, report, rules_nodes

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "accelerate_configs"
# Valid for node 1 of two; the tests of the rules break one thing each.
TWO_NODES = {
    "distributed_type": "DEEPSPEED",
    "num_machines": 2,
    "num_processes": 14,
    "machine_rank": 1,
    "main_process_ip": "node0",
    "main_process_port": 29500,
    "deepspeed_config": {
        "zero_stage": 3,
        "deepspeed_multinode_launcher": "standard",
        "zero3_init_flag": True,
        "zero3_save_16bit_model": True,
    },
}


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    """No test depends on the GPUs that this shell hides, its scheduler, or ports that something else uses."""
    hiding = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    for name in (*hiding, *(name for name in os.environ if name.startswith(("PET_", "SLURM_")))):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(rules_nodes, "is_port_in_use", lambda port: False)
    monkeypatch.setattr(report, "is_port_in_use", lambda port: False)


@pytest.fixture
def write(tmp_path):
    """Writes `TWO_NODES` with changes, a `None` leaving the key out, and returns the path."""

    def write(**changes) -> str:
        path = tmp_path / "config.yaml"
        file = {key: value for key, value in {**TWO_NODES, **changes}.items() if value is not None}
        path.write_text(yaml.safe_dump(file))
        return str(path)

    return write


def launched(path: str | Path, *flags: str, **options) -> Launch:
    launch, problems = check(str(path), list(flags), **options)
    assert problems == [] and launch is not None
    return launch


def only_problem(path: str, *flags: str, **options) -> Problem:
    _, problems = check(path, list(flags), **options)
    assert len(problems) == 1, problems
    return problems[0]
