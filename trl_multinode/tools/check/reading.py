"""Read the launch from config file and flags with accelerate's own code, its launchers replaced."""

import argparse
import logging
import os
import tempfile
from contextlib import ExitStack
from itertools import takewhile
from typing import Any

import torch.distributed.run as torchrun
import yaml
from accelerate.commands import launch as accelerate_launch
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import _filter_args, prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from accelerate.utils import launch as prepare

from ...former_arguments import did_you_mean
from ...libraries import replaced
from ...run.gpu_variables import CUDA, ROCR, gpu_names, gpu_variable, on_amd
from ..text import FileError, joined, read_keys
from .deepspeed import read_deepspeed
from .flags import flag_names, parse_flags
from .launch import Launch, Problem, problem_of

# Accelerate's launchers that end in torchrun, each with the function that prepares its arguments.
PREPARE = {
    "deepspeed_launcher": prepare_deepspeed_cmd_env,
    "multi_gpu_launcher": prepare_multi_gpu_env,
}
# Keys that the config loader accepts: its fields, and two older spellings that it converts.
FILE_KEYS = {*ClusterConfig.__dataclass_fields__, "fp16", "dynamo_backend"}
NUMBERS = ("num_processes", "num_machines", "machine_rank", "main_process_port")
SILENT = logging.Logger("silent", logging.CRITICAL + 1)


def read_file(path: str) -> tuple[dict[str, Any], list[Problem]]:
    """Read a config file and mend the keys that accelerate rejects, so that the rules can check all others.

    Returns:
        `tuple[dict[str, Any], list[Problem]]`: the mended file, and one problem per mended key.

    Raises:
        `FileError`: if the file cannot be read.
    """
    file = read_keys(path, "give accelerate's config file, before all flags")
    problems = [
        _unknown_key(key, file.pop(key)) for key in sorted(file.keys() - FILE_KEYS, key=str)
    ]
    # Without this, accelerate raises a bare Python error: 'int' object has no attribute 'split'.
    for key, example in {"gpu_ids": "all", "mixed_precision": '"no"'}.items():
        if not isinstance(file.get(key), str | None):
            problems.append(
                Problem(
                    f"accelerate stops at `{key}` (got YAML's {file[key]!r}, expected a string)",
                    f"write `{key}: {example}`, a number or a bare no in quotes",
                )
            )
            file[key] = example.strip('"')
    return file, [*problems, *filter(None, [_mended_number(file, key) for key in NUMBERS])]


def _mended_number(file: dict[str, Any], key: str) -> Problem | None:
    """Replace a number that is a string in place; accelerate compares it with numbers, and raises a `TypeError`."""
    value = file.get(key)
    if value is None or type(value) is int:
        return None
    del file[key]
    if not str(value).isdigit():
        return Problem(
            f"accelerate stops at `{key}` (got YAML's {value!r}, expected a number: a file expands no variables)",
            f"write a number, or leave `{key}` out and pass `--{key}` on the command line",
        )
    file[key] = int(value)
    if key == "machine_rank":  # the only one that accelerate converts
        return None
    return Problem(
        f"accelerate stops at `{key}` (got YAML's {value!r}, a string, expected a number)",
        f"write `{key}: {value}` without quotes",
    )


def _unknown_key(key: str, value: Any) -> Problem:
    cure = "delete it" + did_you_mean(key, FILE_KEYS)
    # `max_restarts` is a flag only; `zero_stage` is also a key of a section
    if key in flag_names():
        cure = (
            f"pass `--{key}` on the command line, or move it into its section (`deepspeed_config:`)"
        )
    return Problem(f"accelerate rejects a file with the key `{key}` (got {value!r})", cure)


def merge(args: argparse.Namespace) -> str:
    """Merge the config file into `args`, in place, with `accelerate launch`'s own code.

    Returns:
        `str`: name of the launcher that accelerate would call.
    """
    called: list[str] = []
    names = [name for name in vars(accelerate_launch) if name.endswith("_launcher")]
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(
                replaced(accelerate_launch, name, lambda *_, name=name: called.append(name))
            )
        # For `--mixed_precision bf16` accelerate checks the GPU, and a login node may have none.
        stack.enter_context(replaced(accelerate_launch, "is_bf16_available", lambda *_: True))
        # accelerate logs default thread counts
        stack.enter_context(replaced(accelerate_launch, "logger", SILENT))
        accelerate_launch.launch_command(args)
    return called[0]


def read_launch(
    path: str, flags: list[str], script: list[str], gpus_per_node: int, table: tuple[int, ...] = ()
) -> tuple[Launch | None, list[Problem]]:
    """Determine the launch that `accelerate launch --config_file path *flags *script` would run on this node.

    Args:
        path (`str`):
            Config file of `accelerate launch`.
        flags (`list[str]`):
            Further flags of `accelerate launch`.
        script (`list[str]`):
            The script and its arguments.
        gpus_per_node (`int`):
            GPUs of a node.
        table (`tuple[int, ...]`, *optional*):
            Ranks of each node (`--ranks`). `num_processes` of this node then is its number x the nodes, because
            accelerate divides by them.

    Returns:
        `tuple[Launch | None, list[Problem]]`: the launch, `None` if the file cannot be read or accelerate itself
            stops, and the problems so far.

    Raises:
        `SystemExit`: with status 2, see [`parse_flags`].
    """
    try:
        file, problems = read_file(path)
    except FileError as error:
        return None, [problem_of(error)]
    args = parse_flags(path, flags, script)
    nodes = max(1, args.num_machines or file.get("num_machines") or 1)
    if table and (problem := _table_problem(args, nodes, table)):
        problems.append(problem)
        table = ()
    elif table:
        node = file.get("machine_rank") if args.machine_rank is None else args.machine_rank
        # `rank_problems` reports a rank that is out of range
        args.num_processes = nodes * table[(node or 0) % nodes]
        args.nondefault.add("num_processes")
    problems += filter(None, [_missing_count(args, file, nodes, gpus_per_node)])
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as mended:
            yaml.safe_dump(file, mended)
            mended.flush()
            args.config_file = mended.name
            launcher = merge(args)
        launch, found = _launch(args, file, launcher, gpus_per_node, table)
    # accelerate raises ValueError, AssertionError, AttributeError, TypeError and more
    except Exception as error:
        return None, [
            *problems,
            Problem(
                f"accelerate refuses this launch ({type(error).__name__}: {error})",
                "follow that message; the other rules could not run",
            ),
        ]
    return launch, [*problems, *found]


def _table_problem(args: argparse.Namespace, nodes: int, table: tuple[int, ...]) -> Problem | None:
    """Return the reason why `--ranks` cannot be the ranks of the nodes, if there is one."""
    if len(table) != nodes:
        return Problem(
            f"`--ranks` has a number for each node (got {len(table)}, expected `num_machines` {nodes})",
            f"write {nodes} numbers with commas between them, that of node 0 first",
        )
    if args.num_processes is not None:
        return Problem(
            f"`--num_processes` and `--ranks` both set the ranks of this node (got {args.num_processes} and"
            f" {joined(table)}, expected one of them)",
            "leave `--num_processes` out",
        )
    if args.rdzv_backend != "static":
        return Problem(
            f"`--ranks` numbers the nodes, and this rendezvous does so as they arrive (got `rdzv_backend`"
            f" {args.rdzv_backend}, expected static)",
            "leave `--rdzv_backend` out",
        )
    return None


def _missing_count(
    args: argparse.Namespace, file: dict[str, Any], nodes: int, gpus_per_node: int
) -> Problem | None:
    """Fill in a missing `num_processes`, without which accelerate stops."""
    if (
        args.num_processes is not None
        or file.get("num_processes") is not None
        or file.get("distributed_type") == "NO"
    ):
        return None
    share = 1 if args.cpu or file.get("use_cpu") else max(1, gpus_per_node - 1)
    file["num_processes"] = share * nodes
    return Problem(
        f"`num_processes`, the total, is missing (got None, expected {share * nodes}: {share} a node)",
        f"write `num_processes: {share * nodes}`, or pass it as `--num_processes`",
    )


def _launch(
    args: argparse.Namespace,
    file: dict[str, Any],
    launcher: str,
    gpus_per_node: int,
    table: tuple[int, ...],
) -> tuple[Launch, list[Problem]]:
    args.machine_rank, port = args.machine_rank or 0, args.main_process_port
    run, environment = _prepared(args, launcher) if launcher in PREPARE else (None, {})
    deepspeed, problems = (
        read_deepspeed(args, environment) if args.use_deepspeed and environment else (None, [])
    )
    launch = Launch(
        args=args,
        file=file,
        launcher=launcher,
        ranks_per_node=(args.num_processes or 1) // max(1, args.num_machines),
        visible=_visible(args, gpus_per_node),
        gpus_per_node=gpus_per_node,
        port=port,
        torchrun=run,
        deepspeed=deepspeed,
        environment=environment,
        table=table,
    )
    return launch, problems


def _prepared(args: argparse.Namespace, launcher: str) -> tuple[argparse.Namespace, dict[str, str]]:
    """Return torchrun's arguments and the environment of the ranks."""
    # Accelerate would raise for a port in use; `rank_problems` reports it instead.
    with replaced(prepare, "is_port_in_use", lambda port: False):
        prepared = PREPARE[launcher](args)
    # Torchrun fills in the options that accelerate leaves open, from its defaults and `PET_*` variables.
    run = _filter_args(args, torchrun.get_args_parser(), ["--training_script", "script"])
    return run, prepared[1] if isinstance(prepared, tuple) else prepared


def rank_variables(gpu_ids: str | None) -> dict[str, str]:
    """Return the variables of the ranks, of which accelerate sets one for its `gpu_ids`."""
    return {**os.environ} if gpu_ids in ("all", None) else {**os.environ, CUDA: gpu_ids}


def _visible(args: argparse.Namespace, gpus_per_node: int) -> list[str] | None:
    if args.cpu or args.use_cpu:
        return None
    environ = rank_variables(args.gpu_ids)
    ids = environ.get(gpu_variable(environ))
    if ids is None:
        left = gpu_names(environ.get(ROCR)) if on_amd(environ) else []
        return [str(gpu) for gpu in range(len(left) or gpus_per_node)]
    names = [gpu.strip() for gpu in ids.split(",")]
    # CUDA ignores an index that does not exist, and all that follow it: "" and "-1" hide every GPU
    return list(takewhile(lambda name: name.isdigit() or name.startswith(("GPU-", "MIG-")), names))
