"""Command line of `trl-multinode plan`."""

import argparse
import json
import shlex
import sys
from dataclasses import asdict, replace

from ..check import Launch, Problem, check
from ..layout import Layout, nodes_and_gpus
from ..text import Parser, positive
from . import PlanError
from .hardware import Cluster, parse_gpu, parse_split
from .layouts import colocated_layouts, mixed_layouts, split_layouts
from .measured import read_run
from .model_size import model_size
from .task import Rows, Task
from .text import Asked, text_of
from .training import OFFLOADS

PROG = "trl-multinode plan"
DEFAULT_RESERVED = (1, 2, 4, 8)
MEAN_SHARE = 4  # the average completion is assumed to be a fourth of the longest


def own_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = Parser(PROG)
    parser.description = (
        "Report from a model's config alone whether training and engines fit into the memory of a cluster with each "
        "split of a node's GPUs and with colocation, how long a step takes, and which split to choose. No weights are "
        "read and nothing is started."
    )
    parser.usage = (
        "%(prog)s MODEL --nodes NxG --completion N --rows N [options]\n"
        "       %(prog)s FILE SCRIPT [its arguments] [options]"
    )
    parser.add_argument(
        "model",
        help="name on the Hub, a folder with a config.json, or such a file; or a config file of `accelerate launch`, "
        "with a script whose arguments say model, batch and lengths",
    )
    parser.add_argument("script", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--nodes", type=nodes_and_gpus, help="nodes x GPUs of a node, as in 4x8")
    text = "name and GB of memory (default: H100-80)"
    parser.add_argument("--gpu", type=parse_gpu, default="H100-80", help=text)
    parser.add_argument(
        "--prompt", type=positive, default=1024, help="tokens of a prompt (default: 1024)"
    )
    parser.add_argument("--completion", type=positive, help="most tokens of a completion")
    parser.add_argument(
        "--mean",
        type=positive,
        help="average tokens of a completion (default: of --run, or a fourth)",
    )
    parser.add_argument("--rows", type=positive, help="completions of a round per node")
    text = "rows of a micro-batch, `per_device_train_batch_size` (default: as many as fit)"
    parser.add_argument("--micro_rows", type=positive, help=text)
    parser.add_argument(
        "--splits",
        help="training + reserved GPUs of every node, as in 7+1,6+2 (default: 1, 2, 4, 8 reserved, half at most, and "
        "layouts with different nodes)",
    )
    text = "what is in host memory: nothing, the optimizer, or also the parameters (default: none)"
    parser.add_argument("--offload", choices=OFFLOADS, default="none", help=text)
    parser.add_argument(
        "--link", type=positive, default=400, help="Gbit/s into a node (default: 400)"
    )
    parser.add_argument(
        "--run", metavar="RUN_DIR", help="`output_dir` of a run: its seconds replace the estimates"
    )
    parser.add_argument("--trust_remote_code", action="store_true", help="run the model's code")
    parser.add_argument("--json", action="store_true", help="print JSON, with bytes and seconds")
    return parser


def main(argv: list[str]) -> int:
    """Print a plan.

    Returns:
        `int`: 0 if a layout fits, 1 if none does, 2 for arguments that cannot be planned.
    """
    try:
        options, asked = parse(argv)
        task, pairs = task_of(options)
    except PlanError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    splits = [
        layout
        for training, _ in pairs
        for layout in split_layouts(task, (training,) * task.cluster.nodes)
    ]
    if options.splits is None:
        splits += mixed_layouts(task, pairs)
    colocated = colocated_layouts(task)
    if options.json:
        layouts = [asdict(each) | {"fits": each.fits} for each in (*splits, *colocated)]
        print(json.dumps({"task": asdict(task), "layouts": layouts}, indent=1))
    else:
        print(text_of(task, splits, colocated, asked))
    return 0 if any(each.fits for each in (*splits, *colocated)) else 1


def parse(argv: list[str]) -> tuple[argparse.Namespace, Asked]:
    """Parse the command line; return the options, and what the commands at the end of the plan repeat.

    Raises:
        `SystemExit`: with status 2, for an unknown or missing option.
        `PlanError`: if config file and script do not say what no option does.
    """
    parser = own_parser()
    options, words = parser.parse_known_args(argv)
    script = [options.script, *words] if options.script else []
    if words and not script:
        parser.error(f"unrecognized arguments: {' '.join(words)}")
    asked = Asked(
        shlex.join([*(script or ["train.py"]), *_numbers(options)]), options.rows is not None
    )
    if script:
        asked = read_script(options, script, asked)
    missing = [name for name in ("nodes", "completion", "rows") if getattr(options, name) is None]
    if missing:
        parser.error(f"--{missing[0]} is required, unless a config file and a script give it")
    return options, asked


def _numbers(options: argparse.Namespace) -> list[str]:
    """Return the arguments of a script for model and lengths that were given to the plan."""
    flags = [] if options.script else ["--model_name_or_path", options.model]
    if options.completion:
        flags += ["--max_completion_length", str(options.completion)]
    return flags


def read_script(options: argparse.Namespace, script: list[str], asked: Asked) -> Asked:
    """Fill in what a config file of accelerate and the arguments of a script say, where no option does.

    Returns:
        [`Asked`]: with the config file and its layout.

    Raises:
        `PlanError`: if they name no model, or cannot be read.
    """
    path, (_, gpus) = options.model, options.nodes or (1, 8)
    node = ["--machine_rank", "0", "--main_process_ip", "HOST0"]
    launch, problems = check(path, [*node, *script], gpus_per_node=gpus, port=False)
    if launch is None or launch.script.batch is None or launch.script.model is None:
        reason = _reason(launch, problems)
        raise PlanError(
            f"{path} and {script[0]} do not say model and batch: {reason}. Give the model instead of the file, with "
            "--nodes, --completion and --rows."
        )
    found, batch = launch.script.values, launch.script.batch
    options.model = launch.script.model
    options.nodes = options.nodes or (launch.num_nodes, gpus)
    options.completion = options.completion or found.get("max_completion_length")
    options.rows = options.rows or batch.world(launch.num_ranks) // launch.num_nodes
    if options.micro_rows is None and not found.get("micro_batch_tokens"):
        options.micro_rows = batch.per_device_train_batch_size
    layout = Layout(launch.num_nodes, launch.ranks_per_node, gpus)
    return replace(asked, file=path, layout=layout, group=batch.num_generations)


def _reason(launch: Launch | None, problems: list[Problem]) -> str:
    """Return the reason why a launch says no model or no batch."""
    if problems:
        return problems[0].what
    if launch is not None and launch.script.notes:
        return launch.script.notes[0]
    return "no `--model_name_or_path` is among the script's arguments"


def task_of(options: argparse.Namespace) -> tuple[Task, list[tuple[int, int]]]:
    """Read the task and the splits; what is fast to check comes before the model.

    Raises:
        `PlanError`: for a value that cannot be planned.
    """
    nodes, gpus = options.nodes
    cluster = Cluster(nodes, gpus, options.gpu, options.link * 1e9 / 8)
    pairs = splits_of(options.splits, gpus)
    run = read_run(options.run) if options.run else None
    measured = run.mean_length if run else None
    rows = Rows(
        number=options.rows,
        prompt=options.prompt,
        mean=float(options.mean or measured or options.completion / MEAN_SHARE),
        longest=options.completion,
    )
    if rows.mean > rows.longest:
        raise PlanError(
            f"completions are longer on average than at most: {rows.mean:.0f} > {rows.longest}."
        )
    model = model_size(options.model, options.trust_remote_code, rows.prompt + rows.longest)
    return Task(model, cluster, rows, options.offload, options.micro_rows, run), pairs


def splits_of(text: str | None, gpus: int) -> list[tuple[int, int]]:
    """Return the splits that were named, else those that reserve 1, 2, 4 or 8 GPUs and at most half of them."""
    if text is not None:
        return [parse_split(each, gpus) for each in text.split(",")]
    pairs = [(gpus - reserved, reserved) for reserved in DEFAULT_RESERVED if 2 * reserved <= gpus]
    if not pairs:
        raise PlanError(
            "a node of one GPU has no split: the GPU trains and generates (`--nodes` from Nx2)."
        )
    return pairs
