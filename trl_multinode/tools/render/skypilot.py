"""Task for SkyPilot."""

import argparse
import json

from .job import Job, JobError
from .options import Options, Parser

INSTALL = """\
uv venv --allow-existing --python 3.11 ~/trl-multinode
uv pip install --python ~/trl-multinode 'trl-multinode[gpu]'"""


def add_options(parser: Parser) -> None:
    """Add the options of the task."""
    parser.add_argument("--gpu", metavar="NAME", help="kind of GPU in SkyPilot's words, as in --gpu H100")
    parser.add_argument("--image", help="container image with this package, which is installed otherwise")
    parser.add_argument("--spot", action="store_true", help="spot instances")
    parser.add_argument(
        "--bucket",
        type=_bucket,
        metavar="URL:PATH",
        help="bucket that every node mounts, as in s3://runs:/runs; a checkpoint must be there to outlive its node",
    )


def values(job: Job, options: Options) -> dict[str, str]:
    """Return the values of the placeholders that only this template has, or has in another form.

    Raises:
        [`JobError`]: if the nodes have GPUs of an unknown kind.
    """
    if job.gpus and not options.gpu:
        raise JobError("SkyPilot chooses machines by their GPU (got no --gpu, expected for example --gpu H100)")
    storage = ""
    if options.bucket:
        url, path = options.bucket
        storage = f"\nfile_mounts:\n  {path}:\n    source: {url}\n    mode: MOUNT_CACHED"
    activate = [] if options.image else ["source ~/trl-multinode/bin/activate"]
    setup = " && ".join([*activate, *([options.setup] if options.setup else [])])
    return {
        "accelerators": f"accelerators: {options.gpu}:{job.gpus}" if job.gpus else "",
        "image": f"image_id: {json.dumps(f'docker:{options.image}')}" if options.image else "",
        "spot": "use_spot: true" if options.spot else "",
        "storage": storage,
        "install": "true" if options.image else INSTALL,
        "setup": setup,
    }


def then(job: Job, options: Options, path: str) -> str:
    """Return the command that submits the file."""
    return f"sky jobs launch {path}"


def _bucket(text: str) -> tuple[str, str]:
    url, _, path = text.rpartition(":")
    if "://" not in url or not path.startswith("/"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a URL and a path, as in s3://runs:/runs")
    return url, path
