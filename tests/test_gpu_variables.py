"""Variables that hide GPUs, compared with the code of torch and of vLLM for ROCm that reads them on an AMD node."""

import ast
import importlib.util
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from refusals import refused
from transformers import HfArgumentParser

from trl_multinode.config import MultiNodeGRPOConfig
from trl_multinode.engine.environment import engine_environment
from trl_multinode.engine.settings import CPU_ENVIRONMENT
from trl_multinode.host.rank import RankContext
from trl_multinode.node_settings import NodeSettings
from trl_multinode.run.gpu_variables import (
    gpu_variable,
    only_visible,
    visible_devices,
)
from trl_multinode.run.topology import EngineDevices, Topology, assign_engines, idle_gpus

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
)
NODE = Topology(
    rank=7, world_size=14, local_rank=0, local_world_size=7, node=1, num_nodes=2, launched=True
)


@pytest.fixture
def amd(monkeypatch):
    """Make torch one that is built for ROCm, in a shell without any of the variables."""
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def vllm_reads(monkeypatch):
    """vLLM's own check of the variables at the import of its ROCm platform, which cannot be imported without a GPU."""
    spec = importlib.util.find_spec("vllm")
    path = Path(spec.submodule_search_locations[0]) / "platforms" / "rocm.py"
    functions = {
        node.name: node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    found = {"os": os}
    exec(ast.unparse(functions["_sync_hip_cuda_env_vars"]), found)  # noqa: S102 - vLLM's own source
    return found["_sync_hip_cuda_env_vars"]


def set_all(monkeypatch, environ: dict[str, str]) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({"HIP_VISIBLE_DEVICES": "4,5,6,7"}, ["4", "5", "6", "7"]),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, ["2", "3"]),
        ({"HIP_VISIBLE_DEVICES": "6, 7", "CUDA_VISIBLE_DEVICES": "6,7"}, ["6", "7"]),
        ({"HIP_VISIBLE_DEVICES": "2,3", "ROCR_VISIBLE_DEVICES": "4,5,6,7"}, ["2", "3"]),
        # indexes count within that list
        (
            {"ROCR_VISIBLE_DEVICES": "4,5,6,7"},
            ["0", "1", "2", "3"],
        ),
        ({}, ["0", "1", "2", "3"]),
    ],
)
def test_gpus_of_an_amd_node_are_those_that_torch_sees(amd, monkeypatch, environ, names):
    set_all(monkeypatch, environ)
    parsed = torch.cuda._parse_visible_devices()
    assert (
        visible_devices(os.environ, min(4, len(parsed)))
        == names
        == [str(gpu) for gpu in parsed[:4]]
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    "environ", [{}, {"HIP_VISIBLE_DEVICES": "6,7"}, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}]
)
def test_vllm_on_rocm_accepts_the_variables_of_an_engine(
    amd, monkeypatch, vllm_reads, environ, tmp_path
):
    kept = {
        "ROCR_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
        "GPU_DEVICE_ORDINAL": "0,1",
        "HSA_OVERRIDE_GFX_VERSION": "9.4.2",
    }
    set_all(monkeypatch, environ | kept)
    names = visible_devices(os.environ, 2)
    found = engine_environment(only_visible((names[-1],)), tmp_path)
    assert {name: found[name] for name in kept} == kept
    assert found["HIP_VISIBLE_DEVICES"] == found["CUDA_VISIBLE_DEVICES"] == names[-1]
    monkeypatch.setattr(os, "environ", found)
    vllm_reads()
    # the control: the rank's own, kept
    monkeypatch.setattr(os, "environ", {**found, "HIP_VISIBLE_DEVICES": "3"})
    with pytest.raises(ValueError, match="Inconsistent GPU visibility"):
        vllm_reads()


def test_an_engine_on_a_cpu_sees_no_gpu_of_either_make():
    assert CPU_ENVIRONMENT["CUDA_VISIBLE_DEVICES"] == CPU_ENVIRONMENT["HIP_VISIBLE_DEVICES"] == ""


def test_an_engine_gets_a_gpu_that_hip_shows_although_torch_counts_more(amd, monkeypatch):
    set_all(
        monkeypatch, {"ROCR_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    )
    assert len(torch.cuda._parse_visible_devices()) == 8
    topology = Topology(0, 3, 0, 3, 0, 1, launched=True)
    assert assign_engines(topology, 8, None, None, 1).per_engine == (("7",),)


def test_a_torch_for_cuda_ignores_the_variables_of_amd(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    environ = {
        "HIP_VISIBLE_DEVICES": "0",
        "ROCR_VISIBLE_DEVICES": "0",
        "CUDA_VISIBLE_DEVICES": "GPU-ab,MIG-cd",
    }
    assert gpu_variable(environ) == "CUDA_VISIBLE_DEVICES"
    assert visible_devices(environ, 2) == ["GPU-ab", "MIG-cd"]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["xpu", "npu"])
def test_devices_of_other_makers_are_refused_instead_of_engines_on_the_cpu(
    monkeypatch, tmp_path, kind
):
    device = SimpleNamespace(type=kind)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: device
    )
    args = MultiNodeGRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    rank = RankContext.__new__(RankContext)
    rank.args, rank.topology, rank.settings = args, NODE, NodeSettings.of(args)
    assert rank._check().per_engine == ((),)  # the control: the user has asked for the CPU
    args.use_cpu = False
    with refused("vllm_mode", "vllm_mode='server'", got=kind, node=1):
        rank._check()


GIVEN = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE", "NVIDIA_VISIBLE_DEVICES")


@pytest.fixture
def no_gpu(monkeypatch):
    """Hide the GPUs of this machine, and the variables of a job."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    for name in (*VARIABLES, *GIVEN):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("half", [{}, {"bf16": True}, {"fp16": True}, {"bf16_full_eval": True}])
def test_half_precision_without_a_visible_gpu_is_refused_with_the_variables_that_are_set(
    no_gpu, monkeypatch, tmp_path, half
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    given = {"CUDA_VISIBLE_DEVICES": "", "SLURM_GPUS_ON_NODE": "8"}
    with refused("use_cpu", "--gpus-per-node", got=given):
        MultiNodeGRPOConfig(str(tmp_path), **half)


def test_a_config_without_a_visible_gpu_works_on_the_cpu_and_in_full_precision(no_gpu, tmp_path):
    assert MultiNodeGRPOConfig(str(tmp_path), use_cpu=True, report_to="none").bf16
    assert not MultiNodeGRPOConfig(str(tmp_path), bf16=False, report_to="none").use_cpu
    assert HfArgumentParser(MultiNodeGRPOConfig).format_help()


# ---- idle GPUs


@pytest.mark.parametrize(
    ("ranks", "chosen", "count", "idle"),
    [
        (7, [0], None, ("7",)),
        (6, None, 1, ("7",)),
        (7, None, None, ()),
        (4, [6], None, ("4", "5", "7")),
        (7, [7], None, ()),
    ],
)
def test_gpus_without_a_rank_and_without_an_engine_are_idle(ranks, chosen, count, idle):
    topology = Topology(0, ranks, 0, ranks, 0, 1, launched=True)
    assert assign_engines(topology, 8, chosen, count, 1, {}).idle == idle


def test_idle_gpus_are_reported_once_per_node_with_the_cure(amd, monkeypatch, tmp_path, caplog):
    """A node of eight GPUs, whose engine shares the first one; only the checks before an engine starts run."""
    devices = EngineDevices((("0",),), shared_with_training=True, sender="0", idle=("7",))
    monkeypatch.setattr(RankContext, "_check", lambda self: devices)
    monkeypatch.setattr("trl_multinode.host.rank.machine_of", lambda devices: pytest.fail("stop"))
    with caplog.at_level(logging.WARNING), pytest.raises(pytest.fail.Exception, match="stop"):
        RankContext(MultiNodeGRPOConfig(str(tmp_path), use_cpu=True, bf16=False))
    (line,) = [record.message for record in caplog.records if "idle" in record.message]
    assert (
        line == f"node 0: {idle_gpus(devices)}"
        and "GPU 7 would be idle" in line
        and "(got 1 idle" in line
    )
