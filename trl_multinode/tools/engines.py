"""`trl-multinode engines`: engines on this node for a run on other nodes."""

import argparse
import os
import re
from pathlib import Path

from ..run.endings.exit_codes import CONFIGURATION
from .text import positive

PORT = ":29500"  # default of `main_process_port`
DESCRIPTION = """\
Start engines on this node for a run on other nodes, and serve the runs at HOST:PORT, one after the other. HOST and
PORT are `main_process_ip` and `main_process_port` of the run, which needs `remote_engines`. This process may start
before the run. It ends with SIGTERM, Ctrl-C, or with its parent process unless `nohup` has started it. Both sides need
the same secret (docs/operate/beyond.md)."""


def main(argv: list[str]) -> int:
    """Serve runs with the engines of this node.

    Returns:
        `int`: 0 after one run with `--once`, 3 for a wrong flag, a missing secret or a version that differs, else the
            code of the error (docs/operate/errors.md).
    """
    parser = argparse.ArgumentParser("trl-multinode engines", description=DESCRIPTION)
    add = parser.add_argument
    add("--join", required=True, type=address, metavar="HOST[:PORT]", help="store of the run")
    add(
        "--engine_gpus",
        type=indices,
        metavar="0,1,...",
        help="indices among the visible GPUs (default: all)",
    )
    add("--tp", type=positive, help="GPUs per engine (default: those of the run)")
    add("--num_engines", type=positive, help="(default: as many as fit)")
    add("--logs", type=Path, default=Path("engine_agent_logs"), help="(default: ./%(default)s)")
    add("--once", action="store_true", help="end after one run")
    try:
        flags = parser.parse_args(argv)
    except SystemExit as end:
        return CONFIGURATION if end.code else 0
    # torch's client of the store prints a trace for each attempt to connect; torch reads this when it is imported
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    from ..agent.agent import run

    del os.environ["TORCH_CPP_LOG_LEVEL"]
    return run(flags)


def address(text: str) -> tuple[str, int]:
    """Return host and port, for a parser. An IPv6 address stands in brackets."""
    found = re.fullmatch(r"(\[[^\]]+\]|[^:\[]+)(:\d{1,5})?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"got {text}, expected HOST or HOST:PORT")
    return found[1].strip("[]"), int((found[2] or PORT)[1:])


def indices(text: str) -> list[int]:
    """Return numbers from 0 with commas between them, for a parser."""
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"got {text}, expected indices such as 0,1")
    return [int(part) for part in text.split(",")]
