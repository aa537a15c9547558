"""Report of the check: the launch, every problem with its cure, and the exit status."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from accelerate.utils.other import is_port_in_use
from rich.console import Console
from rich.table import Table

from ..text import count, joined, rich_table
from .arguments import read_arguments
from .command_line import OWN_FLAGS, parse
from .fewer_nodes import fewer_problems
from .flags import split_at_script
from .launch import Batch, Engines, Launch, Problem, Script, safely
from .reading import read_launch
from .rules import (
    count_problems,
    device_problems,
    launcher_problems,
    preemption_notes,
    preemption_problems,
    secret_problems,
    strategy_problems,
)
from .rules_batch import world_problems
from .rules_deepspeed import (
    group_problems,
    offload_problems,
    value_problems,
    zero_notes,
    zero_problems,
)
from .rules_engines import engine_notes, engine_problems, head_problems, unused_problems
from .rules_keys import key_problems
from .rules_nodes import port_problems, rank_problems, scheduler_problems

LAUNCH_RULES = (
    launcher_problems,
    strategy_problems,
    count_problems,
    rank_problems,
    scheduler_problems,
    device_problems,
    secret_problems,
    zero_problems,
    offload_problems,
    group_problems,
    key_problems,
    preemption_problems,
)
SCRIPT_RULES = (engine_problems, unused_problems, head_problems, value_problems, world_problems)


def check(
    path: str,
    flags: list[str],
    batch: Batch | None = None,
    gpus_per_node: int = 8,
    engines: Engines | None = None,
    port: bool = True,
    table: tuple[int, ...] = (),
) -> tuple[Launch | None, list[Problem]]:
    """Check a launch with every rule.

    Args:
        path (`str`):
            Config file of `accelerate launch`.
        flags (`list[str]`):
            Further arguments of `accelerate launch`, perhaps with a script and its arguments at the end.
        batch ([`Batch`], *optional*):
            Batch arguments of the script, if `flags` name no script; without them the rules of the batch do not run.
        gpus_per_node (`int`, *optional*, defaults to `8`):
            GPUs of a node.
        engines ([`Engines`], *optional*):
            Arguments of the script for the engines, if `flags` name no script.
        port (`bool`, *optional*, defaults to `True`):
            Whether to look for a process that already has the port of the launch on this node.
        table (`tuple[int, ...]`, *optional*):
            Ranks of each node (`--ranks`); without them all nodes have the same number.

    Returns:
        `tuple[Launch | None, list[Problem]]`: the launch, `None` if the file cannot be read or accelerate itself
            stops, and all problems.

    Raises:
        `SystemExit`: with status 2, for a flag that `accelerate launch` does not have, or for two config files.
    """
    flags, words = split_at_script(flags, OWN_FLAGS)
    launch, problems = read_launch(path, flags, words, gpus_per_node, table)
    if launch is None:
        return None, problems
    found: list[Problem] = []
    unchecked: list[str] = []
    script = Script(batch=batch, engines=engines or Engines())
    if words:
        read = partial(read_arguments, given=script)
        both, unchecked = safely(read, launch, "the script's arguments")
        script, found = both or (script, [])
    launch = replace(launch, script=script)
    for rule in (*LAUNCH_RULES, lambda _: found, *SCRIPT_RULES, *([port_problems] * port)):
        more, failed = safely(rule, launch)
        problems += more
        unchecked += failed
    return replace(launch, script=replace(script, notes=(*script.notes, *unchecked))), problems


def notes(launch: Launch) -> Iterator[str]:
    """Yield notes on settings that are valid but may surprise."""
    script = launch.script
    if launch.visible is None and launch.endpoint and not script.use_cpu:
        yield "`use_cpu` does not reach the ranks through this launcher: the script needs its own `--use_cpu true`"
    for rule in (address_notes, engine_notes, zero_notes, preemption_notes):
        found, unchecked = safely(rule, launch)
        yield from (*found, *unchecked)
    if script.ignored:
        names = ", ".join(f"`{name}`" for name in script.ignored)
        yield f"ignored in node mode: {names}, because each node's engines belong to its local main process"
    yield from script.notes


def address_notes(launch: Launch) -> Iterator[str]:
    """Yield notes on the port, the address of node 0 and the node's number."""
    args = launch.args
    if launch.num_nodes == 1:
        if launch.endpoint and is_port_in_use(args.main_process_port):
            yield f"port {args.main_process_port} is taken: on a single node, accelerate takes another one by itself"
        return
    if args.main_process_ip in ("127.0.0.1", "localhost", "::1"):
        yield f"`main_process_ip` {args.main_process_ip}: all {launch.num_nodes} nodes must be this one machine"
    if launch.rank_in_file:
        yield f"`machine_rank` {args.machine_rank} comes from the file: every node that uses this file has that rank"


def table(launch: Launch) -> Table:
    """Return a table of the processes, devices and batch that would run, one row per fact."""
    args, started, script = launch.args, launch.started, launch.script
    first, gpus = launch.topology(args.machine_rank).rank, launch.visible
    here = f"here ranks {first} to {first + started - 1}"
    if launch.ranks_by_arrival:
        here = "numbered as the nodes arrive"
    rows = {
        "nodes": f"{launch.num_nodes}",
        "processes per node": f"{joined(launch.table) or started}: {here} of {sum(launch.ranks)}",
        "training devices": _devices(gpus, 0, started),
        "reserved devices": _devices(gpus, started, None),
    }
    if gpus and script.node_mode:
        rows["engines"] = _engines(launch, len(gpus) - started)
    rows["launcher"] = _strategy(launch)
    rows["rendezvous"] = (not launch.own_launcher and launch.endpoint) or "none"
    if script.name:
        rows["script"] = script.name if script.node_mode else f"{script.name}, without node mode"
    if batch := script.batch:
        world, group = batch.world(launch.num_ranks), batch.num_generations
        rows["world batch"] = (
            f"{world} completions: {world / max(1, group):g} prompts x {group} generations"
        )
    return rich_table(f"node {args.machine_rank}", ("", ""), rows.items())


def _devices(gpus: list[str] | None, first: int, end: int | None) -> str:
    return "CPU" if gpus is None else f"GPU {', '.join(gpus[first:end]) or '(none)'}"


def _engines(launch: Launch, reserved: int) -> str:
    engines = launch.script.engines
    size = engines.size
    gpus = reserved if engines.vllm_devices is None else len(engines.vllm_devices)
    return f"{engines.num_engines or gpus // size} a node, of {count(size, 'GPU')} each"


def _strategy(launch: Launch) -> str:
    args, deepspeed = launch.args, launch.deepspeed
    runner = f"deepspeed ({launch.own_launcher})" if launch.own_launcher else "torchrun"
    runner = "python" if launch.launcher == "simple_launcher" else runner
    strategy, precision = launch.file["distributed_type"], args.mixed_precision
    if args.use_deepspeed:
        strategy = f"DeepSpeed ZeRO-{deepspeed.stage if deepspeed else '?'}"
    if deepspeed and deepspeed.path:
        strategy, precision = (
            f"{strategy} of {deepspeed.path}",
            deepspeed.precision or "of the script",
        )
    return f"{runner}, {strategy}, mixed precision {precision}"


def main(argv: list[str]) -> int:
    """Print the report and return the exit status: 0 without problems, 1 with problems."""
    options = parse(argv)
    launch, problems = check(
        options.file,
        [*options.flags, *options.script],
        options.batch,
        options.gpus_per_node or 8,
        options.engines,
        table=options.ranks,
    )
    if launch is not None:
        problems += fewer_problems(launch, options.min_nodes)
    show(launch, problems, options.file)
    return 1 if problems else 0


def show(launch: Launch | None, problems: list[Problem], path: str) -> None:
    """Print the report of a check."""
    # a sentence stays on one line, also in a log
    console = Console(soft_wrap=True, markup=False, highlight=False)
    if launch is not None:
        console.print(table(launch))
        for note in notes(launch):
            console.print(f"note: {note}")
    for number, problem in enumerate(problems, 1):
        console.print(f"problem {number}: {problem.what}", style="bold red")
        console.print(f"     cure: {problem.cure}")
    if not problems:
        console.print(f"ok: {path}", style="green")
