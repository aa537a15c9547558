"""Names of metrics: those of this library and of TRL in docs/log.md, those that TRL's code logs, those of a run."""

import re
from collections.abc import Iterable
from pathlib import Path

from trl_multinode.run.phases import PHASES

PAGE = Path(__file__).parents[1] / "docs" / "log.md"
TRLS = "\n### TRL's own metrics\n"  # heading of the part with TRL's names
AMONG_TRLS = {"rewards/all_nan_rows"}  # all others with this prefix are TRL's
PREFIXES = ("perf", "memory", "engine", "node<k>", "sync", "staleness", "logprobs", "balance", "in_flight",
            "dynamic_sampling")  # fmt: skip


def _rows(text: str) -> list[list[str]]:
    """The cells of each row of the tables whose first cell is a name."""
    lines = re.findall(r"^\| (`.*) \|$", text, re.MULTILINE)
    return [[cell.strip() for cell in f"{line} ".split(" | ")] for line in lines]


def _names_section() -> list[str]:
    """The part with this library's names, and the part with TRL's."""
    (section,) = [part for part in PAGE.read_text().split("\n## ") if part.startswith("Names\n")]
    return section.split(TRLS)


def _names(text: str) -> set[str]:
    return {name for row in _rows(text) for name in re.findall(r"`([\w<>/]+)`", row[0])}


def without_reading() -> list[str]:
    """The rows that do not say how to read a metric."""
    return [row[0] for part in _names_section() for row in _rows(part) if len(row) != 3 or not row[2]]


def documented() -> set[str]:
    return _names(_names_section()[0])


def documented_of_trl() -> set[str]:
    return _names(_names_section()[1])


def general(name: str) -> str:
    """The name in the page: one row for all nodes, and one for all phases."""
    phases = "|".join(PHASES)
    return re.sub(rf"(?<=/)({phases})_s", "<phase>_s", re.sub(r"^node\d+/", "node<k>/", name))


def mine(names: Iterable[str]) -> set[str]:
    """The names of this library among those that a run has logged."""
    return {name for name in map(general, names) if name.split("/")[0] in PREFIXES or name in AMONG_TRLS}


def of_trl(source: str) -> set[str]:
    """The names that the source of one of TRL's trainers logs; a value in a name becomes `<name>`."""
    names = re.findall(r"""self\._metrics\[(?:mode|"train")\]\[f?"([^"]+)"\]""", source)
    return {re.sub(r"\{[^}]*\}", "<name>", name) for name in names}


def of_transformers(source: str) -> set[str]:
    """The names that transformers' Trainer logs at a step of training."""
    return set(re.findall(r"""logs\["(\w+)"\] = """, source))
