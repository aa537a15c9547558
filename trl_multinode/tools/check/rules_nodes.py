"""Rules for the meeting of the nodes: rank, address, port, and the variables of a scheduler."""

import ipaddress
import os
import re
from collections.abc import Iterator

from accelerate.utils.other import is_port_in_use

from .launch import Launch, Problem
from .ports import owner_of

DEFAULT_PORT = 29500  # of torchrun

# Variables with which a scheduler numbers the nodes of a job: the node, their number, and the address of node 0.
# srun sets SLURM_STEP_NUM_NODES; SLURM_NNODES is also set in a shell of salloc, which runs on one node.
SCHEDULERS = {
    "PET_NODE_RANK": ("PET_NNODES", "$PET_MASTER_ADDR"),
    "SLURM_NODEID": (
        "SLURM_STEP_NUM_NODES",
        '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    ),
}


def rank_problems(launch: Launch) -> Iterator[Problem]:
    """Yield problems of `machine_rank`, address and port, which the nodes need to find each other."""
    rank, last = launch.args.machine_rank, launch.num_nodes - 1
    if not 0 <= rank <= last:
        yield Problem(
            f"`machine_rank` is out of range (got {rank}, expected 0 to {last})",
            f"pass `--machine_rank` 0 to {last}, another one on each node, or correct `num_machines`",
        )
    if last == 0:
        return
    if not launch.has_rank and not launch.ranks_by_arrival:
        what = f"`machine_rank` is missing, and accelerate takes 0 on every node (got None, expected 0 to {last})"
        variable = next((f"${name}" for name in SCHEDULERS if name in os.environ), None)
        cure = f"pass `--machine_rank {variable}`, which accelerate does not read by itself"
        yield Problem(what, cure if variable else "pass `--machine_rank K`, another K on each node "
                      "(`$SLURM_NODEID` inside `srun`, `$PET_NODE_RANK` in a Kubernetes TrainJob)")  # fmt: skip
    yield from _address_problems(launch.args.main_process_ip)
    if launch.port == 0:
        yield Problem(
            "every node would choose a port of its own (`main_process_port` got 0, expected one number for all)",
            "write `main_process_port: 29500`",
        )


def port_problems(launch: Launch) -> Iterator[Problem]:
    """Yield a problem if another process of this node, on which rank 0 is to listen, has the port."""
    if (
        launch.num_nodes == 1
        or launch.args.machine_rank != 0
        or launch.port == 0
        or not is_port_in_use(launch.port)
    ):
        return
    owner = owner_of(launch.port or DEFAULT_PORT)
    cure = "pass another `--main_process_port`, the same on every node"
    yield Problem(
        f"port {launch.port or DEFAULT_PORT} is taken on this node{owner and f' by {owner}'}, where rank 0 listens"
        f" (expected a free one)",
        f"end that process, or {cure}" if owner else cure,
    )


def _address_problems(address: str | None) -> Iterator[Problem]:
    variable = next(
        (source for name, (_, source) in SCHEDULERS.items() if name in os.environ), "HOST0"
    )
    cure = f"pass `--main_process_ip {variable}`, the address of node 0, on every node"
    if address is None:
        yield Problem(
            "`main_process_ip` is missing, nodes would look for a host named None (got None, expected an address)",
            cure,
        )
    elif not address.strip():
        yield Problem(
            "`main_process_ip` is empty, so nodes would look for a host without a name (got '', expected an address)",
            f"{cure}; the variable for it is not set in this shell",
        )
    elif not _is_host(address):
        what = f"`main_process_ip` is not one address (got {address!r}, expected a host name or an IP address)"
        if re.fullmatch(r"[^:]+:\d+", address):
            host, port = address.split(":")
            cure = f"pass `--main_process_ip {host} --main_process_port {port}`"
        yield Problem(what, cure)


def _is_host(address: str) -> bool:
    try:
        ipaddress.ip_address(address.strip("[]"))
    except ValueError:
        return re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?", address) is not None
    return True


def scheduler_problems(launch: Launch) -> Iterator[Problem]:
    """Yield problems if a scheduler starts this command on other nodes than those of the file."""
    run, nodes = launch.torchrun, launch.num_nodes
    for rank_name, (count_name, _) in SCHEDULERS.items():
        count = os.environ.get(count_name, "").rpartition(":")[2]
        # `srun --pty` opens a shell on one node
        if run is None or not count.isdigit() or int(count) < 2:
            continue
        if int(count) != nodes:
            ranks = f"`num_processes: {launch.ranks_per_node * int(count)}`, the total"
            if launch.table:
                ranks = "a number for each in `--ranks`"
            what = f"the nodes of this job are not those of the launch (got `num_machines` {nodes}, expected"
            what += f" {count_name}={count})"
            cure = f"write `num_machines: {count}` and {ranks}"
            if nodes == 1 and str(run.nnodes).rpartition(":")[2] == count:
                cure += f"; with one machine, torchrun would take {count_name} and wait for {count} nodes"
            yield Problem(what, cure)
        elif nodes > 1 and not launch.ranks_by_arrival and _is_other_rank(launch, rank_name):
            yield Problem(
                f"`machine_rank` is not this node's (got {launch.args.machine_rank}, expected"
                f" {rank_name}={os.environ[rank_name]})",
                f"pass `--machine_rank ${rank_name}` in single quotes, so that each node expands it",
            )


def _is_other_rank(launch: Launch, name: str) -> bool:
    found = os.environ.get(name, "")
    return launch.has_rank and found.isdigit() and int(found) != launch.args.machine_rank
