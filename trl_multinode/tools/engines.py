"""`trl-multinode engines`: engines on this node for a run on other nodes."""

import argparse
import os
from pathlib import Path
from typing import NoReturn

from ..run.endings.exit_codes import CONFIGURATION
from .text import positive

PORT = 29500  # default of `main_process_port`
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
    parser = Parser("trl-multinode engines", description=DESCRIPTION)
    parser.add_argument(
        "--join", required=True, type=address, metavar="HOST[:PORT]", help="store of the run"
    )
    parser.add_argument(
        "--engine_gpus",
        "--engine-gpus",
        type=indices,
        metavar="0,1,...",
        help="GPUs for engines, as indices among the visible ones (default: all)",
    )
    parser.add_argument("--tp", type=positive, help="GPUs per engine (default: those of the run)")
    parser.add_argument(
        "--num_engines", "--num-engines", type=positive, help="(default: as many as fit)"
    )
    parser.add_argument(
        "--logs", type=Path, default=Path("engine_agent_logs"), help="(default: ./%(default)s)"
    )
    parser.add_argument("--once", action="store_true", help="end after one run")
    options = parser.parse_args(argv)
    # torch's client of the store prints a trace for each attempt to connect; torch reads this when it is imported
    os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"
    from ..agent.agent import AgentSettings, run

    del os.environ["TORCH_CPP_LOG_LEVEL"]
    settings = AgentSettings(
        options.join, options.engine_gpus, options.tp, options.num_engines, options.logs
    )
    return run(settings, options.once)


class Parser(argparse.ArgumentParser):
    """Parser whose errors have the exit code of a configuration error."""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        super().exit(CONFIGURATION if status else 0, message)


def address(text: str) -> tuple[str, int]:
    """Return host and port, for a parser. An IPv6 address needs brackets if a port follows."""
    host, _, port = text.rpartition(":")
    if not host or text.endswith("]") or (":" in host and not host.endswith("]")):
        host, port = text, str(PORT)
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise argparse.ArgumentTypeError(f"got {text}, expected HOST or HOST:PORT")
    return host.strip("[]"), int(port)


def indices(text: str) -> list[int]:
    """Return numbers from 0 with commas between them, for a parser."""
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"got {text}, expected indices such as 0,1")
    return [int(part) for part in text.split(",")]
