"""What a node tells the others in a roll-call, and where they meet."""

import os
import socket
from collections.abc import Sequence

from ..check.launch import Launch
from ..check.rules_nodes import DEFAULT_PORT
from .attendance import Hello, host_id
from .meeting import Place

INTERRUPTED = 130  # 128 + SIGINT
NO_PLACE = (
    "nodes meet only with a static rendezvous (leave `rdzv_backend` out) and torchrun as launcher"
)


def place_of(launch: Launch, timeout_s: float) -> Place | None:
    """Return the place of the roll-call of a launch; `None` if its nodes have no address and port in common."""
    address = launch.args.main_process_ip
    if (
        launch.ranks_by_arrival
        or launch.own_launcher
        or not (address or "").strip()
        or launch.port == 0
    ):
        return None
    return Place(address.strip("[]"), launch.port or DEFAULT_PORT, timeout_s)


def hello_of(
    launch: Launch,
    gpus: int,
    processes: Sequence[int],
    versions: dict[str, str],
    problems: list[str],
) -> Hello:
    """Return the message of this node."""
    host, nodes = socket.gethostname(), launch.num_nodes
    return Hello(
        launch.args.machine_rank,
        host,
        host_id(),
        os.getpid(),
        nodes,
        list(processes),
        gpus,
        versions,
        problems,
    )
