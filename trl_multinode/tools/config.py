"""`trl-multinode config 4x8`: write a config file of `accelerate launch`, and print the line that starts a node.

The files of `accelerate_configs/` are this command's output. It imports no library, so it runs on any login node.
"""

import argparse
import re
import sys

from .config_file import render
from .layout import Layout

PROG = "trl-multinode config"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROG, allow_abbrev=False)
    parser.description = "Write a config file of `accelerate launch`, and print the line that starts a node."
    parser.add_argument("layout", help="nodes x GPUs of a node, as in 4x8; with --cpu nodes x training ranks")
    parser.add_argument(
        "--engine_gpus", "--engine-gpus", type=int, choices=(1, 2, 4), help="GPUs of a node for vLLM (default: 1)"
    )
    parser.add_argument("--zero", type=int, choices=(1, 2, 3), default=3, help="stage of ZeRO (default: 3)")
    parser.add_argument("--cpu", action="store_true", help="nodes without GPUs, all of them on this machine")
    parser.add_argument("--out", metavar="FILE", help="file to write (default: named as in accelerate_configs/)")
    return parser


def parse(argv: list[str]) -> tuple[Layout, argparse.Namespace]:
    """Parse the command line.

    Raises:
        `SystemExit`: with status 2, for a layout that cannot run.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", options.layout)
    if match is None:
        parser.error(f"a layout is nodes x GPUs of a node (got {options.layout!r}, expected for example 4x8)")
    layout = Layout(int(match[1]), int(match[2]), options.engine_gpus or 1, options.zero, options.cpu)
    if options.engine_gpus and (layout.cpu or layout.shared):
        why = "the engine of a CPU node has no device" if layout.cpu else "the only GPU trains and generates"
        parser.error(f"{why} (got --engine_gpus {options.engine_gpus}, expected none): leave it out")
    if layout.ranks < 1:
        what = f"no GPU is left to train (got --engine_gpus {layout.engine_gpus} of {layout.devices}"
        parser.error(f"{what}, expected fewer): pass a smaller number")
    return layout, options


def main(argv: list[str] | None = None) -> int:
    """Write the file and print the launch line; return 1 if the file exists or cannot be written."""
    layout, options = parse(sys.argv[1:] if argv is None else argv)
    path = options.out or layout.file_name
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(render(layout, path))
    except OSError as error:
        reason = "it exists" if isinstance(error, FileExistsError) else error.strerror
        print(f"{PROG}: {path} is not written ({reason}): name another file with --out", file=sys.stderr)
        return 1
    print(f"Wrote {path}: {layout.summary()}.\n\n{layout.where()}\n  {layout.launch_line(path)}\n")
    print(f"Check it first; this starts nothing:\n  {layout.check_line(path)}")
    if layout.nodes > 1 and not layout.cpu:
        print(f"A job file: {layout.render_line(path)}")
    return 0
