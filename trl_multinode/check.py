"""What `accelerate launch` would really run on this node. Starts nothing, loads no model, touches no GPU.

    python -m trl_multinode.check accelerate_configs/4node.yaml --machine_rank 1 --main_process_ip HOST0
    python -m trl_multinode.check FILE [flags of accelerate launch] [--gpus_per_node 8] [batch arguments of the script]

File and flags go through accelerate's own parser, loader, choice of launcher and preparation for torchrun; only the
launchers themselves are replaced. Every problem is printed with its cure, not only the first. Exit status: 0 without
problems, 1 with some, 2 when the command line cannot be read.
"""

import argparse
import difflib
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from math import gcd, lcm
from typing import Any
from unittest import mock

import torch.distributed.run as torchrun
import yaml
from accelerate.commands import launch as accelerate_launch
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import _filter_args, prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from accelerate.utils.other import is_port_in_use
from rich.console import Console
from rich.table import Table

# Accelerate's launchers that end in torchrun, each with what it does to the arguments first.
PREPARE = {"deepspeed_launcher": prepare_deepspeed_cmd_env, "multi_gpu_launcher": prepare_multi_gpu_env}
# What the config loader takes: its fields, and two older spellings that it converts.
FILE_KEYS = {*ClusterConfig.__dataclass_fields__, "fp16", "dynamo_backend"}
# Merged in a way of their own, so that the merged value need not equal the file's.
MERGED_APART = {"compute_environment", "distributed_type", "mixed_precision", "debug", "fp16", "dynamo_backend"}
MERGED_APART |= {"main_process_port", "machine_rank"}
TPU_KEYS = {"tpu_name", "tpu_zone", "command_file", "commands", "tpu_vm", "tpu_env", "main_training_function"}


@dataclass(frozen=True)
class Problem:
    """A launch that would fail, or do something else than its file says, and the cure."""

    what: str
    cure: str


@dataclass(frozen=True)
class Batch:
    """Batch arguments of the script, with the defaults of TRL and transformers."""

    num_generations: int = 8
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    steps_per_generation: int | None = None
    generation_batch_size: int | None = None

    @property
    def steps(self) -> int:
        return self.steps_per_generation or self.gradient_accumulation_steps

    def world(self, num_ranks: int) -> int:
        """Completions that all ranks generate at once."""
        return self.generation_batch_size or self.per_device_train_batch_size * num_ranks * self.steps


@dataclass(frozen=True)
class Launch:
    """One node's share of a launch, as accelerate understood file and flags."""

    args: argparse.Namespace  # merged with the file, prepared for torchrun
    file: dict[str, Any]  # without what accelerate would stop at
    launcher: str  # accelerate's launcher function
    num_nodes: int
    ranks_per_node: int  # floored, as accelerate does
    started: int  # processes that really start on this node
    visible: list[str] | None  # GPUs that they see, by the node's numbers; `None` on CPU
    port: int | None  # as asked for, before accelerate chooses one
    endpoint: str | None = None  # rendezvous backend, host and port; `None` without torchrun

    @property
    def num_ranks(self) -> int:
        """Of all nodes, as the file means them."""
        return self.ranks_per_node * self.num_nodes

    @property
    def own_launcher(self) -> str | None:
        """DeepSpeed's launcher, where that runs in place of torchrun."""
        name = self.args.deepspeed_multinode_launcher
        return name if self.args.use_deepspeed and self.num_nodes > 1 and name != "standard" else None

    @property
    def rank_in_file(self) -> bool:
        return self.file.get("machine_rank") is not None and "machine_rank" not in self.args.nondefault


# ---- reading: accelerate's own code, with its launchers replaced ----


def _launch_parser() -> argparse.ArgumentParser:
    parser = accelerate_launch.launch_command_parser()
    parser.prog = "python -m trl_multinode.check"
    parser.usage = "%(prog)s FILE [flags of accelerate launch]"  # accelerate's own is a hundred lines
    return parser


def _flag_names() -> set[str]:
    return set(vars(_launch_parser().parse_args(["script"])))


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f", did you mean {close[0]}?" if close else ""


def parse_flags(path: str, flags: list[str]) -> argparse.Namespace:
    """Parses flags with the parser of `accelerate launch`. A script and its arguments may follow them.

    Raises:
        `SystemExit`: with status 2, for a flag that `accelerate launch` does not know.
    """
    parser = _launch_parser()
    args, unknown = parser.parse_known_args(["--config_file", path, *flags, "script"])
    if unknown:
        hint = _did_you_mean(unknown[0], [f"--{name}" for name in vars(args)])
        parser.error(f"`accelerate launch` has no flag {unknown[0]}{hint}")
    if args.config_file != path:
        parser.error(f"two config files (got {path} and {args.config_file}): give one, without --config_file")
    return args


def read_file(path: str) -> tuple[dict[str, Any], list[Problem]]:
    """Reads a config file and mends what accelerate would stop at, so that the other rules still see the rest.

    Returns:
        `tuple[dict[str, Any], list[Problem]]`: the mended file, and a problem for every mend.

    Raises:
        `OSError`, `yaml.YAMLError`: the file cannot be read.
        `ValueError`: it holds no keys.
    """
    with open(path, encoding="utf-8") as stream:
        file = yaml.safe_load(stream)
    if not isinstance(file, dict):
        raise ValueError("it holds no keys")
    problems = [_unknown_key(key, file.pop(key)) for key in sorted(file.keys() - FILE_KEYS, key=str)]
    # Else a bare Python error of accelerate: 'int' object has no attribute 'split'.
    for key, example in {"gpu_ids": "all", "mixed_precision": '"no"'}.items():
        if not isinstance(file.get(key), str | None):
            what = f"accelerate stops at `{key}` (got YAML's {file[key]!r}, expected a string)"
            problems.append(Problem(what, f"write `{key}: {example}`, a number or a bare no in quotes"))
            file[key] = example.strip('"')
    return file, problems


def _unknown_key(key: str, value: Any) -> Problem:
    cure = "delete it" + _did_you_mean(key, FILE_KEYS)
    if key in _flag_names():  # `max_restarts` is a flag only; `zero_stage` may also stand in its section
        cure = f"pass `--{key}` on the command line, or move it into its section (`deepspeed_config:`)"
    return Problem(f"accelerate rejects a file with the key `{key}` (got {value!r})", cure)


def merge(args: argparse.Namespace) -> str:
    """Merges the config file into `args`, in place, by `accelerate launch`'s own code.

    Returns:
        `str`: name of the launcher that accelerate would have called.
    """
    called: list[str] = []
    names = [name for name in vars(accelerate_launch) if name.endswith("_launcher")]
    fakes: dict[str, Any] = {name: lambda *_, name=name: called.append(name) for name in names}
    # For `--mixed_precision bf16` accelerate asks the GPU, and this may be a login node.
    fakes["is_bf16_available"] = lambda *_: True
    fakes["logger"] = mock.Mock()  # logs default thread counts
    with mock.patch.multiple(accelerate_launch, **fakes):
        accelerate_launch.launch_command(args)
    return called[0]


def plan(path: str, flags: list[str], gpus_per_node: int) -> tuple[Launch | None, list[Problem]]:
    """Works out what `accelerate launch --config_file path *flags` would run on this node.

    Returns:
        `tuple[Launch | None, list[Problem]]`: `None` where accelerate itself stops, and the problems so far.

    Raises:
        `SystemExit`: with status 2, see [`parse_flags`].
    """
    try:
        file, problems = read_file(path)
    except (OSError, ValueError, yaml.YAMLError) as error:
        return None, [Problem(f"cannot read `{path}` ({error})", "give accelerate's config file, before all flags")]
    args = parse_flags(path, flags)
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as mended:
            yaml.safe_dump(file, mended)
            mended.flush()
            args.config_file = mended.name if problems else path
            launcher = merge(args)
        launch = _launch(args, file, launcher, gpus_per_node)
    except Exception as error:  # its checks raise ValueError, AssertionError, AttributeError, TypeError and more
        what = f"accelerate refuses this launch ({type(error).__name__}: {error})"
        return None, [*problems, Problem(what, "follow that sentence; the other rules could not be looked at")]
    return launch, problems


def _launch(args: argparse.Namespace, file: dict[str, Any], launcher: str, gpus_per_node: int) -> Launch:
    args.machine_rank, port = args.machine_rank or 0, args.main_process_port
    endpoint = _endpoint(args, launcher) if launcher in PREPARE else None
    nodes = max(1, args.num_machines)
    ranks = (args.num_processes or 1) // nodes
    started = 1 if launcher == "simple_launcher" else ranks
    return Launch(args, file, launcher, nodes, ranks, started, _visible(args, gpus_per_node), port, endpoint)


def _endpoint(args: argparse.Namespace, launcher: str) -> str:
    with mock.patch("accelerate.utils.launch.is_port_in_use", lambda port: False):  # raises; `rank_problems` asks it
        PREPARE[launcher](args)
    # What accelerate leaves open torchrun fills in, from its defaults and `PET_*` variables.
    run = _filter_args(args, torchrun.get_args_parser(), ["--training_script", "script"])
    return f"{run.rdzv_backend}, {torchrun.get_rdzv_endpoint(run)}"


def _visible(args: argparse.Namespace, gpus_per_node: int) -> list[str] | None:
    if args.cpu or args.use_cpu:
        return None
    ids = os.environ.get("CUDA_VISIBLE_DEVICES") if args.gpu_ids == "all" else args.gpu_ids
    if ids is None:
        return [str(gpu) for gpu in range(gpus_per_node)]
    return [gpu.strip() for gpu in ids.split(",") if gpu.strip()]


# ---- rules: each yields the problems of one kind ----


def launcher_problems(launch: Launch) -> Iterator[Problem]:
    """Something else would run than one torchrun per node."""
    args, kind = launch.args, launch.file["distributed_type"]
    if launch.own_launcher:
        what = f"DeepSpeed's own launcher would start the ranks, through ssh (got {launch.own_launcher}, expected"
        what += " standard); accelerate also appends this environment, tokens included, to `.deepspeed_env`"
        yield Problem(what, "write `deepspeed_multinode_launcher: standard` under `deepspeed_config:`")
    if launch.launcher == "simple_launcher" and (args.num_processes or 1) > 1:
        cause = "--cpu" if args.cpu else f"distributed_type: {kind}"
        what = f"`{cause}` starts one process a node and says nothing (got 1, expected {launch.ranks_per_node})"
        cure = "write `distributed_type: DEEPSPEED`; without a GPU add `use_cpu: true` and leave `--cpu` out"
        yield Problem(what, cure)
    if launch.launcher not in {*PREPARE, "simple_launcher"} or args.use_megatron_lm:
        what = f"the trainer cannot run under this launch (got {kind}, expected DEEPSPEED, FSDP or MULTI_GPU)"
        yield Problem(what, "write `distributed_type: DEEPSPEED`")


def count_problems(launch: Launch, gpus_per_node: int) -> Iterator[Problem]:
    """`num_processes` is the total, and accelerate floors every node's share of it."""
    total, nodes = launch.args.num_processes or 1, launch.num_nodes
    if total % nodes == 0:
        return
    most = total if launch.visible is None else max(1, gpus_per_node - 1)
    shares = sorted({min(max(1, share), most) for share in (total // nodes, total // nodes + 1)})
    fits = " or ".join(f"{share * nodes} ({share} a node)" for share in shares)
    what = f"`num_processes`, the total, does not divide by {nodes} nodes: accelerate runs {total // nodes} on each"
    yield Problem(f"{what} (got {total}, expected {fits})", f"write `num_processes:` {fits}")


def rank_problems(launch: Launch) -> Iterator[Problem]:
    """What the nodes need to find each other."""
    rank, last = launch.args.machine_rank, launch.num_nodes - 1
    if not 0 <= rank <= last:
        what = f"`machine_rank` is out of range (got {rank}, expected 0 to {last})"
        yield Problem(what, f"pass `--machine_rank` 0 to {last}, another one on each node, or correct `num_machines`")
    if last == 0:
        return
    if not launch.rank_in_file and "machine_rank" not in launch.args.nondefault:
        what = f"`machine_rank` is missing, and accelerate takes 0 on every node (got None, expected 0 to {last})"
        yield Problem(what, "pass `--machine_rank K`, another K on each node (`$SLURM_NODEID` inside `srun`)")
    if launch.args.main_process_ip is None:
        what = "`main_process_ip` is missing, nodes would look for a host named None (got None, expected an address)"
        yield Problem(what, "pass `--main_process_ip HOST0`, the address of node 0, on every node")
    if launch.port == 0:
        what = "every node would choose a port of its own (`main_process_port` got 0, expected one number for all)"
        yield Problem(what, "write `main_process_port: 29500`")
    elif rank == 0 and is_port_in_use(launch.port):
        what = f"port {launch.port or 29500} is taken on this node, where rank 0 listens (expected a free one)"
        yield Problem(what, "pass another `--main_process_port`, the same on every node")


def device_problems(launch: Launch, gpus_per_node: int) -> Iterator[Problem]:
    """The engine runs on the GPUs that a node's processes see and that none of them trains on."""
    if launch.visible is None or launch.started < len(launch.visible):
        return
    most = gpus_per_node - 1
    if launch.started > most:
        what = f"no GPU is left over for the engine (got {launch.started} processes a node, expected {most} or less)"
        fewer = f"write `num_processes: {launch.num_nodes * most}`, the total, or " if most else ""
        yield Problem(what, f"{fewer}name a training GPU in the trainer's `vllm_devices`, to share it")
        return
    by_ids = launch.args.gpu_ids != "all"
    setting = f"`gpu_ids` {launch.args.gpu_ids}" if by_ids else "CUDA_VISIBLE_DEVICES of this shell"
    what = f"{setting} hides the reserved GPU from the engine too (got {len(launch.visible)} visible GPUs for"
    what += f" {launch.started} processes, expected {gpus_per_node})"
    cure = "write `gpu_ids: all`, and no `--gpu_ids`: a rank takes the GPU of its own number and leaves the rest"
    yield Problem(what, cure if by_ids else "unset CUDA_VISIBLE_DEVICES")


def key_problems(launch: Launch) -> Iterator[Problem]:
    """Keys of the file that accelerate loads and nothing reads."""
    for key, value in launch.file.items():
        if not value or key in launch.args.nondefault or (key, value) == ("main_training_function", "main"):
            continue
        effective = getattr(launch.args, key, None)
        if not _is_read(key, launch):
            yield Problem(f"nothing reads `{key}` in this launch (got {value!r})", "delete it from the file")
        elif isinstance(value, dict):
            yield from _section_problems(key, value)
        elif key not in MERGED_APART and _plain(effective) != _plain(value):
            what = f"accelerate ignores `{key}` in a file (got {value!r}, but {effective!r} would run)"
            yield Problem(what, f"delete it from the file, or pass `--{key}` on the command line")


def _is_read(key: str, launch: Launch) -> bool:
    args = launch.args
    readers = {
        "deepspeed_config": args.use_deepspeed,
        "fsdp_config": args.use_fsdp,
        "megatron_lm_config": args.use_megatron_lm,
        "mpirun_config": launch.launcher == "simple_launcher",
        "fp8_config": args.mixed_precision == "fp8",
        # `prepare_deepspeed_cmd_env` hands on no ACCELERATE_DYNAMO_* variable; the other launchers do.
        "dynamo_config": not args.use_deepspeed,
        "dynamo_backend": not args.use_deepspeed or launch.file[key] == "NO",
    }
    return bool(readers.get(key, key not in TPU_KEYS or args.tpu))


def _section_problems(section: str, values: dict[str, Any]) -> Iterator[Problem]:
    """Accelerate sets every key of a section on its arguments; only those that are flags too have a reader."""
    prefix = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}.get(section, "")
    known = {*_flag_names(), "fsdp_ignored_modules"}
    for key in values:
        if prefix + str(key).removeprefix(prefix) not in known:
            what = f"nothing reads `{key}` under `{section}` (got {values[key]!r})"
            yield Problem(what, "delete it" + _did_you_mean(key, known))


def _plain(value: Any) -> str:
    """To accelerate, `downcast_bf16: 'no'` and `False` are the same."""
    return {"no": "false", "yes": "true"}.get(str(value).lower(), str(value).lower())


def deepspeed_problems(launch: Launch, batch: Batch) -> Iterator[Problem]:
    """The file's value is not ours to choose: transformers compares it with the script's, once the model is loaded."""
    theirs = (launch.file.get("deepspeed_config") or {}).get("gradient_accumulation_steps", "auto")
    if theirs not in ("auto", batch.gradient_accumulation_steps):
        what = f"every rank would raise: `gradient_accumulation_steps` is not the script's (got {theirs}, expected"
        what += f" {batch.gradient_accumulation_steps})"
        yield Problem(what, "delete it from the file, the trainer fills it in")


def batch_problems(batch: Batch, num_ranks: int) -> Iterator[Problem]:
    """The arithmetic of `GRPOConfig`: all ranks of all nodes together generate whole groups."""
    group, rows, world = batch.num_generations, batch.per_device_train_batch_size, batch.world(num_ranks)
    if group < 2:
        yield Problem(f"a group of one has no advantage (`num_generations` got {group}, expected 2 or more)", "pass 8")
        return
    if batch.generation_batch_size and batch.steps_per_generation:
        what = f"TRL takes only one of `generation_batch_size` (got {world}) and `steps_per_generation`"
        yield Problem(f"{what} (got {batch.steps_per_generation})", "leave one of them out")
    if batch.generation_batch_size and (world % group or world % (rows * num_ranks)):
        what = f"`generation_batch_size` does not divide (got {world}, expected a multiple of {rows} rows x"
        what += f" {num_ranks} ranks and of {group} generations)"
        fits = _multiples(lcm(rows * num_ranks, group), near=world)
        yield Problem(what, f"with {num_ranks} ranks pass `--generation_batch_size` {fits}")
    elif world % group:
        what = f"the world batch does not divide by `num_generations` (got {world} completions = {rows} rows x"
        what += f" {num_ranks} ranks x {batch.steps} steps, expected a multiple of {group})"
        yield Problem(what, f"with {num_ranks} ranks pass {_values_that_work(batch, num_ranks)}")


def _values_that_work(batch: Batch, num_ranks: int) -> str:
    """The values nearest to the present ones, for a change of one argument."""
    group, rows, world = batch.num_generations, batch.per_device_train_batch_size, batch.world(num_ranks)
    steps_name = "steps_per_generation" if batch.steps_per_generation else "gradient_accumulation_steps"
    divisors = [size for size in range(2, world + 1) if world % size == 0]
    nearest = sorted(sorted(divisors, key=lambda size: abs(size - group))[:4])
    return (
        f"`--per_device_train_batch_size` {_multiples(group // gcd(group, num_ranks * batch.steps), near=rows)}, "
        f"or `--{steps_name}` {_multiples(group // gcd(group, num_ranks * rows), near=batch.steps)}, "
        f"or `--num_generations` {_either(nearest)}"
    )


def _multiples(step: int, near: int) -> str:
    first = max(1, near // step)
    return _either([step * (first + i) for i in range(3)])


def _either(values: list[int]) -> str:
    return " or ".join(filter(None, [", ".join(map(str, values[:-1])), *map(str, values[-1:])]))


# ---- the report ----


def check(
    path: str, flags: list[str], batch: Batch | None = None, gpus_per_node: int = 8
) -> tuple[Launch | None, list[Problem]]:
    """Looks at a launch with every rule.

    Args:
        path (`str`):
            The config file.
        flags (`list[str]`):
            Further arguments of `accelerate launch`.
        batch ([`Batch`], *optional*):
            Batch arguments of the script.
        gpus_per_node (`int`, *optional*, defaults to `8`):
            GPUs of a node.

    Returns:
        `tuple[Launch | None, list[Problem]]`: what would run, `None` where accelerate stops, and all problems.

    Raises:
        `SystemExit`: with status 2, for a flag that `accelerate launch` does not know.
    """
    launch, problems = plan(path, flags, gpus_per_node)
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
    """What is right and may still surprise."""
    args = launch.args
    if launch.visible is None and launch.endpoint:
        yield "`use_cpu` does not reach the ranks through this launcher: the script needs its own `--use_cpu true`"
    if launch.num_nodes == 1 and launch.endpoint and is_port_in_use(args.main_process_port):
        yield f"port {args.main_process_port} is taken: on a single node, accelerate takes another one by itself"
    if launch.num_nodes > 1 and args.main_process_ip in ("127.0.0.1", "localhost", "::1"):
        yield f"`main_process_ip` {args.main_process_ip}: all {launch.num_nodes} nodes must be this one machine"
    if launch.num_nodes > 1 and launch.rank_in_file:
        yield f"`machine_rank` {args.machine_rank} is the file's: every node that uses this file has that rank"


def table(launch: Launch, batch: Batch | None) -> Table:
    """What runs on this node, one line per fact."""
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
    """Splits the command line into the file, flags of `accelerate launch`, and our own arguments."""
    parser = argparse.ArgumentParser("python -m trl_multinode.check", allow_abbrev=False)
    parser.description = "What `accelerate launch` would really run on this node, and what is wrong with it."
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
    """Prints the report and returns the exit status: 0 without problems, 1 with some."""
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


if __name__ == "__main__":
    sys.exit(main())
