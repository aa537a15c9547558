"""Kinds of job files: for each its template, its own options, the values of its own placeholders, and what is next."""

from collections.abc import Callable
from dataclasses import dataclass

from . import docker, k8s, skypilot, slurm, ssh
from .job import Job
from .options import Options, Parser


@dataclass(frozen=True)
class Kind:
    """Kind of job file."""

    template: str  # file of `templates/`
    what: str
    add_options: Callable[[Parser], None]
    values: Callable[[Job, Options], dict[str, str]]
    then: Callable[[Job, Options, str], str]  # command that submits the file of this name


KINDS = {
    "slurm": Kind("slurm.sbatch", "a batch script for SLURM", slurm.add_options, slurm.values, slurm.then),
    "k8s": Kind("k8s-trainjob.yaml", "a TrainJob for Kubernetes", k8s.add_options, k8s.values, k8s.then),
    "ssh": Kind("ssh.sh", "a script that starts every node through ssh", ssh.add_options, ssh.values, ssh.then),
    "skypilot": Kind("skypilot.yaml", "a task for SkyPilot", skypilot.add_options, skypilot.values, skypilot.then),
    "docker": Kind("Dockerfile", "a Dockerfile for the nodes' image", docker.add_options, docker.values, docker.then),
}
