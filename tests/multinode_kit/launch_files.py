"""Files and environment of a [`Nodes`] launch: configs as a user would write them, and a fresh shell's environment."""

import json
import os
import random
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

# that ranks register with `faulthandler`; SIGUSR1 is a notice of a scheduler
STACKS = signal.SIGUSR2
MARKER_VARIABLE = "TRL_MULTINODE_TEST_MARKER"
CORES_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"  # vLLM's name for cores of its workers on a CPU

# Variables of the launch that the caller may run in; a new launch must not inherit them
LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", MARKER_VARIABLE)
LAUNCH_PREFIXES = ("ACCELERATE_", "TORCHELASTIC_", "PET_", "MASTER_")

FIRST_PORT, PORTS_PER_WORKER, NUM_PORT_RANGES = 20000, 1000, 12

# A tiny model is never sharded unless the threshold is 0: DeepSpeed keeps small parameters whole on every rank
ZERO3 = {
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}

# Without DeepSpeed, for `Nodes(accelerate=...)`. accelerate starts several processes on a CPU only if its config names
# GPUs; the script then selects the CPU (`use_cpu=True`).
DDP: dict[str, Any] = {"distributed_type": "MULTI_GPU"}
FSDP2: dict[str, Any] = {
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_cpu_ram_efficient_loading": False,
    },
}

# torchrun writes a rank's stdout and stderr to two files and loses their order; this script writes them to one. `exec`
# keeps pid and parent, so torchrun still supervises the rank itself. A plain append survives SIGKILL and `os._exit`.
PER_RANK_LOG = """\
echo $$ > "${0%/*}/rank$RANK.pid"
exec "$@" >> "${0%/*}/rank$RANK.log" 2>&1
"""


@dataclass(frozen=True)
class NodesSpec:
    """Layout and settings of the nodes; the arguments of [`Nodes`] describe them."""

    ranks: tuple[int, ...]  # of each node
    env: Mapping[str, str]
    deepspeed: Mapping[str, Any]
    accelerate: Mapping[str, Any] | None = None  # replaces DeepSpeed

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 1:
            raise ValueError(f"got the ranks {self.ranks} of the nodes: nodes and ranks start at 1")

    @property
    def num_nodes(self) -> int:
        return len(self.ranks)

    @property
    def num_ranks(self) -> int:
        return sum(self.ranks)

    def node_of(self, rank: int) -> int:
        return [node for node, count in enumerate(self.ranks) for _ in range(count)][rank]

    def write(self, folder: Path, ip: str) -> Path:
        """Write the files of one launch into `folder` and return the accelerate config, which names a free port."""
        config_file = folder / "accelerate.yaml"
        config = {
            "compute_environment": "LOCAL_MACHINE",
            "machine_rank": 0,
            "main_process_ip": ip,
            "main_process_port": free_port(),
            "num_machines": self.num_nodes,
            # of a node with other ranks: its own command has another number
            "num_processes": self.num_nodes * self.ranks[0],
            **(self.accelerate or self._deepspeed_section(folder)),
        }
        config_file.write_text(yaml.safe_dump(config))
        (folder / "per_rank.sh").write_text(PER_RANK_LOG)
        return config_file

    def _deepspeed_section(self, folder: Path) -> dict[str, Any]:
        """Write the DeepSpeed file and return its section. accelerate refuses `mixed_precision` beside such a file."""
        deepspeed_file = folder / "deepspeed.json"
        deepspeed_file.write_text(json.dumps(self.deepspeed, indent=2))
        return {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {
                "deepspeed_config_file": str(deepspeed_file),
                "deepspeed_multinode_launcher": "standard",
                "zero3_init_flag": self.deepspeed.get("zero_optimization", {}).get("stage") == 3,
            },
            "use_cpu": True,
        }


def fresh_environment() -> dict[str, str]:
    """Return the caller's environment without the variables of a launch that the caller may run in."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCH_VARIABLES
        and not name.startswith(LAUNCH_PREFIXES)
        and not name.endswith("WORLD_SIZE")
    }


def node_environment(marker: str, interface: str, tmpdir: Path) -> dict[str, str]:
    """Return the environment of a node's launcher: the caller's, the node's marker and folder, gloo on a CPU."""
    return (
        fresh_environment()
        | {
            MARKER_VARIABLE: marker,
            "SPT_NOENV": "1",  # else setproctitle overwrites /proc/<pid>/environ, and thus the marker, with the title
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": interface,
            "TMPDIR": str(tmpdir),
        }
    )


def core_of_engines(node: int) -> dict[str, str]:
    """Return the variable that gives vLLM's workers of a node a core, unless the caller has set it.

    By itself vLLM takes the same core for all engines of a computer. Two engines on two cores then started in 53 s
    instead of 43 s, and loaded weights in turns: a weight sync took 1.22 times its slowest stage instead of 1.08.
    """
    cores = sorted(os.sched_getaffinity(0))
    return {CORES_VARIABLE: os.environ.get(CORES_VARIABLE, str(cores[node % len(cores)]))}


def free_port() -> int:
    """Return a free TCP port below 32768, because the kernel assigns ports from there up to outgoing connections.

    Each worker of pytest-xdist has a range of its own: two that draw from one range could draw the same port.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    index = int(worker.removeprefix("gw") or 0) % NUM_PORT_RANGES
    ports = range(
        FIRST_PORT + index * PORTS_PER_WORKER, FIRST_PORT + (index + 1) * PORTS_PER_WORKER
    )
    for port in random.sample(ports, k=100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise RuntimeError(
        f"none of 100 ports between {ports.start} and {ports.stop} is free on this computer"
    )
