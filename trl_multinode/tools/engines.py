"""`trl-multinode engines`: engines on this node for a run on other nodes."""

import argparse
import os
from contextlib import suppress
from pathlib import Path

from ..errors import ConfigurationError
from ..run.endings.exit_codes import CONFIGURATION
from .text import Parser, indices, matching, positive

DEFAULT_PORT = 29500  # of `main_process_port`
# SLURM and Kubernetes kill a process 30 s after SIGTERM, and its engines need some of them
GRACE_S = 20.0
DESCRIPTION = """\
Start engines on this node for a run on other nodes, and serve the runs at HOST:PORT, one after the other. HOST and
PORT are `main_process_ip` and `main_process_port` of the run, which needs `min_engines`. This process may start
before the run. At SIGTERM, or with `--leave`, it takes no new rows and ends once its open rows have ended; it ends at
once with Ctrl-C, or with its parent process unless `nohup` has started it. Both sides need the same secret
(docs/operate/beyond.md)."""


def main(argv: list[str]) -> int:
    """Serve runs with the engines of this node, or let an agent of this node leave.

    Returns:
        `int`: 0 after one run with `--once` or if it has left, 3 for a wrong flag, a missing secret or a version that
            differs, else the code of the error (docs/operate/errors.md).
    """
    parser = Parser("trl-multinode engines", description=DESCRIPTION)
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--join", type=address, metavar="HOST[:PORT]", help="store of the run")
    what.add_argument(
        "--leave", action="store_true", help="let the agent of this machine with these --logs leave"
    )
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
    add(
        "--grace",
        type=seconds,
        default=GRACE_S,
        metavar="SECONDS",
        help="for open rows when it leaves; the rest begins again elsewhere (default: %(default).0f)",
    )
    add("--why", default="", metavar="TEXT", help="reason to join or leave, for the log of the run")
    add(
        "--ray",
        action="store_true",
        help="keep engines on the Ray cluster of RAY_ADDRESS instead, each with --tp GPUs (default: 1)",
    )
    number = parser.add_mutually_exclusive_group()
    number.add_argument("--engines", type=positive, help="engines with --ray (default: 1)")
    number.add_argument(
        "--autoscale",
        type=bounds,
        metavar="MIN:MAX",
        help="bounds of their number, which then follows the measure of the run",
    )
    # pid of the actor of Ray that has started this process
    add("--parent", type=int, help=argparse.SUPPRESS)
    try:
        flags = parser.parse_args(argv)
        _check_places(parser, flags)
    except SystemExit as end:
        return CONFIGURATION if end.code else 0
    if flags.leave:
        from ..agent.leaving import ask_to_leave

        try:
            print(f"process {ask_to_leave(flags.logs, flags.why)} leaves its run")
        except ConfigurationError as error:
            print(error)
            return CONFIGURATION
        return 0
    # torch's client of the store prints a trace for each attempt to connect; torch reads this when it is imported
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    if flags.ray:
        from ..agent.ray_engines import run
    else:
        from ..agent.agent import run

    del os.environ["TORCH_CPP_LOG_LEVEL"]
    return run(flags)


def _check_places(parser: Parser, flags: argparse.Namespace) -> None:
    """End with an error if a flag is for engines of this node, and another one for those of a cluster."""
    if flags.ray and (flags.engine_gpus is not None or flags.num_engines is not None):
        parser.error(
            "--engine_gpus and --num_engines choose GPUs of this node, and with --ray Ray chooses them"
        )
    if (flags.engines or flags.autoscale) and not flags.ray:
        parser.error("--engines and --autoscale need --ray; on this node use --num_engines")


def seconds(text: str) -> float:
    """Return a number above 0, for a parser."""
    with suppress(ValueError):
        if 0 < float(text) < 86400:
            return float(text)
    raise argparse.ArgumentTypeError(f"got {text}, expected seconds above 0, a day at most")


def address(text: str) -> tuple[str, int]:
    """Return host and port, for a parser. An IPv6 address stands in brackets."""
    read = matching(r"(\[[^\]]+\]|[^:\[]+)(?::(\d{1,5}))?", "HOST or HOST:PORT")
    host, port = read(text)
    return host.strip("[]"), int(port or DEFAULT_PORT)


def bounds(text: str) -> tuple[int, int]:
    """Return the bounds of a number, for a parser."""
    least, most = map(positive, matching(r"(\d+):(\d+)", "MIN:MAX, as in 1:8")(text))
    if least > most:
        raise argparse.ArgumentTypeError(f"got {text}, expected MIN:MAX, as in 1:8")
    return least, most
