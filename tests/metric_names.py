"""Names of this library's metrics: those in docs/operate/observe.md, and those of a run."""

import re
from collections.abc import Iterable
from pathlib import Path

from trl_multinode.run.phases import PHASES

PAGE = Path(__file__).parents[1] / "docs" / "operate" / "observe.md"
TRLS = "\n### TRL's own metrics\n"  # heading of the part with TRL's names
AMONG_TRLS = {"rewards/all_nan_rows"}  # all others with this prefix are TRL's
PREFIXES = ("perf", "memory", "engine", "node<k>", "sync", "staleness", "logprobs", "balance", "in_flight",
            "dynamic_sampling", "pool")  # fmt: skip


def documented() -> set[str]:
    """The names in the first column of the page's tables."""
    (section,) = [part for part in PAGE.read_text().split("\n## ") if part.startswith("Names\n")]
    mine_only = section.partition(TRLS)[0]
    rows = re.findall(r"^\| (`.*) \|$", mine_only, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([\w<>/]+)`", row.split(" | ")[0])}


def general(name: str) -> str:
    """The name in the page: one row for all nodes, and one for all phases."""
    phases = "|".join(PHASES)
    return re.sub(rf"(?<=/)({phases})_s", "<phase>_s", re.sub(r"^node\d+/", "node<k>/", name))


def mine(names: Iterable[str]) -> set[str]:
    """The names of this library among those that a run has logged."""
    return {
        name for name in map(general, names) if name.split("/")[0] in PREFIXES or name in AMONG_TRLS
    }
