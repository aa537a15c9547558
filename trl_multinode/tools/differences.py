"""Versions and other facts that are not the same on all nodes, as `doctor` and `launch` report them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from ..run.values import listed
from ..run.versions import MISSING, MUST_AGREE, major_minor

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


def differences(per_node: Sequence[dict[str, str]], names: Sequence[str]) -> list[Difference]:
    """
    Compare the versions of the nodes.

    Args:
        per_node (`Sequence[dict[str, str]]`):
            Result of [`local_versions`] of each node, in the order of the nodes.
        names (`Sequence[str]`):
            Names of the nodes.

    Returns:
        `list[Difference]`: one entry per library that differs, errors first.
    """
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


def _named(nodes: list[str]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {listed(nodes, NAMED_NODES)}"
