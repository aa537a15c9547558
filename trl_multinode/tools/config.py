"""`trl-multinode config 4x8`: write a config file of `accelerate launch`, and print the line that starts a node.

The files of `accelerate_configs/` are this command's output. It imports no library of a run, so it works on any login
node.
"""

import argparse

from .layout import Layout, nodes_and_gpus
from .text import Parser, fill, positive, write_new

PROG = "trl-multinode config"


def parse(argv: list[str]) -> tuple[Layout, argparse.Namespace]:
    """Parse the command line.

    Raises:
        `SystemExit`: with status 2, for a layout that cannot run.
    """
    parser = Parser(PROG)
    parser.description = (
        "Write a config file of `accelerate launch`, and print the line that starts a node."
    )
    parser.add_argument(
        "layout",
        type=nodes_and_gpus,
        help="nodes x GPUs of a node, as in 4x8; with --cpu nodes x training ranks",
    )
    parser.add_argument("--engine_gpus", type=positive, help="GPUs of a node for vLLM (default: 1)")
    parser.add_argument(
        "--zero", type=int, choices=(1, 2, 3), default=3, help="stage of ZeRO (default: 3)"
    )
    parser.add_argument(
        "--cpu", action="store_true", help="nodes without GPUs, all of them on this machine"
    )
    parser.add_argument(
        "--out", metavar="FILE", help="file to write (default: named as in accelerate_configs/)"
    )
    options = parser.parse_args(argv)
    nodes, devices = options.layout
    engine_gpus = options.engine_gpus or 1
    if options.cpu or devices == 1:
        if options.engine_gpus:
            why = (
                "the engine of a CPU node has no device"
                if options.cpu
                else "the only GPU trains and generates"
            )
            parser.error(f"{why} (got --engine_gpus {engine_gpus}, expected none): leave it out")
        engine_gpus = 0
    if engine_gpus >= devices:
        parser.error(
            f"no GPU is left to train (got --engine_gpus {engine_gpus} of {devices}, expected fewer)"
            f": pass a smaller number"
        )
    return Layout(nodes, devices - engine_gpus, 0 if options.cpu else devices), options


def name_of(layout: Layout) -> str:
    """Return the name of a config file. 8 GPUs a node, split 7+1, are the case that the name does not mention."""
    suffix = {0: "_cpu", 1: "_1gpu"}.get(layout.gpus, f"_{layout.ranks}+{layout.spare}")
    return f"{layout.nodes}node{suffix.replace('_7+1', '')}.yaml"


def main(argv: list[str]) -> int:
    """Write the file and print the launch line; return 1 if the file exists or cannot be written."""
    layout, options = parse(argv)
    path = options.out or name_of(layout)
    filled = fill("accelerate.yaml", layout=layout, zero=options.zero, path=path)
    if not write_new(path, str(filled), PROG):
        return 1
    print(f"Wrote {path}: {filled.summary}.\n\n{filled.where}\n  {filled.launch}\n")
    print(f"Check it first; this starts nothing:\n  {filled.check}")
    if layout.nodes > 1 and layout.gpus:
        script = f'--script "train.py{filled.script_flags}"'
        print(
            f"A job file: trl-multinode render slurm|k8s|ssh|skypilot {path}{layout.gpus_flag} {script}"
        )
    return 0
