"""Command line of `trl-multinode plan`."""

import argparse
import json
import sys
from dataclasses import asdict

from ..text import positive
from . import PlanError
from .hardware import Cluster, parse_gpu, parse_nodes, parse_split
from .layouts import colocated_layouts, split_layouts
from .measured import read_run
from .model_size import model_size
from .task import Rows, Task
from .text import text_of
from .training import OFFLOADS

PROG = "trl-multinode plan"
DEFAULT_RESERVED = (1, 2, 4, 8)
MEAN_SHARE = 4  # the average completion is assumed to be a fourth of the longest


def own_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(PROG, allow_abbrev=False)
    parser.description = (
        "Report from a model's config alone whether training and engines fit into the memory of a cluster with each "
        "split of a node's GPUs and with colocation, how long a step takes, and which split to choose. No weights are "
        "read and nothing is started."
    )
    parser.add_argument(
        "model", help="name on the Hub, a folder with a config.json, or such a file"
    )
    parser.add_argument("--nodes", required=True, help="nodes x GPUs of a node, as in 4x8")
    parser.add_argument("--gpu", default="H100-80", help="name and GB of memory (default: H100-80)")
    parser.add_argument(
        "--prompt", type=positive, default=1024, help="tokens of a prompt (default: 1024)"
    )
    parser.add_argument(
        "--completion", type=positive, required=True, help="most tokens of a completion"
    )
    parser.add_argument(
        "--mean",
        type=positive,
        help="average tokens of a completion (default: of --run, or a fourth)",
    )
    parser.add_argument(
        "--rows", type=positive, required=True, help="completions of a round per node"
    )
    text = "rows of a micro-batch, `per_device_train_batch_size` (default: as many as fit)"
    parser.add_argument("--micro_rows", "--micro-rows", type=positive, help=text)
    parser.add_argument(
        "--splits",
        help="training + reserved GPUs of a node (default: 1, 2, 4, 8 reserved, half at most), as in 7+1,6+2",
    )
    text = "what is in host memory: nothing, the optimizer, or also the parameters (default: none)"
    parser.add_argument("--offload", choices=OFFLOADS, default="none", help=text)
    parser.add_argument(
        "--link", type=positive, default=400, help="Gbit/s into a node (default: 400)"
    )
    parser.add_argument(
        "--run", metavar="RUN_DIR", help="`output_dir` of a run: its seconds replace the estimates"
    )
    parser.add_argument(
        "--trust_remote_code",
        "--trust-remote-code",
        action="store_true",
        help="run the model's code",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with bytes and seconds")
    return parser


def main(argv: list[str]) -> int:
    """Print a plan.

    Returns:
        `int`: 0 if a layout fits, 1 if none does, 2 for arguments that cannot be planned.
    """
    options = own_parser().parse_args(argv)
    try:
        task, pairs = task_of(options)
    except PlanError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    splits = [
        layout for training, reserved in pairs for layout in split_layouts(task, training, reserved)
    ]
    colocated = colocated_layouts(task)
    if options.json:
        layouts = [asdict(each) | {"fits": each.fits} for each in (*splits, *colocated)]
        print(json.dumps({"task": asdict(task), "layouts": layouts}, indent=1))
    else:
        print(text_of(task, splits, colocated))
    return 0 if any(each.fits for each in (*splits, *colocated)) else 1


def task_of(options: argparse.Namespace) -> tuple[Task, list[tuple[int, int]]]:
    """Read the task and the splits; what is fast to check comes before the model.

    Raises:
        `PlanError`: for a value that cannot be planned.
    """
    nodes, gpus = parse_nodes(options.nodes)
    cluster = Cluster(nodes, gpus, parse_gpu(options.gpu), options.link * 1e9 / 8)
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
