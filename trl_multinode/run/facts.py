"""Facts that must be equal on all ranks, or on the ranks of a node, compared through the store.

A rank that differs is found by digests, so that a launch whose ranks agree costs one meeting and 40 bytes per rank. If
the digests differ, the facts are split into parts by their names, and the meeting repeats for the parts that differ,
until they are single facts; their values travel in a last one.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from .meeting import Meeting
from .topology import Topology
from .values import digest_of, flat, is_secret, listed, shown

# that differ and are split further, and so about the number of facts that a message names
MOST_SETS = 4
NAME_DIGITS = 8  # of a name's digest; they tell the facts of a run apart
MOST_NAMED = 6  # ranks or nodes
ABSENT = "nothing"


@dataclass(frozen=True)
class Disagreement:
    """A fact that is not the same where it must be."""

    name: str
    values: dict[str, list[int]]  # value -> ranks, the lowest rank first
    nodes: dict[int, int]  # rank -> its node

    def __str__(self) -> str:
        found = []
        for value, ranks in self.values.items():
            nodes = sorted({self.nodes[rank] for rank in ranks})
            found.append(f"{value} on {_named('rank', ranks)} of {_named('node', nodes)}")
        return f"{self.name} ({', '.join(found)})"


class Facts:
    """Facts of one rank.

    ```python
    facts = Facts(topology)
    facts.add("seed", 42)
    facts.add("vllm_devices", [3], by_node=True)  # may differ between nodes, not between the ranks of one
    ```
    """

    def __init__(self, topology: Topology):
        self.topology = topology
        self.scopes = ("all/", f"node{topology.node}/")
        self.texts: dict[tuple[str, str], str] = {}  # scope, name -> text

    def add(self, name: str, value: Any, by_node: bool = False) -> None:
        """Add a value, a nested dict as one fact for each of its parts."""
        self.texts |= {(self.scopes[by_node], part): text for part, text in flat(name, value)}

    def add_all(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self.add(name, value)

    def part(self, prefix: str) -> list[tuple[str, str]]:
        """Return name and text of the facts of which `prefix` begins the scope with the digest of the name."""
        return sorted(
            (name, text)
            for (scope, name), text in self.texts.items()
            if f"{scope}{digest_of(name)}".startswith(prefix)
        )

    def digest(self, prefix: str) -> str:
        """Return the digest of a part; an empty text for one of another node, in which this rank has no fact."""
        return digest_of(json.dumps(self.part(prefix))) if prefix.startswith(self.scopes) else ""


def disagreements(meeting: Meeting, facts: Facts) -> list[Disagreement]:
    """
    Compare the facts of all ranks. Every rank calls it, and gets the same answer.

    Args:
        meeting ([`Meeting`]):
            Meeting of all ranks.
        facts ([`Facts`]):
            Facts of this rank.

    Returns:
        `list[Disagreement]`: facts that differ, ordered by name; not all of them if they are many.
    """
    sets = list(facts.scopes)
    while True:
        differing = _differing(meeting.wait(" ".join(f"{one}={facts.digest(one)}" for one in sets)))
        if not differing:
            return []
        # all sets have prefixes of one length
        if len(differing[0].partition("/")[2]) == NAME_DIGITS:
            return _values(meeting, facts, differing)
        sets = [one + digit for one in differing for digit in "0123456789abcdef"]


def _differing(words: Iterable[str]) -> list[str]:
    digests: dict[str, set[str]] = defaultdict(set)
    for word in words:
        one, _, digest = word.partition("=")
        if digest:  # a rank of another node has none
            digests[one].add(digest)
    return sorted(one for one, found in digests.items() if len(found) > 1)[:MOST_SETS]


def _values(meeting: Meeting, facts: Facts, sets: Sequence[str]) -> list[Disagreement]:
    mine, topology = [], facts.topology
    for one in sets:
        if one.startswith(facts.scopes):
            name, text = next(iter(facts.part(one)), ("", ABSENT))
            # values are told apart, and a secret is neither sent nor shown
            value = f"(hidden, {digest_of(text)[:4]})" if is_secret(name, text) else shown(text)
            mine.append([one, topology.rank, topology.node, name, value])
    words = meeting.wait(" ".join(quote(json.dumps(value)) for value in mine))
    entries = sorted(json.loads(unquote(word)) for word in words)
    names = {where: name for where, *_, name, _ in entries if name}
    nodes = {rank: node for _, rank, node, *_ in entries}
    values: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for where, rank, _, _, text in entries:
        values[names[where]][text].append(rank)
    return [Disagreement(name, dict(found), nodes) for name, found in sorted(values.items())]


def _named(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'s' if len(numbers) > 1 else ''} {listed(numbers, MOST_NAMED)}"
