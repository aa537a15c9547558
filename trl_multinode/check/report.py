"""Report of the check: the launch, every problem with its cure, and the exit status."""

import argparse
from collections.abc import Iterator
from dataclasses import fields

from accelerate.utils.other import is_port_in_use
from rich.console import Console
from rich.table import Table

from .launch import Batch, Launch, Problem
from .reading import read_launch
from .rules import count_problems, device_problems, launcher_problems, rank_problems
from .rules_batch import batch_problems, deepspeed_problems
from .rules_keys import key_problems


def check(
    path: str, flags: list[str], batch: Batch | None = None, gpus_per_node: int = 8
) -> tuple[Launch | None, list[Problem]]:
    """Check a launch with every rule.

    Args:
        path (`str`):
            Config file of `accelerate launch`.
        flags (`list[str]`):
            Further arguments of `accelerate launch`.
        batch ([`Batch`], *optional*):
            Batch arguments of the script; without them the rules of the batch do not run.
        gpus_per_node (`int`, *optional*, defaults to `8`):
            GPUs of a node.

    Returns:
        `tuple[Launch | None, list[Problem]]`: the launch, `None` if the file cannot be read or accelerate itself
            stops, and all problems.

    Raises:
        `SystemExit`: with status 2, for a flag that `accelerate launch` does not have, or for two config files.
    """
    launch, problems = read_launch(path, flags, gpus_per_node)
    if launch is not None:
        problems += launcher_problems(launch)
        problems += count_problems(launch, gpus_per_node)
        problems += rank_problems(launch)
        problems += device_problems(launch, gpus_per_node)
        problems += key_problems(launch)
    if launch is not None and batch is not None:
        problems += deepspeed_problems(launch, batch)
        problems += batch_problems(batch, launch.num_ranks)
    return launch, problems


def notes(launch: Launch) -> Iterator[str]:
    """Yield notes on settings that are valid but may surprise."""
    args = launch.args
    if launch.visible is None and launch.endpoint:
        yield "`use_cpu` does not reach the ranks through this launcher: the script needs its own `--use_cpu true`"
    if launch.num_nodes == 1 and launch.endpoint and is_port_in_use(args.main_process_port):
        yield f"port {args.main_process_port} is taken: on a single node, accelerate takes another one by itself"
    if launch.num_nodes > 1 and args.main_process_ip in ("127.0.0.1", "localhost", "::1"):
        yield f"`main_process_ip` {args.main_process_ip}: all {launch.num_nodes} nodes must be this one machine"
    if launch.num_nodes > 1 and launch.rank_in_file:
        yield f"`machine_rank` {args.machine_rank} comes from the file: every node that uses this file has that rank"


def table(launch: Launch, batch: Batch | None) -> Table:
    """Return a table of the processes, devices and batch that would run, one row per fact."""
    args, started, ranks = launch.args, launch.started, launch.started * launch.num_nodes
    gpus, first = launch.visible, launch.started * args.machine_rank
    runner = f"deepspeed ({launch.own_launcher})" if launch.own_launcher else "torchrun"
    runner = "python" if launch.launcher == "simple_launcher" else runner
    strategy = f"DeepSpeed ZeRO-{args.zero_stage or 2}" if args.use_deepspeed else launch.file["distributed_type"]
    rows = Table(title=f"node {args.machine_rank}", show_header=False, title_justify="left")
    rows.add_row("nodes", f"{launch.num_nodes}")
    rows.add_row("processes per node", f"{started}: here ranks {first} to {first + started - 1} of {ranks}")
    rows.add_row("training devices", "CPU" if gpus is None else f"GPU {', '.join(gpus[:started])}")
    rows.add_row("reserved devices", "CPU" if gpus is None else f"GPU {', '.join(gpus[started:]) or '(none)'}")
    rows.add_row("launcher", f"{runner}, {strategy}, mixed precision {args.mixed_precision}")
    rows.add_row("rendezvous", (not launch.own_launcher and launch.endpoint) or "none")
    if batch:
        world, group = batch.world(launch.num_ranks), batch.num_generations
        rows.add_row("world batch", f"{world} completions: {world / group:g} prompts x {group} generations")
    return rows


def parse(argv: list[str] | None) -> tuple[str, list[str], Batch | None, int]:
    """Split the command line into the file, flags of `accelerate launch`, and this module's own arguments."""
    parser = argparse.ArgumentParser("python -m trl_multinode.check", allow_abbrev=False)
    parser.description = "Report what `accelerate launch` would run on this node, and every problem with its cure."
    parser.epilog = "Any other flag is one of `accelerate launch`, as in --machine_rank 1 --main_process_ip HOST0."
    parser.add_argument("file", help="config file of `accelerate launch`; give it before any flag")
    parser.add_argument(
        "--gpus_per_node", "--gpus-per-node", type=_count, default=8, help="GPUs of a node (default: 8)"
    )
    for entry in fields(Batch):
        flag = f"--{entry.name}"
        parser.add_argument(
            flag, flag.replace("_", "-"), type=_count, help=f"of the script (default: {entry.default})"
        )
    options, flags = parser.parse_known_args(argv)
    given = {entry.name: getattr(options, entry.name) for entry in fields(Batch)}
    given = {name: value for name, value in given.items() if value is not None}
    return options.file, flags, Batch(**given) if given else None, options.gpus_per_node


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a number from 1")
    return int(text)


def main(argv: list[str] | None = None) -> int:
    """Print the report and return the exit status: 0 without problems, 1 with problems."""
    path, flags, batch, gpus_per_node = parse(argv)
    launch, problems = check(path, flags, batch, gpus_per_node)
    console = Console(soft_wrap=True, markup=False, highlight=False)  # a sentence stays on one line, also in a log
    if launch is not None:
        console.print(table(launch, batch))
        for note in notes(launch):
            console.print(f"note: {note}")
    for number, problem in enumerate(problems, 1):
        console.print(f"problem {number}: {problem.what}", style="bold red")
        console.print(f"     cure: {problem.cure}")
    if not problems:
        console.print(f"ok: {path}", style="green")
    return 1 if problems else 0
