"""Environment variables that hide GPUs from a process, for NVIDIA and for AMD.

CUDA reads CUDA_VISIBLE_DEVICES. On AMD, ROCR_VISIBLE_DEVICES hides GPUs from everything above the ROCm runtime, and
HIP_VISIBLE_DEVICES, or CUDA_VISIBLE_DEVICES if that is not set, chooses among the GPUs that are left.
"""

import os
import socket
from collections.abc import Mapping

from ..errors import ConfigurationError

CUDA = "CUDA_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
ROCR = "ROCR_VISIBLE_DEVICES"
# Variables of a shell, of SLURM and of NVIDIA's container runtime that say which GPUs a process was given
GIVEN = (
    CUDA, HIP, ROCR, "SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE", "NVIDIA_VISIBLE_DEVICES",
)  # fmt: skip


def on_amd(environ: Mapping[str, str]) -> bool:
    """Return whether GPUs are AMD's: torch is built for ROCm, or for no GPU at all and HIP_VISIBLE_DEVICES is set.

    The second case is a check on a login node. A torch for CUDA ignores HIP_VISIBLE_DEVICES.
    """
    from torch import version

    return version.hip is not None or (version.cuda is None and HIP in environ)


def gpu_variable(environ: Mapping[str, str]) -> str:
    """Return the name of the variable that chooses and orders the visible GPUs, whether it is set or not."""
    return HIP if HIP in environ and on_amd(environ) else CUDA


def gpu_names(listed: str | None) -> list[str]:
    """Return the GPUs of such a variable: indexes, or names that begin with `GPU-` or `MIG-`."""
    return [name.strip() for name in (listed or "").split(",") if name.strip()]


def visible_devices(environ: Mapping[str, str], num_gpus: int) -> list[str]:
    """Return the GPUs that this node's ranks see, in their order and by the names that an engine can be given.

    On AMD with ROCR_VISIBLE_DEVICES, which an engine inherits, they are indexes among the GPUs of that list.
    """
    names = gpu_names(environ.get(gpu_variable(environ)))
    return names[:num_gpus] if names else [str(index) for index in range(num_gpus)]


def only_visible(gpus: tuple[str, ...]) -> dict[str, str]:
    """Return the variables with which a process sees only these GPUs.

    vLLM on ROCm refuses to start if the two differ, and torch follows HIP_VISIBLE_DEVICES. CUDA reads only its own.
    """
    return dict.fromkeys((CUDA, HIP), ",".join(gpus))


def _no_gpu(needs: str, node: int | None) -> ConfigurationError:
    given = {name: os.environ[name] for name in GIVEN if name in os.environ}
    found = [f"{name}={value!r}" for name, value in given.items()]
    return ConfigurationError(
        f"No GPU is visible to this process on {socket.gethostname()}, and `{needs}` needs one (set: "
        f"{', '.join(found or [f'none of {CUDA} and those of SLURM and containers'])}).",
        setting="use_cpu",
        got=given,
        node=node,
        cure="Give `--gpus-per-node` or `--gres=gpu:N` to `sbatch` and `srun`, `--gpus all` to a container, unset "
        "a variable that hides GPUs, or set `use_cpu=True` to train on CPUs.",
    )


def check_accelerator(num_gpus: int, node: int | None, needs: str = "") -> None:
    """Check the devices of a node: it has some if a setting needs one, and node mode has engines for them.

    Args:
        num_gpus (`int`):
            Visible GPUs of NVIDIA or AMD.
        node (`int`, *optional*):
            Number of the node; `None` before it is known whether node mode is on.
        needs (`str`, *optional*):
            Setting that needs a device.

    Raises:
        `ConfigurationError`: if it has none, or devices of another maker, whose engines would run on the CPU.
    """
    import torch

    if num_gpus:
        return
    device = torch.accelerator.current_accelerator(check_available=True)
    if needs and device is None:
        raise _no_gpu(needs, node)
    if device is not None and device.type != "cuda" and node is not None:
        raise ConfigurationError(
            f"This node has devices of the type `{device.type}` (expected `cuda`): node mode starts engines "
            "on GPUs of NVIDIA and AMD, and on CPUs.",
            setting="vllm_mode",
            got=device.type,
            expected="cuda",
            node=node,
            cure="Use TRL's `vllm_mode='server'`, or set `use_cpu=True`.",
        )
