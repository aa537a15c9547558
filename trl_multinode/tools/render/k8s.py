"""TrainJob for Kubernetes with Kubeflow Trainer 2, its runtime, and the config file as a ConfigMap."""

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path

from .job import Job
from .options import Options, Parser

MOUNTED = Path("/etc/trl-multinode/accelerate.yaml")


def add_options(parser: Parser) -> None:
    """Add the options of the TrainJob."""
    parser.add_argument("--image", required=True, help="image with this package and the script; see `render docker`")
    parser.add_argument(
        "--volume",
        action="append",
        default=[],
        type=_volume,
        metavar="CLAIM:PATH",
        help="volume claim that every pod mounts; a checkpoint must be on one to outlive its pod",
    )
    parser.add_argument(
        "--resource",
        action="append",
        default=[],
        type=_resource,
        metavar="NAME=N",
        help="resource of every pod, as in --resource rdma/ib=8 or memory=1Ti; nvidia.com/gpu is there already",
    )
    parser.add_argument(
        "--restarts", type=int, default=0, help="restarts after a failure that is no pre-emption (default: 0)"
    )


def values(job: Job, options: Options) -> dict[str, str]:
    """Return the values of the placeholders that only this template has, or has in another form."""
    limits = ({"nvidia.com/gpu": str(job.gpus)} if job.gpus else {}) | dict(options.resource)
    lines = [f"    {name}: {json.dumps(value)}" for name, value in limits.items()]
    claims = [(f"volume{number}", *volume) for number, volume in enumerate(options.volume)]
    return {
        "config_text": job.config.read_text(encoding="utf-8").rstrip("\n"),
        "launch": replace(job, config=MOUNTED).launch,
        "image": json.dumps(options.image),
        "restarts": str(options.restarts),
        "resources": "\n".join(["resourcesPerNode:", "  limits:", *lines]) if limits else "",
        "volume_mounts": "\n".join(f"- name: {name}\n  mountPath: {json.dumps(path)}" for name, _, path in claims),
        "volumes": "\n".join(
            f"- name: {name}\n  persistentVolumeClaim:\n    claimName: {json.dumps(claim)}"
            for name, claim, _ in claims
        ),
    }


def then(job: Job, options: Options, path: str) -> str:
    """Return the command that submits the file."""
    return f"kubectl apply -f {path}"


def _volume(text: str) -> tuple[str, str]:
    claim, _, path = text.partition(":")
    if not claim or not path.startswith("/"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a claim and an absolute path, as in runs:/runs")
    return claim, path


def _resource(text: str) -> tuple[str, str]:
    name, _, amount = text.partition("=")
    if not re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9./_-]*", name) or not re.fullmatch(r"[0-9.]+[a-zA-Z]*", amount):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a name and an amount, as in rdma/ib=8")
    return name, amount
