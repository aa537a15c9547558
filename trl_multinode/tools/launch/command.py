"""`trl-multinode launch`: check this node's launch, meet the other nodes, then run it."""

import asyncio
import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from ...errors import ConfigurationError
from ...run.endings.exit_codes import CONFIGURATION
from ...run.gpu_variables import check_accelerator
from ...run.versions import local_versions
from ..check.command_line import parse
from ..check.fewer_nodes import fewer_problems, words_here
from ..check.launch import Launch, Problem, problem_of
from ..check.reading import read_launch
from ..check.report import check, show
from .child import run_command
from .joining import INTERRUPTED, NO_PLACE, hello_of, place_of
from .node_flags import SOURCES, FlagsError, node_flags
from .rollcall import call, say

NODE_FLAGS = ("machine_rank", "main_process_ip")


def main(argv: list[str]) -> int:
    """Launch the script on this node, with the other nodes.

    Returns:
        `int`: exit code of the run; 3 if the launch has a problem on any node, and the code of a failed roll-call.
    """
    options = parse(argv, "launch")
    gpus = options.gpus_per_node or torch.cuda.device_count() or 8
    try:
        flags = [*options.flags, *missing_flags(options.file, options.flags, options.script, gpus)]
    except FlagsError as error:
        say(f"error: {error}")
        return CONFIGURATION
    # the roll-call looks for the owner of the port, and may be that itself
    checked = partial(check, options.file, gpus_per_node=gpus, port=False, table=options.ranks)
    launch, problems = checked([*flags, *options.script])
    if launch is not None and options.min_nodes:
        fewer = list(fewer_problems(launch, options.min_nodes))
        more, arguments = words_here(launch, options.min_nodes)
        if more:
            say(f"begins on fewer nodes: {shlex.join(more + arguments)}")
            flags, options.script = flags + more, options.script + arguments
            launch, problems = checked([*flags, *options.script])
        problems += fewer
    if launch is not None:
        problems += gpu_problems(launch)
    show(launch, problems, options.file)
    if code := meet(launch, problems, options.timeout):
        return code
    if launch is not None and launch.table:
        flags += ["--num_processes", str(launch.args.num_processes)]
    command = ["accelerate", "launch", "--config_file", options.file, *flags, *options.script]
    # without the script's arguments, one of which may be a token
    say(f"starts {shlex.join(command[: 5 + len(flags)])} ...")
    # of an environment that is not activated
    os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}:{Path(sys.executable).parent}"
    return run_command(command)


def missing_flags(path: str, flags: list[str], script: list[str], gpus: int) -> list[str]:
    """Return rank and address as this node's scheduler says them, as far as neither flags nor file have them.

    A rank in the file is that of every node, so the scheduler's counts; without one, the check names the doubled rank.

    Raises:
        [`FlagsError`]: if one is missing and no scheduler has set it.
    """
    launch, _ = read_launch(path, flags, script, gpus)
    if launch is None or launch.num_nodes == 1 or launch.ranks_by_arrival:
        return []
    given = {name for name in NODE_FLAGS if launch.file.get(name) is not None}
    if not SOURCES.keys().isdisjoint(os.environ):
        given.discard("machine_rank")
    given |= launch.args.nondefault
    if given.issuperset(NODE_FLAGS):
        return []
    values = zip(NODE_FLAGS, node_flags(os.environ), strict=True)
    return sum(([f"--{name}", str(value)] for name, value in values if name not in given), [])


def gpu_problems(launch: Launch) -> list[Problem]:
    """Return the problem of a node on which no GPU is visible, although its ranks need some."""
    if launch.visible is None or (num_gpus := torch.cuda.device_count()):
        return []
    try:
        check_accelerator(num_gpus, launch.args.machine_rank, needs="num_processes")
    except ConfigurationError as error:
        return [problem_of(error)]
    return []


def meet(launch: Launch | None, problems: Sequence[Problem], timeout_s: float) -> int:
    """Meet the other nodes, which get this node's problems: then no node launches.

    Args:
        launch ([`Launch`], *optional*):
            Launch of this node; `None` if it cannot be read.
        problems (`Sequence[Problem]`):
            Problems of this launch.
        timeout_s (`float`):
            Longest wait for the other nodes.

    Returns:
        `int`: 0 if the nodes may launch, else the exit code.
    """
    if launch is None:
        return CONFIGURATION
    if launch.num_nodes == 1:
        return CONFIGURATION if problems else 0
    place = place_of(launch, timeout_s)
    if place is None:
        say(f"error: {NO_PLACE}")
        return CONFIGURATION
    gpus = torch.cuda.device_count() if launch.visible is not None else 0
    told = [problem.line for problem in problems]
    hello = hello_of(launch, gpus, launch.table or [launch.started], local_versions(), told)
    try:
        return asyncio.run(call(place, hello)).code
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED
