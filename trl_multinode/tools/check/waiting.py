"""`trl-multinode check --wait`: the roll-call of this node's launch, then its command."""

import asyncio
import os
import socket
from collections.abc import Sequence

import torch

from ...run.endings.exit_codes import CONFIGURATION
from ...run.versions import local_versions
from .attendance import Hello, host_id
from .command_run import run_command
from .launch import Launch, Problem
from .meeting import Place
from .rollcall import call, say
from .rules_nodes import DEFAULT_PORT

INTERRUPTED = 130  # 128 + SIGINT
NO_PLACE = (
    "nodes meet only with a static rendezvous (leave `rdzv_backend` out) and torchrun as launcher"
)


def wait_and_run(
    launch: Launch | None, problems: list[Problem], timeout_s: float, command: Sequence[str]
) -> int:
    """
    Meet the other nodes, then run a command.

    Args:
        launch ([`Launch`], *optional*):
            Launch of this node; `None` if it cannot be read.
        problems (`list[Problem]`):
            Problems of this launch. The other nodes get the first one, and nobody runs its command.
        timeout_s (`float`):
            Longest wait for the other nodes.
        command (`Sequence[str]`):
            Words of the command; without words none is run.

    Returns:
        `int`: exit code of the roll-call if it fails, else of the command.
    """
    place = None if launch is None else place_of(launch, timeout_s)
    if launch is None or (problems and (launch.num_nodes == 1 or place is None)):
        return CONFIGURATION
    if launch.num_nodes == 1:
        say("one node, which waits for no other one")
    elif place is None:
        say(f"error: {NO_PLACE}")
        return CONFIGURATION
    elif code := _meet(place, launch, problems):
        return code
    return run_command(command) if command else 0


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


def _meet(place: Place, launch: Launch, problems: list[Problem]) -> int:
    gpus = torch.cuda.device_count() if launch.visible is not None else 0
    hello = hello_of(
        launch,
        gpus,
        launch.started,
        local_versions(),
        [f"{problem.what}: {problem.cure}" for problem in problems],
    )
    try:
        return asyncio.run(call(place, hello)).code
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED


def hello_of(
    launch: Launch, gpus: int, processes: int, versions: dict[str, str], problems: list[str]
) -> Hello:
    """Return the message of this node."""
    host, nodes = socket.gethostname(), launch.num_nodes
    return Hello(
        launch.args.machine_rank,
        host,
        host_id(),
        os.getpid(),
        nodes,
        processes,
        gpus,
        versions,
        problems,
    )
