"""Figures of docs/tuning.md are those of benchmarks/results/, and its arithmetic is right."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tuning.md"
SOURCE = re.compile(r"`(?:(\w+\.json): )?([^`]+)`")


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|") and ".json: " in line]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def measured(file: str, path: str) -> float:
    """Value at a path of keys in a file of results; "~" stands for a slash in a key."""
    value: Any = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
    for key in path.split("/"):
        value = value[int(key)] if isinstance(value, list) else value[key.replace("~", "/")]
    return value


def differing(row: list[str]) -> list[str]:
    """The figures of a row that are not the measured ones, rounded as in the row."""
    found, file = [], ""
    for figure, (named, path) in zip(row[2:4], SOURCE.findall(row[4]), strict=True):
        file = named or file
        digits = len(figure.partition(".")[2])
        if f"{measured(file, path):.{digits}f}" != figure:
            found.append(f"{figure}: {path} is {measured(file, path)}")
    return found


def test_every_figure_is_the_measured_one():
    assert len(rows()) == 8
    assert [problem for row in rows() for problem in differing(row)] == []


def test_another_figure_is_found():
    row = ["", "", "0.56", "0.99", rows()[0][4]]
    assert len(differing(row)) == 1


def test_the_arithmetic_of_the_page():
    text = " ".join(PAGE.read_text().split())
    per_token = 2 * 36 * 8 * 128 * 2
    assert per_token / 1024 == 144 and f"{8192 * per_token / 2**30:.1f}" == "1.1" and "144 KiB" in text
    assert int(40 * 2**30 / (8192 * per_token)) == 35 and "40 GiB hold 35" in text
    few, many = 6.5 + 0.015 * 32, 6.5 + 0.015 * 256  # ms, of splits.md
    assert f"{few:.1f} ms for 32 rows" in text and f"{many:.1f} ms for 256" in text
    assert f"{(256 / many) / (32 / few):.1f} times as many" in text
    sync = 0.2 / (0.2 + 2 * 0.8)
    assert f"it becomes {sync:.0%}".replace("%", " %") in text
    cells = json.loads((ROOT / "benchmarks" / "results" / "balance_nodes.json").read_text())["cells"]
    shares = [cell["arms"]["world"]["lock_step_efficiency"] for cell in cells if cell["nodes"] == 8]
    assert "is {:.2f} with 8 rows per rank, {:.2f} with 32 and {:.2f} with 128".format(*shares) in text
    mix = [measured("overlap.json", f"generation_heavy/t_{part}_s/median") for part in ("gen", "train")]
    assert f"{mix[0] / mix[1]:.1f} times as long" in text
    shares = [measured("overlap.json", f"balanced/busy_share/{arm}/{who}") for arm in ("sync", "overlap")
              for who in ("ranks", "engines")]  # fmt: skip
    assert f"from about {50 * sum(shares[:2]):.0f} to {50 * sum(shares[2:]):.0f} %" in text
