"""Script that starts every node through ssh."""

import os
import shlex

from .job import Job, JobError
from .options import Options, Parser


def add_options(parser: Parser) -> None:
    """Add the options of the script for ssh."""
    parser.add_argument("--hosts", default="", help="hosts of the nodes, node 0 first, as in --hosts gpu1,gpu2")
    parser.add_argument(
        "--folder", help="folder with config file and script, the same on every host (default: the present one)"
    )


def values(job: Job, options: Options) -> dict[str, str]:
    """Return the values of the placeholders that only this template has.

    Raises:
        [`JobError`]: if the hosts are not as many as the nodes.
    """
    hosts = [host for host in options.hosts.split(",") if host]
    if hosts and len(hosts) != job.nodes:
        raise JobError(f"--hosts names a host per node (got {len(hosts)}, expected {job.nodes}: `num_machines`)")
    folder = options.folder or os.getcwd()
    return {"hosts": " ".join(map(shlex.quote, hosts)), "folder": shlex.quote(folder)}


def then(job: Job, options: Options, path: str) -> str:
    """Return the command that starts the nodes."""
    return f"bash {path}" + ("" if options.hosts else " " + " ".join(f"HOST{k}" for k in range(min(job.nodes, 4))))
