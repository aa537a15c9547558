"""`trl-multinode engines`: engines on this node for a run on other nodes."""

import os
from pathlib import Path

from ..run.endings.exit_codes import CONFIGURATION
from .text import Parser, indices, matching, positive

DEFAULT_PORT = 29500  # of `main_process_port`
DESCRIPTION = """\
Start engines on this node for a run on other nodes, and serve the runs at HOST:PORT, one after the other. HOST and
PORT are `main_process_ip` and `main_process_port` of the run, which needs `min_engines`. This process may start
before the run. It ends with SIGTERM, Ctrl-C, or with its parent process unless `nohup` has started it. Both sides need
the same secret (docs/operate/beyond.md)."""


def main(argv: list[str]) -> int:
    """Serve runs with the engines of this node.

    Returns:
        `int`: 0 after one run with `--once`, 3 for a wrong flag, a missing secret or a version that differs, else the
            code of the error (docs/operate/errors.md).
    """
    parser = Parser("trl-multinode engines", description=DESCRIPTION)
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
    read = matching(r"(\[[^\]]+\]|[^:\[]+)(?::(\d{1,5}))?", "HOST or HOST:PORT")
    host, port = read(text)
    return host.strip("[]"), int(port or DEFAULT_PORT)
