"""`--machine_rank` and `--main_process_ip` from the variables of this node's scheduler; accelerate reads none of them.

SkyPilot, a TrainJob of Kubernetes (`PET_*`), SLURM (inside srun) and an Indexed Job (`JOB_COMPLETION_INDEX`) set them.
"""

import re
import socket
from collections.abc import Callable, Mapping

Environment = Mapping[str, str]


class FlagsError(ValueError):
    """Environment in which no scheduler names this node and node 0; the message has got, expected and the cure."""


def node_flags(environ: Environment) -> tuple[int, str]:
    """Return the rank of this node and the address of node 0.

    Args:
        environ (`Mapping[str, str]`):
            Environment of the node's process.

    Raises:
        [`FlagsError`]: if no scheduler has set its variables, or not all of them.
    """
    for name, read in SOURCES.items():
        if name in environ:
            return read(environ)
    raise FlagsError(
        f"no scheduler has set the rank of this node (expected one of {', '.join(SOURCES)}). In a shell of your own "
        "pass --machine_rank K, another K on each node, and --main_process_ip HOST0"
    )


def _skypilot(environ: Environment) -> tuple[int, str]:
    addresses = _value(environ, "SKYPILOT_NODE_IPS", "SkyPilot sets it in `run`").split()
    return _rank(environ, "SKYPILOT_NODE_RANK", str(len(addresses))), addresses[0]


def _torchrun(environ: Environment) -> tuple[int, str]:
    address = _value(
        environ, "PET_MASTER_ADDR", "a TrainJob sets it for a runtime with a `torch` policy"
    )
    return _rank(
        environ, "PET_NODE_RANK", environ.get("PET_NNODES", "").rpartition(":")[2]
    ), address


def _slurm(environ: Environment) -> tuple[int, str]:
    """Read a step's variables. Those of the job are the same on all nodes, or are those of the batch script."""
    if environ.get("SLURM_LOCALID", "0") != "0":
        raise FlagsError(
            f"this is not the first task of its node (got SLURM_LOCALID={environ['SLURM_LOCALID']}, expected 0); pass "
            "--ntasks-per-node=1, because one launcher starts all ranks of a node"
        )
    nodes = environ.get("SLURM_STEP_NODELIST", "")
    if not nodes:
        if environ.get("SLURM_NNODES", "1") != "1":
            raise FlagsError(
                f"this shell is in no step (got SLURM_NNODES={environ['SLURM_NNODES']} and no SLURM_STEP_NODELIST); "
                "run it with srun, on every node"
            )
        nodes = _value(environ, "SLURM_JOB_NODELIST", "SLURM sets it in a job")
    return _rank(environ, "SLURM_NODEID", environ.get("SLURM_STEP_NUM_NODES", "")), first_host(
        nodes
    )


def _indexed_job(
    environ: Environment, full_name: Callable[[], str] = socket.getfqdn
) -> tuple[int, str]:
    """Replace this pod's index in its own name by 0; the name resolves if the pods have a headless service."""
    rank = _rank(environ, "JOB_COMPLETION_INDEX", "")
    name = full_name()
    host, dot, domain = name.partition(".")
    if not dot or not host.endswith(f"-{rank}"):
        raise FlagsError(
            f"this pod's name does not lead to pod 0 (got {name!r}, expected <job>-{rank}.<service>...): give the "
            "pods a `subdomain` and a headless service of that name"
        )
    return rank, f"{host.removesuffix(f'-{rank}')}-0.{domain}"


# From the innermost to the outermost: SkyPilot may run on Kubernetes and SLURM, a TrainJob's pods are Indexed Jobs.
SOURCES: dict[str, Callable[[Environment], tuple[int, str]]] = {
    "SKYPILOT_NODE_RANK": _skypilot,
    "PET_NODE_RANK": _torchrun,
    "SLURM_NODEID": _slurm,
    "JOB_COMPLETION_INDEX": _indexed_job,
}


def first_host(nodes: str) -> str:
    """Return the first host of SLURM's list of nodes, `gpu-007` of `gpu-[007-012,020],big1`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes.strip())
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else "")


def _value(environ: Environment, name: str, who: str) -> str:
    value = environ.get(name, "").strip()
    if not value:
        raise FlagsError(f"{name} is missing or empty; {who}")
    return value


def _rank(environ: Environment, name: str, count: str) -> int:
    """Return the rank in a variable; it must be below a number of nodes that the scheduler has set."""
    value, expected = environ[name].strip(), "a number from 0"
    is_rank = value.isdigit()
    if count.isdigit():
        expected = f"0 to {int(count) - 1}"
        is_rank = is_rank and int(value) < int(count)
    if not is_rank:
        raise FlagsError(f"{name} is not the rank of a node (got {value!r}, expected {expected})")
    return int(value)
