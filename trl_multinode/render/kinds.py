"""Kinds of job files: for each its template, its own options, the values of its own placeholders, and what is next."""

from collections.abc import Callable
from dataclasses import dataclass

from . import slurm, ssh
from .job import Job
from .options import Options, Parser


@dataclass(frozen=True)
class Kind:
    """Kind of job file."""

    template: str  # file of `launch_templates/`
    what: str
    add_options: Callable[[Parser], None]
    values: Callable[[Job, Options], dict[str, str]]
    then: Callable[[Job, Options, str], str]  # command that submits the file of this name


KINDS = {
    "slurm": Kind("slurm.sbatch", "a batch script for sbatch", slurm.add_options, slurm.values, slurm.then),
    "ssh": Kind("ssh.sh", "a script that starts every node through ssh", ssh.add_options, ssh.values, ssh.then),
}
