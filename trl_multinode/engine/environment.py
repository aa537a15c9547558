"""Environment of an engine: an allow-list of the launching one without secrets, and settings that keep it local."""

import os
from pathlib import Path

from ..wire.messages import LATER_LEVEL, LEVEL
from ..wire.secret_names import is_secret_name
from ..wire.stop_signals import PREEMPT_VARIABLE

# Variables that an engine needs from the launching environment. With RANK, WORLD_SIZE or MASTER_* vLLM would join the
# trainers' world; secrets are left out because the engine never contacts a hub.
KEPT_VARIABLES = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV",
    PREEMPT_VARIABLE,  # which an engine ignores
    "HF_HOME", "HF_HUB_CACHE", "HF_MODULES_CACHE",  # code of models with `trust_remote_code`
    "GPU_DEVICE_ORDINAL",  # of AMD, see below
)  # fmt: skip
# On AMD, ROCR_VISIBLE_DEVICES and GPU_DEVICE_ORDINAL decide which GPU an index of HIP_VISIBLE_DEVICES means, and
# HSA_OVERRIDE_GFX_VERSION which kernels run; without them an engine would take a GPU of another job, or not start
KEPT_PREFIXES = (
    "VLLM_", "CUDA_", "NVIDIA_", "NCCL_", "TORCH", "TRITON_", "XDG_CACHE", "PYTHON",
    "HIP_", "ROCM_", "ROCR_", "HSA_", "RCCL_", "MIOPEN_", "HIPBLASLT_",
)  # fmt: skip
# The first lets vLLM unpickle what it receives, the second opens calls that only its developers need
REFUSED = ("VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_SERVER_DEV_MODE")


def is_kept(name: str) -> bool:
    """Return whether an engine gets a variable of the launching environment."""
    if name.startswith("TORCHELASTIC_") or name in REFUSED or is_secret_name(name):
        return False
    return name in KEPT_VARIABLES or name.startswith(KEPT_PREFIXES)


def engine_environment(extra: dict[str, str], folder: Path) -> dict[str, str]:
    """Return the allow-listed environment of an engine, with `extra` on top.

    Args:
        extra (`dict[str, str]`):
            Variables of this engine: devices, thread counts.
        folder (`Path`):
            Private folder of the run, for vLLM's sockets. They have no owner: 7 per engine would stay in `TMPDIR`.
    """
    kept = {name: value for name, value in os.environ.items() if is_kept(name)}
    own = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # An engine at TP 1 has 13 gloo listeners, by default on the address to which the host's name resolves
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_RPC_BASE_PATH": str(folder),
        # vLLM's process titles would overwrite /proc/<pid>/environ, which shows the run that a process belongs to
        "SPT_NOENV": "1",
        # vLLM forks by default until CUDA is initialized, and a fork inherits `plugins_loaded = True`: it would not
        # run our plugin, and the engine would refuse to start. `vllm serve` and vLLM on a CPU spawn too.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    return kept | own | logging_levels() | extra


def logging_levels() -> dict[str, str]:
    """Return the levels of vLLM's log: INFO while it starts, then ERROR, which is TRL's default.

    `import trl` sets VLLM_LOGGING_LEVEL to ERROR unless it is set. Any other value is the user's, and so is ERROR if
    this process was started with it; that level then holds from the beginning.
    """
    level = os.environ.get(LEVEL, "ERROR")
    try:
        at_start = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        at_start = []
    if level != "ERROR" or f"{LEVEL}={level}".encode() in at_start:
        return {}
    return {LEVEL: "INFO", LATER_LEVEL: level}
