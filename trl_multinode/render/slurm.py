"""Batch script for SLURM."""

from .job import Job
from .options import Options, Parser


def add_options(parser: Parser) -> None:
    """Add the options of SLURM's batch script."""


def values(job: Job, options: Options) -> dict[str, str]:
    """Return the values of the placeholders that only this template has."""
    return {}


def then(job: Job, options: Options, path: str) -> str:
    """Return the command that submits the file."""
    return f"sbatch {path}"
