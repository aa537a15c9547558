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
NO_PLACE = "nodes meet only with a static rendezvous (leave `rdzv_backend` out) and torchrun as launcher"


def wait_and_run(launch: Launch | None, problems: list[Problem], timeout_s: float, command: Sequence[str]) -> int:
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
    if launch is None:
        return CONFIGURATION
    if launch.num_nodes == 1:
        if problems:
            return CONFIGURATION
        say("one node, which waits for no other one")
    elif code := _meet(launch, problems, timeout_s):
        return code
    return run_command(command) if command else 0


def place_of(launch: Launch, timeout_s: float) -> Place | None:
    """Return the place of the roll-call of a launch; `None` if its nodes have no address and port in common."""
    address = launch.args.main_process_ip
    if launch.ranks_by_arrival or launch.own_launcher or not (address or "").strip() or launch.port == 0:
        return None
    return Place(address.strip("[]"), launch.port or DEFAULT_PORT, timeout_s)


def _meet(launch: Launch, problems: list[Problem], timeout_s: float) -> int:
    if (place := place_of(launch, timeout_s)) is None:
        if not problems:
            say(f"error: {NO_PLACE}")
        return CONFIGURATION
    try:
        return asyncio.run(call(place, _hello(launch, problems))).code
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED


def _hello(launch: Launch, problems: list[Problem]) -> Hello:
    return Hello(
        rank=launch.args.machine_rank,
        host=socket.gethostname(),
        host_id=host_id(),
        pid=os.getpid(),
        nodes=launch.num_nodes,
        processes=launch.started,
        gpus=torch.cuda.device_count() if launch.visible is not None else 0,
        versions=local_versions(),
        problems=[f"{problem.what}: {problem.cure}" for problem in problems],
    )
