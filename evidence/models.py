"""pytest plugin of `make models`: it writes the table of docs/evidence/models.md from the results of tests.

A test records what it saw of an architecture: `record_property("model", json.dumps({"name": ..., ...}))`, where `name`
is a key of `multinode_kit/architectures.py: ARCHITECTURES`. `python evidence/models.py` writes the table from
docs/evidence/models.json.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))
from multinode_kit.architectures import ARCHITECTURES  # noqa: E402
from multinode_kit.published import PUBLISHED, nodes_that_fit  # noqa: E402

RECORD = ROOT / "docs" / "evidence" / "models.json"
PAGE = RECORD.with_suffix(".md")
BEGIN, END = "<!-- written by evidence/models.py -->\n", "<!-- end -->"
HEAD = """\
| architecture | dtype | tensors | after a sync | before it | adapter | two nodes | fits from | special features |
|---|---|---|---|---|---|---|---|---|
"""

seen: dict[str, dict] = defaultdict(dict)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        for name, value in item.user_properties:
            if name == "model":
                figures = json.loads(value)
                seen[figures.pop("name")] |= figures if report.outcome != "failed" else {}
    return report


def pytest_sessionfinish() -> None:
    found = defaultdict(dict, recorded())
    for name, figures in seen.items():
        found[name] |= figures
    RECORD.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    write_page(found)


def recorded() -> dict[str, dict]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def row(name: str, figures: dict) -> str:
    """Return the row of an architecture."""
    known = ARCHITECTURES[name]
    adapter = {True: "✓", False: "merged", None: ""}[figures.get("adapter")]
    after, before = (number(figures.get(key)) for key in ("after", "before"))
    sizes = ""
    if name in PUBLISHED:
        title, kind = PUBLISHED[name]
        sizes = f"{title}: {nodes_that_fit(kind)}"
    two_nodes = "✓" if figures.get("two_nodes") else ""
    cells = [
        known.title, known.dtype_name, str(figures.get("tensors", "")), after, before, adapter, two_nodes, sizes,
        known.special,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |\n"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def write_page(found: dict[str, dict]) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = "".join(row(name, found.get(name, {})) for name in ARCHITECTURES)
    PAGE.write_text(f"{before}{BEGIN}{HEAD}{rows}{END}{after}")


if __name__ == "__main__":
    write_page(recorded())
