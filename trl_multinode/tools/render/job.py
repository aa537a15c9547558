"""`Job`: nodes, devices and times of a launch, read from a config file of `accelerate launch` without accelerate."""

import argparse
import ast
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...node_settings import NodeSettings
from ..layout import Layout
from ..text import FileError, Parser, count, joined, read_keys

DEFAULT_PORT = 29500  # of torchrun
LAUNCHER_MARGIN_S = (
    5  # torchrun's limit that the ranks keep for their own end (`run/preemption.py: MARGIN_S`)
)
MOUNTED = Path("/etc/trl-multinode/accelerate.yaml")
END_S = 30  # from the deadline of the checkpoint to the end of engines, launcher and roll-call


class JobError(ValueError):
    """Config file or script that cannot be launched; the message has got, expected and the cure."""


@dataclass(frozen=True)
class Job(Layout):
    """Launch of a script on several nodes."""

    config: Path
    script: str  # shell text: the script and its arguments
    grace_s: int  # for the end of the step and a checkpoint, after a signal
    timeout_s: int  # of the roll-call
    # training processes of each node, if `--ranks` gives them; `ranks` then is the largest number
    table: tuple[int, ...] = ()
    port: int = DEFAULT_PORT
    min_nodes: int | None = None  # with which the job may begin

    @property
    def launcher_s(self) -> int:
        """Seconds after which torchrun may kill the ranks: `grace_s`, and what the ranks keep of this limit."""
        return self.grace_s + LAUNCHER_MARGIN_S

    @property
    def kill_s(self) -> int:
        """Seconds after which the scheduler may kill everything."""
        return self.grace_s + END_S

    @property
    def mounted(self) -> "Job":
        """Return this job with the config file of a ConfigMap."""
        return replace(self, config=MOUNTED)

    @property
    def quoted(self) -> str:
        """Config file as a word of a shell."""
        return shlex.quote(str(self.config))

    @property
    def node_flags(self) -> str:
        """Return the flags for numbers of GPUs, ranks and nodes that the config file does not have."""
        ranks = f" --ranks {joined(self.table)}" if self.table else ""
        fewest = f" --min_nodes {self.min_nodes}" if self.min_nodes else ""
        return self.gpus_flag + ranks + fewest

    def summary(self) -> str:
        """Describe the nodes, without the last full stop."""
        if not self.table:
            return super().summary()
        return f"{count(self.nodes, 'node')} of {joined(self.table)} ranks, {count(self.gpus, 'GPU')} on each"

    def launch(self, flags: str = "") -> str:
        """Return the shell text that runs this node's share; `flags` are its rank and address without a scheduler."""
        own = f"--timeout {self.timeout_s}{self.node_flags}"
        words = " ".join(filter(None, [own, flags]))
        return f"trl-multinode launch {self.quoted} {words} \\\n    {self.script}"


def read_job(
    path: str,
    script: str,
    gpus: int | None = None,
    grace_s: int | None = None,
    timeout_s: int = 600,
    table: tuple[int, ...] = (),
) -> Job:
    """Read the job of a config file.

    Args:
        path (`str`):
            Config file of `accelerate launch`.
        script (`str`):
            The training script and its arguments, as one word of the command line.
        gpus (`int`, *optional*):
            GPUs of a node; by default 8, or none with `use_cpu: true`.
        grace_s (`int`, *optional*):
            Seconds for a checkpoint after a signal; by default `--preemption_grace` of the script, or its default.
        timeout_s (`int`, *optional*, defaults to `600`):
            Longest wait of the roll-call.
        table (`tuple[int, ...]`, *optional*):
            Ranks of each node, in the place of `num_processes` of the file.

    Raises:
        [`JobError`]: if the file or the script cannot be launched.
    """
    try:
        file = read_keys(
            path, "name a config file of accelerate; `trl-multinode config 4x8` writes one"
        )
    except FileError as error:
        raise JobError(str(error)) from None
    nodes = _count(file, path, "num_machines", 1)
    total = sum(table) or _count(file, path, "num_processes", None)
    if table and len(table) != nodes:
        raise JobError(
            f"{path}: `--ranks` has a number for each node (got {len(table)}, expected `num_machines` {nodes})"
        )
    if total % nodes and not table:
        raise JobError(
            f"{path}: `num_processes` is the total (got {total} for {nodes} nodes, expected a multiple of {nodes}); "
            f"write {max(1, total // nodes) * nodes}"
        )
    on_cpu = file.get("use_cpu")
    if gpus is None:
        gpus = 0 if on_cpu else 8
    ranks = max(table, default=total // nodes)
    if gpus and ranks > gpus and not on_cpu:
        raise JobError(
            f"{path}: a node has {gpus} GPUs (got {ranks} ranks, `num_processes` {total}, the total, expected at most "
            f"{gpus}); correct it, or pass --gpus_per_node"
        )
    port = _count(file, path, "main_process_port", DEFAULT_PORT)
    grace = _grace_of(_words(script))
    return Job(
        nodes,
        ranks,
        gpus,
        Path(path),
        script.strip(),
        grace if grace_s is None else grace_s,
        timeout_s,
        table,
        port,
    )


def _count(file: dict[str, Any], path: str, key: str, default: int | None) -> int:
    value: Any = file.get(key, default)
    if isinstance(value, bool) or not str(value).isdigit() or int(value) < 1:
        raise JobError(f"{path}: `{key}` must be a number from 1 (got {value!r})")
    return int(value)


def _words(script: str) -> list[str]:
    what = "--script takes the training script and its arguments as one word, as in --script 'train.py --max_steps 9'"
    if "\n" in script.strip():
        raise JobError(f"{what} (got several lines)")
    try:
        words = shlex.split(script)
    except ValueError as error:
        raise JobError(f"{what} (got {script!r}: {error})") from None
    if not words:
        raise JobError(f"{what} (got nothing)")
    if words[0] == "accelerate":
        raise JobError(f"{what} (got {words[0]}): leave `accelerate launch` and its flags out")
    return words


def check_script(script: str) -> None:
    """Check that a script which is named by its path is there, and is Python.

    Raises:
        [`JobError`]: if not. A path with a variable, which a node resolves, and a module are not looked at.
    """
    path = _words(script)[0]
    if path.startswith("-") or "$" in path or not path.endswith(".py"):
        return
    try:
        ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        reason = getattr(error, "strerror", None) or error
        raise JobError(
            f"cannot read the script {path} ({reason}, expected a Python file; a relative path begins in the present "
            "folder, in which the nodes start it)"
        ) from None


def _grace_of(words: list[str]) -> int:
    """Return the value of `--preemption_grace` in the script's arguments, else its default."""
    parser = Parser(add_help=False, exit_on_error=False)
    default = float(NodeSettings.preemption_grace)
    parser.add_argument("--preemption_grace", type=float, default=default)
    try:
        found, _ = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise JobError(f"`--preemption_grace` takes seconds ({error})") from None
    return int(found.preemption_grace)
