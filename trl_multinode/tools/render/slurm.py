"""Batch script for SLURM."""

import shlex

from .job import Job
from .options import Options, Parser


def add_options(parser: Parser) -> None:
    """Add the options of SLURM's batch script."""
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="FLAG",
        help="line of your cluster for #SBATCH, as in --sbatch=--partition=h100; may be given several times",
    )
    parser.add_argument(
        "--srun",
        default="",
        metavar="FLAGS",
        help="flags for srun, such as those of a container: --srun='--container-image=image.sqsh'",
    )


def values(job: Job, options: Options) -> dict[str, str]:
    """Return the values of the placeholders that only this template has."""
    return {
        "gpu_line": f"#SBATCH --gpus-per-node={job.gpus}" if job.gpus else "",
        "sbatch_lines": "\n".join(f"#SBATCH {flag}" for flag in options.sbatch),
        "srun_flags": " ".join(shlex.quote(word) for word in shlex.split(options.srun)),
    }


def then(job: Job, options: Options, path: str) -> str:
    """Return the command that submits the file."""
    return f"sbatch {path}"
