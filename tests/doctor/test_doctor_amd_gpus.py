"""GPUs of an AMD node, with stand-ins for the files of the kernel's driver."""

import os

import pytest
import torch
from doctoring import case, results

from trl_multinode.tools.doctor import gpu_list
from trl_multinode.tools.doctor.gpu_list import list_gpus
from trl_multinode.tools.doctor.gpus import count_gpus, examine_gpus

# The rules for free and visible GPUs decide in test_doctor_gpus.py, with NVIDIA's tool
pytestmark = pytest.mark.nightly


@pytest.fixture
def amd(tmp_path, monkeypatch):
    """Install a stand-in for the files of AMD's driver: two CPU nodes, and GPUs by their used GiB (`None`: hidden)."""

    def install(used: list[int | None], name: str = "AMD Instinct MI300X OAM\n") -> None:
        files = {f"class/kfd/kfd/topology/nodes/{cpu}/gpu_id": "0\n" for cpu in range(2)}
        for index, gib in enumerate(used):
            node, device = (
                f"class/kfd/kfd/topology/nodes/{index + 2}",
                f"class/drm/renderD{128 + index}/device",
            )
            if gib is None:
                continue
            properties = (
                f"simd_count 1216\ndrm_render_minor {128 + index}\nunique_id {0xABC000 + index}\n"
            )
            files |= {
                f"{node}/gpu_id": f"{4000 + index}\n",
                f"{node}/properties": f"cpu_cores_count 0\n{properties}gfx_target_version 90402\n",
                f"{device}/mem_info_vram_total": f"{192 << 30}\n",
                f"{device}/mem_info_vram_used": f"{gib << 30}\n",
                f"{device}/product_name": name,
            }
        files[f"class/kfd/kfd/proc/{os.getpid()}/vram_4001"] = f"{38 << 30}\n"
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)

    monkeypatch.setattr(gpu_list, "SYS", tmp_path)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setenv("PATH", str(tmp_path))
    list_gpus.cache_clear()
    yield install
    list_gpus.cache_clear()


def test_gpus_of_an_amd_node_are_read_from_the_files_of_the_driver(amd):
    amd([0, 40] + [0] * 6)
    facts, (finding,) = results(examine_gpus, case())
    assert (
        facts["GPUs"] == "8 x AMD Instinct MI300X OAM (192 GiB)" and facts["free GPUs"] == "7 of 8"
    )
    assert facts["driver"] == "amdgpu of the kernel"
    parts = ["GPU 1 ", "40 GiB of 192 GiB", f"pid {os.getpid()} (`", "38 GiB"]
    assert [part for part in parts if part not in finding.what] == []


def test_an_amd_gpu_that_a_container_may_not_use_does_not_count(amd):
    amd([0, None, 0, 0])
    assert [gpu.uuid for gpu in list_gpus()] == [
        f"GPU-{0xABC000 + index:016x}" for index in (0, 2, 3)
    ]
    assert [gpu.index for gpu in list_gpus()] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("environ", "seen"),
    [
        ({"HIP_VISIBLE_DEVICES": "0,1,2"}, 3),
        ({"HIP_VISIBLE_DEVICES": "0,1,2", "CUDA_VISIBLE_DEVICES": "0"}, 3),
        ({"ROCR_VISIBLE_DEVICES": "4,5,GPU-0000000000abc006"}, 3),
        ({"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "1"}, 1),
        # it counts within the first list
        (
            {"ROCR_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "4,5"},
            0,
        ),
    ],
)
def test_visible_amd_gpus_are_those_that_hip_shows(amd, environ, seen):
    amd([0] * 8)
    assert count_gpus(case(environ)) == seen
    _, (finding,) = results(examine_gpus, case(environ))
    hiding = next(
        name
        for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
        if name in environ
    )
    assert (
        f"{seen} of its 8 GPUs" in finding.what
        and f"{hiding} (`{environ[hiding]}`)" in finding.cure
    )
