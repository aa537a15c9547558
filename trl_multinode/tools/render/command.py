"""`trl-multinode render slurm 4node.yaml --script "train.py"`: write a job file. It submits and starts nothing.

It loads neither torch nor accelerate, so it runs on any login node.
"""

import argparse
import shlex
import sys

from .job import Job, JobError, read_job
from .kinds import KINDS, Kind
from .options import add_options, common_values
from .template import TEMPLATES, fill

PROG = "trl-multinode render"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(PROG, allow_abbrev=False)
    parser.description = "Write the job file of a launch for a scheduler. It is only written, never submitted."
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, kind in KINDS.items():
        one = kinds.add_parser(name, help=kind.what, description=f"Write {kind.what}.", allow_abbrev=False)
        add_options(one)
        kind.add_options(one)
    return parser


def main(argv: list[str]) -> int:
    """Write the job file to standard output or `--out`, and the next commands to standard error.

    Returns:
        `int`: 0; 1 if the file exists or cannot be written, 2 for a config file or a script that cannot be launched.
    """
    options = make_parser().parse_args(argv)
    kind = KINDS[options.kind]
    try:
        job = read_job(options.file, options.script, options.gpus_per_node, options.grace, options.timeout)
        text = render(kind, job, options, shlex.join([*PROG.split(), *argv]))
    except JobError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    if options.out is None:
        print(text, end="")
    elif not _write(options.out, text):
        return 1
    print(_next(kind, job, options), file=sys.stderr)
    return 0


def render(kind: Kind, job: Job, options: argparse.Namespace, command: str) -> str:
    """Return the text of a job file.

    Raises:
        [`JobError`]: if the kind has no place for an option's value.
    """
    template = (TEMPLATES / kind.template).read_text(encoding="utf-8")
    return fill(template, {**common_values(job, options, command), **kind.values(job, options)})


def _write(path: str, text: str) -> bool:
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        reason = "it exists" if isinstance(error, FileExistsError) else error.strerror
        print(f"{PROG}: {path} is not written ({reason}): name another file with --out", file=sys.stderr)
        return False
    return True


def _next(kind: Kind, job: Job, options: argparse.Namespace) -> str:
    path = shlex.quote(options.out or "FILE")
    check = f"trl-multinode check {shlex.quote(str(job.config))}"
    if job.nodes > 1:
        check += " --machine_rank 0 --main_process_ip HOST0"
    if job.gpus not in (0, 8):
        check += f" --gpus_per_node {job.gpus}"
    return (
        f"{job.summary()}; after a signal {job.grace_s} s for a checkpoint.\n"
        f"Check it first, which starts nothing:\n  {check} {job.script}\n"
        f"Then:\n  {kind.then(job, options, path)}"
    )
