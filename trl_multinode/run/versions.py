"""Versions of the libraries on one node, and their differences between nodes."""

import platform
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ..libraries import installed
from .values import listed

# in the order of a report
LIBRARIES = (
    "torch", "transformers", "trl", "vllm", "deepspeed", "accelerate", "peft", "trl_multinode",
)  # fmt: skip
# a different major.minor of these is an error, any other difference a warning
MUST_AGREE = (
    "trl",
    "vllm",
    "torch",
)
MISSING = "none"  # the version of a library that a node lacks
NAMED_NODES = 8  # a line names no more nodes of one version


@dataclass(frozen=True)
class Difference:
    """A library whose version is not the same on all nodes."""

    library: str
    nodes: dict[str, list[str]]  # version -> nodes that have it, the most frequent version first
    is_error: bool

    def __str__(self) -> str:
        found = ", ".join(f"{version} on {_named(names)}" for version, names in self.nodes.items())
        return f"{self.library}: {found}"


def local_versions() -> dict[str, str]:
    """Return the versions of this node's libraries, of Python, and of the CUDA or ROCm that torch was built for."""
    from torch.version import cuda, hip

    found = {library: installed(library) or MISSING for library in LIBRARIES}
    return {
        **found,
        "python": platform.python_version(),
        "cuda": cuda or (f"ROCm {hip}" if hip else MISSING),
    }


def differences(
    per_node: Sequence[dict[str, str]], names: Sequence[str] | None = None
) -> list[Difference]:
    """
    Compare the versions of the nodes.

    Args:
        per_node (`Sequence[dict[str, str]]`):
            Result of [`local_versions`] of each node, in the order of the nodes.
        names (`Sequence[str]`, *optional*):
            Names of the nodes; their numbers by default.

    Returns:
        `list[Difference]`: one entry per library that differs, errors first.
    """
    names = [str(node) for node in range(len(per_node))] if names is None else names
    found = []
    for library in dict.fromkeys(library for versions in per_node for library in versions):
        nodes: dict[str, list[str]] = defaultdict(list)
        for name, versions in zip(names, per_node, strict=True):
            nodes[versions.get(library, MISSING)].append(name)
        if len(nodes) > 1:
            by_count = dict(sorted(nodes.items(), key=lambda entry: -len(entry[1])))
            is_error = (
                library in MUST_AGREE and len({major_minor(version) for version in nodes}) > 1
            )
            found.append(Difference(library, by_count, is_error))
    return sorted(found, key=lambda difference: not difference.is_error)


def major_minor(version: str) -> tuple[str, ...]:
    """Return the first two parts of a version."""
    return tuple(version.split("+")[0].split(".")[:2])


def _named(nodes: list[str]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {listed(nodes, NAMED_NODES)}"
