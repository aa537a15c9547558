"""`trl-multinode render slurm 4node.yaml --script "train.py"`: write a job file. It submits and starts nothing.

It loads neither torch nor accelerate, so it runs on any login node. The texts and their conditions are in the files of
`templates/`; each sets `then`, the command that submits the file.
"""

import argparse
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import zip_longest
from operator import mul
from pathlib import Path
from typing import Any

from ...wire.secret_names import has_secret_form, is_secret_name
from ..text import PACKAGE, Parser, fill, matching, numbers, positive, write_new
from .job import Job, JobError, check_script, read_job

PROG = "trl-multinode render"
BASE = "nvidia/cuda:13.0.2-devel-ubuntu24.04"
INSTALLED = {
    "default": PACKAGE,
    "help": f"what pip installs, as in --package './[gpu]' (default: {PACKAGE})",
}
IN_PRIVATE = (
    "Keep it in a file on the nodes that only you may read, as in `export HF_TOKEN=...`, and use "
    "`--setup 'source ~/secrets.env'`."
)
FOR_PODS = (
    "Put it into a Secret of the cluster, as with `kubectl create secret generic hf --from-literal=HF_TOKEN=...`, and "
    "pass `--secret hf`."
)
# Kind -> its template, and what it is
KINDS = {
    "slurm": ("slurm.sbatch", "a batch script for SLURM"),
    "k8s": ("k8s-trainjob.yaml", "a TrainJob for Kubernetes"),
    "ssh": ("ssh.sh", "a script that starts every node through ssh"),
    "skypilot": ("skypilot.yaml", "a task for SkyPilot"),
    "docker": ("Dockerfile", "a Dockerfile for the nodes' image"),
}


def _seconds(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number")
    return int(text)


def _public(kind: str, flag: str, parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Refuse a text with a secret: the file has it for all who may read it, and so may `ps` on every node."""

    def checked(text: str) -> Any:
        if found := _secret_in(text, is_shell=flag == "--setup"):
            cure = FOR_PODS if kind == "k8s" else IN_PRIVATE
            raise argparse.ArgumentTypeError(f"{found}, which the file would show. {cure}")
        return parse(text)

    return checked


def _secret_in(text: str, is_shell: bool) -> str | None:
    """Return a description of a secret in the words of a text; a variable of a shell is none."""
    if has_secret_form(text):
        return "the text has the form of a token"
    try:
        words = shlex.split(text)
    except ValueError:
        return None  # which the check of the launch refuses
    for name, value in _named_values(words):
        if value and is_secret_name(name) and not (is_shell and value.startswith("$")):
            return f"`{name}` has the value of a secret"
    return None


def _named_values(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the names and values of `NAME=VALUE`, `--name=VALUE` and `--name VALUE`."""
    for word, following in zip_longest(words, words[1:], fillvalue="?"):
        name, equals, value = word.rpartition("=")
        if equals:
            yield name, value
        elif word.startswith("--") and not following.startswith("-"):
            yield word, following


def _sbatch_line(text: str) -> tuple[str, str, str]:
    """Return a line for sbatch with its flag and value, unless the file needs this flag as it is."""
    expected = "a flag of sbatch, as in --partition=h100"
    flag, value = matching("(--[a-zA-Z-]+|-[a-zA-Z])[= ]?(.*)", expected)(text)
    if flag in NEEDED_BY_FILE:
        raise argparse.ArgumentTypeError(
            f"got {flag}, expected another flag: {NEEDED_BY_FILE[flag]}"
        )
    return text, flag, value


def _toleration(text: str) -> dict[str, str]:
    """Read a toleration in the words of `kubectl taint`: KEY, KEY=VALUE, each with :EFFECT or without."""
    expected = f"KEY[=VALUE][:EFFECT] with the effect {EFFECTS.replace('|', ' or ')}, as in nvidia.com/gpu:NoSchedule"
    name, value, effect = matching(f"([^=:]+)(?:=([^:]*))?(?::({EFFECTS}))?", expected)(text)
    found = {"key": name, "operator": "Exists" if value is None else "Equal"}
    found |= {} if value is None else {"value": value}
    return found | ({"effect": effect} if effect else {})


def _shell_words(text: str) -> str:
    return shlex.join(shlex.split(text))


EFFECTS = "NoSchedule|PreferNoSchedule|NoExecute"  # of a taint, as Kubernetes knows them
# Flags of sbatch that the job file sets for itself, and the reason or the option of this command
NEEDED_BY_FILE = {
    "--nodes": "it is `num_machines` of the config file",
    "-N": "it is `num_machines` of the config file",
    "--ntasks-per-node": "one launcher starts all ranks of a node",
    "--ntasks": "one launcher starts all ranks of a node",
    "-n": "one launcher starts all ranks of a node",
    "--job-name": "pass --name",
    "-J": "pass --name",
    "--signal": "pass --grace",
    "--no-requeue": "a pre-empted job could not continue; submit with `sbatch --no-requeue` if that is meant",
}
# A line of the file -> flags of the user's that replace it
REPLACED = {
    "--exclusive": ("--exclusive", "--oversubscribe", "-s"),
    "--gpus-per-node": ("--gpus-per-node", "--gres", "--gpus", "-G", "--gpus-per-task"),
}
REPEATED: dict[str, Any] = {"action": "append", "default": []}
COMMON: dict[str, dict[str, Any]] = {
    "file": {"help": "config file of `accelerate launch`, as `trl-multinode config 4x8` writes it"},
    "--script": {
        "required": True,
        "help": "training script and its arguments, as in --script 'train.py --max_steps 100'",
    },
    "--out": {"metavar": "FILE", "help": "file to write; it must not exist (default: standard output)"},
    "--name": {
        "default": "grpo",
        "type": matching("[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?", "up to 40 of a-z, 0-9 and '-', a letter first"),
        "help": "name of the job (default: grpo)",
    },
    "--gpus_per_node": {"type": _seconds, "help": "GPUs of a node (default: 8, none with use_cpu)"},
    "--ranks": {
        "type": numbers,
        "default": (),
        "metavar": "N0,N1,...",
        "help": "ranks of each node, node 0 first, as in --ranks 7,8,8,8 (default: num_processes / num_machines)",
    },
    "--grace": {
        "type": _seconds,
        "metavar": "S",
        "help": "seconds for the end of the step and a checkpoint after a signal (default: the script's "
        "--preemption_grace, else 600)",
    },
    "--timeout": {
        "type": _seconds, "default": 600, "metavar": "S", "help": "longest wait of the roll-call (default: 600)"
    },
    "--env": {
        **REPEATED,
        "type": matching("([A-Za-z_][A-Za-z0-9_]*)=(.*)", "NAME=VALUE in one line"),
        "metavar": "NAME=VALUE",
        "help": "variable of every node",
    },
    "--setup": {
        "default": "",
        "metavar": "COMMAND",
        "help": "shell command that every node runs first, as in --setup 'source .venv/bin/activate'",
    },
}  # fmt: skip
OWN: dict[str, dict[str, dict[str, Any]]] = {
    "slurm": {
        "--sbatch": {
            **REPEATED,
            "type": _sbatch_line,
            "metavar": "FLAG",
            "help": "line of your cluster for #SBATCH, as in --sbatch=--partition=h100; may be given several times. "
            "--gres and the like replace --gpus-per-node, --oversubscribe replaces --exclusive",
        },
        "--min_nodes": {
            "type": positive,
            "metavar": "N",
            "help": "fewest nodes with which the job may begin, as after the loss of one (default: num_machines)",
        },
        "--srun": {
            "default": "",
            "type": _shell_words,
            "metavar": "FLAGS",
            "help": "flags for srun, such as those of a container: --srun='--container-image=image.sqsh'",
        },
    },
    "k8s": {
        "--image": {"required": True, "help": "image with this package and the script; see `render docker`"},
        "--volume": {
            **REPEATED,
            "type": matching("([^:]+):(/.*)", "a claim and an absolute path, as in runs:/runs"),
            "metavar": "CLAIM:PATH",
            "help": "volume claim that every pod mounts; a checkpoint must be on one to outlive its pod",
        },
        "--resource": {
            **REPEATED,
            "type": matching(
                "([a-zA-Z0-9][a-zA-Z0-9./_-]*)=([0-9.]+[a-zA-Z]*)", "a name and an amount, as in rdma/ib=8"
            ),
            "metavar": "NAME=N",
            "help": "resource of every pod, as in --resource rdma/ib=8 or memory=1Ti; nvidia.com/gpu is there already",
        },
        "--secret": {
            **REPEATED,
            "type": matching("[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?", "the name of a Secret"),
            "metavar": "NAME",
            "help": "Secret of the cluster whose keys are variables of every pod that trains, as for HF_TOKEN",
        },
        "--node_selector": {
            **REPEATED,
            "type": matching("([^=]+)=(.*)", "a label, as in gpu=h100"),
            "metavar": "LABEL=VALUE",
            "help": "label of the nodes on which the pods may run",
        },
        "--toleration": {
            **REPEATED,
            "type": _toleration,
            "metavar": "KEY[=VALUE][:EFFECT]",
            "help": "taint of nodes that the pods tolerate, as in nvidia.com/gpu:NoSchedule",
        },
        "--engine_nodes": {
            "type": positive,
            "metavar": "N",
            "help": "further pods that only generate, for a run with `min_engines` (docs/operate/beyond.md)",
        },
        "--restarts": {
            "type": int, "default": 0, "help": "restarts after a failure that is no pre-emption (default: 0)"
        },
    },
    "ssh": {
        "--hosts": {"default": "", "help": "hosts of the nodes, node 0 first, as in --hosts gpu1,gpu2"},
        "--folder": {"help": "folder with config file and script, the same on every host (default: the present one)"},
    },
    "skypilot": {
        "--gpu": {
            "metavar": "NAME",
            "type": matching("[^:]+", "the kind alone, as in H100; the number is --gpus_per_node"),
            "help": "kind of GPU in SkyPilot's words, as in --gpu H100",
        },
        "--image": {"help": "container image with this package, which is installed otherwise"},
        "--package": INSTALLED,
        "--spot": {"action": "store_true", "help": "spot instances"},
        "--bucket": {
            "type": matching("(.*://.*):(/[^:]*)", "a URL and a path, as in s3://runs:/runs"),
            "metavar": "URL:PATH",
            "help": "bucket that every node mounts, as in s3://runs:/runs; a checkpoint must be there to outlive its "
            "node",
        },
    },
    "docker": {
        "--base": {"default": BASE, "help": f"image to start from, with Debian's packages (default: {BASE})"},
        "--package": INSTALLED,
    },
}  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = Parser(PROG)
    parser.description = (
        "Write the job file of a launch for a scheduler. It is only written, never submitted."
    )
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, (_, what) in KINDS.items():
        kind = kinds.add_parser(name, help=what, description=f"Write {what}.")
        for flag, settings in (COMMON | OWN[name]).items():
            if settings.get("action") != "store_true":
                settings = settings | {"type": _public(name, flag, settings.get("type", str))}
            kind.add_argument(flag, **settings)
    return parser


def check_options(job: Job, options: argparse.Namespace) -> None:
    """Refuse values for which a kind of job file has no place.

    Raises:
        [`JobError`]: with the option and what it should be.
    """
    match options.kind:
        case "docker" if job.config.is_absolute() or ".." in job.config.parts:
            raise JobError(
                f"the image gets the present folder (got {job.config}, expected a relative path in it)"
            )
        case "skypilot" if job.gpus and not options.gpu:
            raise JobError(
                "SkyPilot chooses machines by their GPU (got no --gpu, expected for example --gpu H100)"
            )
        case "k8s" if options.engine_nodes and job.nodes == 1:
            raise JobError(
                "pods of --engine_nodes pull the weights from ports that a launch of one node opens for itself only "
                "(got `num_machines` 1, expected 2 or more)"
            )
        case "slurm" if job.min_nodes and (job.table or job.min_nodes >= job.nodes):
            raise JobError(
                f"--min_nodes is less than `num_machines` (got {job.min_nodes}, expected at most {job.nodes - 1}), "
                "and --ranks names all nodes"
            )
        case "ssh" if options.hosts and (given := options.hosts.count(",") + 1) != job.nodes:
            raise JobError(
                f"--hosts names a host per node (got {given}, expected {job.nodes}: `num_machines`)"
            )


def check_sbatch(job: Job, given: list[tuple[str, str, str]]) -> None:
    """Refuse a time limit without time for a checkpoint, and a number of GPUs that is not the job's.

    Raises:
        [`JobError`]: with the flag and what it should be.
    """
    for line, flag, value in given:
        if flag in ("--time", "-t") and _limit_s(value) <= job.kill_s:
            raise JobError(
                f"`{line}` leaves no time to train (got {_limit_s(value)} s, expected more than the {job.kill_s} s "
                "that a checkpoint may take); raise it, or pass a shorter --grace"
            )
        if flag in REPLACED["--gpus-per-node"]:
            _check_gpus(job, flag, value)


def _check_gpus(job: Job, flag: str, value: str) -> None:
    # `gpu:h100:8,nvme:1`, `h100:8` or `8`
    pattern = r"\bgpu[^,]*?:(\d+)\b" if flag == "--gres" else r"(?:^|:)(\d+)\b"
    number = sum(map(int, re.findall(pattern, value)))
    expected = job.gpus * (job.nodes if flag in ("--gpus", "-G") else 1)
    if number and number != expected:
        raise JobError(
            f"`{flag}` asks for other GPUs than the job has (got {number}, expected {expected}); correct it, or pass "
            "--gpus_per_node"
        )


def _limit_s(text: str) -> float:
    """Return the seconds of a time limit M, M:S or H:M:S; infinity for one of days, or without a limit."""
    parts = text.split(":")
    if not all(part.isdigit() for part in parts):
        return math.inf
    units = (3600, 60, 1) if len(parts) == 3 else (60, 1)
    return sum(map(mul, map(int, parts), units))


def main(argv: list[str]) -> int:
    """Write the job file to standard output or `--out`, and the next commands to standard error.

    Returns:
        `int`: 0; 1 if the file exists or cannot be written, 2 for a config file or a script that cannot be launched.
    """
    options = make_parser().parse_args(argv)
    sbatch = getattr(options, "sbatch", [])
    flags = {flag for _, flag, _ in sbatch}
    try:
        job = read_job(
            options.file,
            options.script,
            options.gpus_per_node,
            options.grace,
            options.timeout,
            options.ranks,
        )
        job = replace(job, min_nodes=getattr(options, "min_nodes", None))
        check_options(job, options)
        check_sbatch(job, sbatch)
        # a pod has its script in the image, a host of ssh in its folder
        if options.kind != "k8s" and not getattr(options, "folder", None):
            check_script(job.script)
    except JobError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    filled = fill(
        KINDS[options.kind][0],
        **vars(options),
        job=job,
        command=shlex.join([*PROG.split(), *argv]).replace("\n", " "),
        exports={
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(job.launcher_s),
            **dict(options.env),
        }.items(),
        present=Path.cwd(),
        replaced=[line for line, others in REPLACED.items() if flags.intersection(others)],
        path=shlex.quote(options.out or "FILE"),
    )
    if options.out is None:
        print(filled, end="")
    elif not write_new(options.out, str(filled), PROG):
        return 1
    nodes = " --machine_rank 0 --main_process_ip HOST0" if job.nodes > 1 else ""
    print(f"{job.summary()}; after a signal {job.grace_s} s for a checkpoint.", file=sys.stderr)
    print("Check it first, which starts nothing:", file=sys.stderr)
    print(
        f"  trl-multinode check {job.quoted}{nodes}{job.node_flags} {job.script}", file=sys.stderr
    )
    print(f"Then:\n  {filled.then}", file=sys.stderr)
    return 0
