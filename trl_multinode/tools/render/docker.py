"""Dockerfile of an image for Kubernetes, SkyPilot, and pyxis or Apptainer under SLURM."""

import json
import shlex

from .job import Job, JobError
from .options import Options, Parser

BASE = "nvidia/cuda:13.0.2-devel-ubuntu24.04"
PACKAGE = "trl-multinode[gpu]"


def add_options(parser: Parser) -> None:
    """Add the options of the Dockerfile."""
    parser.add_argument("--base", default=BASE, help=f"image to start from, with Debian's packages (default: {BASE})")
    parser.add_argument(
        "--package", default=PACKAGE, help=f"what pip installs, as in --package './[gpu]' (default: {PACKAGE})"
    )


def values(job: Job, options: Options) -> dict[str, str]:
    """Return the values of the placeholders that only this template has.

    Raises:
        [`JobError`]: if the config file is not in the folder that becomes the image's.
    """
    if job.config.is_absolute() or ".." in job.config.parts:
        raise JobError(f"the image gets the present folder (got {job.config}, expected a relative path in it)")
    pip = f"RUN pip install --no-cache-dir {shlex.quote(options.package)}"
    copy = (
        "# The folder of the build, with config file and script. Name what is large or secret in `.dockerignore`.\n"
        "COPY . ."
    )
    variables = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.launcher_s), **dict(options.env)}
    setup = f"{options.setup}\n" if options.setup else ""
    flags = "flags=$(trl-multinode flags)" if job.nodes > 1 else "flags="  # one node needs no scheduler
    start = f"set -eo pipefail\n{setup}{flags}\nexec {job.launch}"
    return {
        "base": options.base,
        "install": "\n".join([copy, pip] if options.package.startswith((".", "/")) else [pip, "", copy]),
        "variables": "\n".join(f"ENV {name}={_quoted(value)}" for name, value in variables.items()),
        "start": json.dumps(["bash", "-c", start]),
    }


def _quoted(value: str) -> str:
    """Return a word of a Dockerfile, in which a `$` without a backslash begins a variable of the build."""
    return json.dumps(value, ensure_ascii=False).replace("$", "\\$")


def then(job: Job, options: Options, path: str) -> str:
    """Return the command that builds the image."""
    return f"docker build --tag {options.name} --file {path} ."
