"""GPUs, with a stand-in for nvidia-smi that prints lines as the real one does."""

import os
import stat

import pytest
from doctoring import case, results

from trl_multinode.tools.check.launch import Engines
from trl_multinode.tools.doctor.facts import Fact
from trl_multinode.tools.doctor.gpu_list import list_gpus
from trl_multinode.tools.doctor.gpus import count_gpus, examine_gpus

TOOL = """#!/bin/sh
case "$1" in
--query-gpu=*) cat {folder}/gpus; exit {code};;
--query-compute-apps=*) cat {folder}/apps;;
esac
"""


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Install a stand-in: used MiB of each GPU, and lines of processes."""

    def install(used: list[int], apps: str = "", code: int = 0, said: str | None = None) -> None:
        row = "{0}, GPU-{0}aaaaaaa-1111-2222, NVIDIA H100 80GB HBM3, 81559, {1}, 550.54.15"
        lines = [row.format(index, mib) for index, mib in enumerate(used)]
        (tmp_path / "gpus").write_text(said or "\n".join(lines) + "\n")
        (tmp_path / "apps").write_text(apps)
        path = tmp_path / "nvidia-smi"
        path.write_text(TOOL.format(folder=tmp_path, code=code))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    list_gpus.cache_clear()
    yield install
    list_gpus.cache_clear()


def test_free_gpus_are_counted_and_described(tool):
    tool([4] * 8)
    facts, findings = results(examine_gpus, case())
    assert facts == {
        "GPUs": "8 x NVIDIA H100 80GB HBM3 (79.6 GiB)",
        "driver": "550.54.15",
        "free GPUs": "8 of 8",
    }
    assert findings == [] and count_gpus(case()) == 8


def test_the_process_that_holds_a_gpu_is_named_with_its_memory(tool):
    tool([4] * 7 + [2000])
    _, (finding,) = results(examine_gpus, case())
    assert "GPU 7 " in finding.what and "not visible" in finding.what
    list_gpus.cache_clear()
    tool([4, 40_000] + [4] * 6, f"GPU-1aaaaaaa-1111-2222, {os.getpid()}, 39000\n")
    facts, (finding,) = results(examine_gpus, case())
    assert facts["free GPUs"] == "7 of 8" and finding.severity == "error"
    parts = ["GPU 1 ", "39.1 GiB of 79.6 GiB", f"pid {os.getpid()} (`", "38.1 GiB"]
    assert [part for part in parts if part not in finding.what] == []


def test_too_few_visible_gpus_are_an_error_with_the_variable(tool):
    tool([4] * 8)
    facts, (finding,) = results(examine_gpus, case({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6"}))
    assert facts["free GPUs"] == "7 of 7"
    assert "7 of its 8 GPUs (expected 8 or more" in finding.what
    assert "CUDA_VISIBLE_DEVICES (`0,1,2,3,4,5,6`)" in finding.cure
    shared = case({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6"}, engines=Engines(vllm_devices=[6]))
    assert results(examine_gpus, shared)[1] == []


def test_a_node_with_fewer_gpus_than_ranks_gets_the_number_that_fits(tool):
    tool([4] * 4)
    _, (finding,) = results(examine_gpus, case())
    assert "`num_processes: 6`" in finding.cure
    facts = [one for one in examine_gpus(case(table=(7, 3))) if isinstance(one, Fact)]
    assert next(one for one in facts if one.name == "GPUs").nodes == "warning"
    _, (finding,) = results(examine_gpus, case(table=(7, 3)))
    assert "`--ranks` with 3 for node 0" in finding.cure


@pytest.mark.parametrize(
    ("listed", "seen"), [("3,GPU-5aaa", 2), ("9,0,1", 0), ("", 0), ("0,x,1", 1), ("MIG-7,0", 2)]
)
def test_visible_gpus_are_those_that_cuda_shows(tool, listed, seen):
    """CUDA ignores the first index that does not exist, and all after it."""
    tool([4] * 8)
    assert count_gpus(case({"CUDA_VISIBLE_DEVICES": listed})) == seen


def test_a_driver_that_does_not_answer_is_named(tool):
    tool(
        [],
        code=9,
        said="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
    )
    facts, (finding,) = results(examine_gpus, case())
    assert (
        facts["GPUs"] == "unknown" and "couldn't communicate with the NVIDIA driver" in finding.what
    )
    assert finding.severity == "error"


def test_a_machine_without_the_tool_is_an_error_for_a_launch_on_gpus_only(tmp_path, monkeypatch):
    list_gpus.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    _, (finding,) = results(examine_gpus, case())
    assert "`nvidia-smi`" in finding.what
    facts, findings = results(examine_gpus, case(gpus=0))
    assert facts["GPUs"].startswith("none needed") and findings == []
