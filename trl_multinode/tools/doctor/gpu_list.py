"""GPUs of this machine with their memory and processes, from nvidia-smi."""

import csv
import shutil
import subprocess
from dataclasses import dataclass, field
from functools import cache

NVIDIA_TOOL = "nvidia-smi"
TOOL_LIMIT_S = 30.0  # it takes 1 to 2 s without the persistence daemon, more on a node of 8 GPUs
DEVICE_KEYS = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version")
PROCESS_KEYS = ("gpu_uuid", "pid", "used_memory")


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
        [`NoTool`]: if `nvidia-smi` does not list them.
    """
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
        raise NoTool(f"`{NVIDIA_TOOL}` is not installed here, which comes with NVIDIA's driver")
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
