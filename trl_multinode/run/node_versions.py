"""Versions of the libraries on all nodes, compared once per run through the store."""

import json
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from .exit_codes import CONFIGURATION
from .reporter import warn
from .topology import Topology

if TYPE_CHECKING:
    from .store import Store

PACKAGES = ("torch", "transformers", "trl", "vllm", "deepspeed", "accelerate", "peft")
MUST_MATCH = {"torch", "trl", "vllm"}  # in major and minor number
MISSING = "not installed"
LOOK_EVERY_S = 2.0
Versions = dict[str, str]  # library -> version


def installed() -> Versions:
    """Return the versions on this node."""
    import torch

    found = {"python": platform.python_version(), "CUDA": torch.version.cuda or "none"}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = MISSING
    return found


class VersionCheck:
    """Chore of the watch thread: local main processes write their versions, and rank 0 compares them, once.

    No rank waits for it. Rank 0 ends the run if versions differ that must match, and warns about others.

    Args:
        topology (`Topology`):
            Topology of this rank.
        fail (`Callable[..., None]`):
            Function that reports a failure, given its cause and `code`.
    """

    def __init__(self, topology: Topology, fail: Callable[..., None]):
        self._topology = topology
        self._fail = fail
        self._written = not topology.is_local_main
        self._done = topology.rank != 0 or topology.num_nodes == 1
        self._next_look = 0.0

    def __call__(self, store: "Store") -> None:
        if not self._written:
            store.set(f"versions/{self._topology.node}", json.dumps(installed()))
            self._written = True
        if self._done or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_EVERY_S
        keys = [f"versions/{node}" for node in range(self._topology.num_nodes)]
        if store.check(keys):
            self._done = True
            self._judge([json.loads(store.get(key)) for key in keys])

    def _judge(self, nodes: list[Versions]) -> None:
        different = differences(nodes)
        if not different:
            return
        text = "the nodes have different versions: " + "; ".join(different.values())
        if wrong := [name for name in different if name in MUST_MATCH and major_minor_differ(name, nodes)]:
            cure = f"Install the same {', '.join(wrong)} on every node (`pip install -r` one file on all)."
            self._fail(f"ConfigurationError: {text}. {cure}", code=CONFIGURATION)
        else:
            warn(f"{text}. The run goes on; install the same ones if results differ or a node fails.")


def differences(nodes: list[Versions]) -> dict[str, str]:
    """Return a line per library that differs, such as `trl 1.15.2 (node 7), 1.16.0 (nodes 0-6)`.

    Args:
        nodes (`list[Versions]`):
            Versions by node.
    """
    lines = {}
    for name in nodes[0]:
        where: dict[str, list[int]] = defaultdict(list)
        for node, versions in enumerate(nodes):
            where[versions.get(name, MISSING)].append(node)
        if len(where) > 1:
            lines[name] = f"{name} " + ", ".join(f"{found} ({named(where[found])})" for found in sorted(where))
    return lines


def major_minor_differ(name: str, nodes: list[Versions]) -> bool:
    """Return whether the nodes have more than one major and minor number of a library."""
    return len({".".join(versions.get(name, MISSING).split(".")[:2]) for versions in nodes}) > 1


def named(nodes: Iterable[int]) -> str:
    """Return nodes as text, such as `nodes 0-2, 5`."""
    runs: list[list[int]] = []
    for node in sorted(nodes):
        if runs and node == runs[-1][-1] + 1:
            runs[-1].append(node)
        else:
            runs.append([node])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"node {text}" if text.isdigit() else f"nodes {text}"
