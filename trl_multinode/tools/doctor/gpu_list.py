"""GPUs of this machine with their memory and processes: from nvidia-smi, or from the files of AMD's kernel driver.

AMD's tools (rocm-smi, amd-smi) are missing in many containers and change their output, so the driver's own files are
read: they need no tool, and are the same in containers. A GPU that a container may not use cannot be read there.
"""

import csv
import shutil
import subprocess
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

NVIDIA_TOOL = "nvidia-smi"
TOOL_LIMIT_S = 30.0  # it takes 1 to 2 s without the persistence daemon, more on a node of 8 GPUs
DEVICE_KEYS = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version")
PROCESS_KEYS = ("gpu_uuid", "pid", "used_memory")
SYS = Path("/sys")


class NoTool(Exception):
    """The GPUs cannot be listed; the message has the reason."""


@dataclass(frozen=True)
class Gpu:
    """One GPU of this machine."""

    index: str
    uuid: str
    name: str
    total: int  # bytes
    used: int  # bytes
    driver: str
    pids: dict[int, int] = field(default_factory=dict)  # process -> bytes


@cache
def list_gpus() -> list[Gpu]:
    """Return all GPUs of this machine with the processes that hold memory on them, as they are at the first call.

    Raises:
        [`NoTool`]: if neither driver shows its GPUs.
    """
    if shutil.which(NVIDIA_TOOL) is None and (found := amd_gpus()):
        return found
    return nvidia_gpus()


def nvidia_gpus() -> list[Gpu]:
    """Return the GPUs that nvidia-smi lists."""
    found = [
        Gpu(index, uuid, name, _bytes(total), _bytes(used), driver)
        for index, uuid, name, total, used, driver in query("gpu", DEVICE_KEYS)
    ]
    by_uuid = {gpu.uuid: gpu for gpu in found}
    for uuid, pid, used in query("compute-apps", PROCESS_KEYS) if found else ():
        if uuid in by_uuid and pid.isdigit():
            by_uuid[uuid].pids[int(pid)] = _bytes(used)
    return found


def _bytes(mib: str) -> int:
    return int(mib) << 20 if mib.isdigit() else 0  # "[N/A]" for some devices


def query(what: str, keys: tuple[str, ...]) -> list[list[str]]:
    """Return the rows of one query of nvidia-smi.

    Raises:
        [`NoTool`]: if the command is missing, fails or does not answer.
    """
    if shutil.which(NVIDIA_TOOL) is None:
        missing = f"`{NVIDIA_TOOL}` is not installed here, which comes with NVIDIA's driver"
        raise NoTool(f"{missing}, and AMD's driver shows none in {SYS}/class/kfd")
    command = [NVIDIA_TOOL, f"--query-{what}={','.join(keys)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise NoTool(f"`{NVIDIA_TOOL}` did not answer within {TOOL_LIMIT_S:.0f} s") from None
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines() or [f"exit code {done.returncode}"]
        raise NoTool(f"`{NVIDIA_TOOL}` failed: {said[0]}")
    rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    return [row for row in rows if len(row) == len(keys)]


def amd_gpus() -> list[Gpu]:
    """Return the GPUs that AMD's kernel driver shows, in the order in which the ROCm runtime numbers them."""
    kfd = SYS / "class/kfd/kfd"
    found: list[Gpu] = []
    for node in sorted(kfd.glob("topology/nodes/*"), key=lambda path: int(path.name)):
        gpu_id, values = _text(node / "gpu_id"), _text(node / "properties").split()
        if gpu_id in ("", "0"):  # a CPU, or a GPU that this container may not use
            continue
        properties = dict(zip(values[::2], values[1::2], strict=False))
        device = SYS / f"class/drm/renderD{properties.get('drm_render_minor')}/device"
        found.append(
            Gpu(
                index=str(len(found)),
                uuid=f"GPU-{int(properties.get('unique_id', 0)):016x}",
                name=_text(device / "product_name") or _architecture(properties),
                total=_number(device / "mem_info_vram_total"),
                used=_number(device / "mem_info_vram_used"),
                driver=_text(SYS / "module/amdgpu/version") or "amdgpu of the kernel",
                pids={
                    int(file.parent.name): _number(file)
                    for file in kfd.glob(f"proc/*/vram_{gpu_id}")
                },
            )
        )
    return found


def _architecture(properties: dict[str, str]) -> str:
    """Return a name like `AMD gfx942` from the version 90402 of a GPU without a product name."""
    version = int(properties.get("gfx_target_version", 0))
    return f"AMD gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdigit() else 0
