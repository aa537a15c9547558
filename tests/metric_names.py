"""Names of this library's metrics: those that docs/metrics.md has, and those among what a run has logged."""

import re
from collections.abc import Iterable
from pathlib import Path

from trl_multinode.run.phases import PHASES

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
AMONG_TRLS = {"rewards/all_nan_rows"}  # all others with this prefix are TRL's
PREFIXES = ("perf", "memory", "engine", "node<k>", "sync", "staleness", "logprobs", "balance")


def documented() -> set[str]:
    (section,) = [part for part in PAGE.read_text().split("\n## ") if part.startswith("Names\n")]
    rows = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([\w<>/]+)`", row)}


def general(name: str) -> str:
    """The name in the page: one row for all nodes, and one for all phases."""
    phases = "|".join(PHASES)
    return re.sub(rf"(?<=/)({phases})_s", "<phase>_s", re.sub(r"^node\d+/", "node<k>/", name))


def mine(names: Iterable[str]) -> set[str]:
    """The names of this library among those that a run has logged."""
    return {name for name in map(general, names) if name.split("/")[0] in PREFIXES or name in AMONG_TRLS}
