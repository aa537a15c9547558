"""docs/splits.md: what does not fit is what the plan says."""

import json
import re
from pathlib import Path

import pytest
from plan_kit import CONFIGS

from trl_multinode.plan.command_line import main

PAGE = (Path(__file__).parents[2] / "docs" / "splits.md").read_text()
SECTION = PAGE.partition("## What does not fit")[2].partition("\n## ")[0]
ROWS = [
    [cell.strip() for cell in line.strip("| ").split("|")] for line in re.findall(r"^\| \d.*$", SECTION, re.MULTILINE)
]
SPLITS = ("7+1", "6+2", "4+4")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}")
def test_the_table_of_what_fits_has_the_figures_of_the_plan(row, capsys):
    model, gpu, weights, *cells = row
    flags = ["--nodes", "64x8", "--gpu", gpu, "--completion", "4096", "--rows", "256", "--json"]
    main([str(CONFIGS / f"{model}.json"), *flags])
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert f"{next(layout['engine']['weights'] for layout in layouts) / 2**30:.1f}" == weights
    for split, cell in zip(SPLITS, cells, strict=True):
        widest = max(
            (layout for layout in layouts if layout["name"] == split),
            key=lambda layout: layout["engine"]["tensor_parallel"],
        )
        fits = f"{widest['full_rows']} rows, from {widest['nodes_needed']} nodes" if widest["fits"] else "no"
        assert cell == fits, (split, widest)


def test_the_table_has_every_model_that_the_page_names():
    assert {row[0] for row in ROWS} == {"32B", "70B", "235B", "405B"} and len(ROWS) == 6
