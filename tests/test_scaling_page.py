"""docs/scaling.md has the recorded figures, and what it calculates and simulates is so today."""

import asyncio
import json
import re
from pathlib import Path

import pytest
import scaling

PAGE = (Path(__file__).parents[1] / "docs" / "scaling.md").read_text()
FOUND = json.loads(scaling.RESULTS.read_text())


@pytest.mark.parametrize("name", ["fixed_batch", "failures"])
def test_the_tables_are_those_of_the_recorded_figures(name):
    assert scaling.tables(FOUND)[name] in PAGE, "run `python benchmarks/scaling.py --tables`"


@pytest.mark.parametrize("nodes", [2, 8])
def test_the_planner_gives_the_recorded_efficiency(nodes):
    found = scaling.fixed_batch(nodes)
    assert found == pytest.approx(FOUND["fixed_batch"][str(nodes)], rel=0.02)
    assert found["world"] > found["node"] and scaling.node_tokens(nodes) == pytest.approx(
        FOUND["node_tokens"][str(nodes)]
    )


def test_a_fuller_node_and_fewer_rows_cost_more_on_more_nodes():
    of_nodes = [FOUND["fixed_batch"][str(nodes)]["node"] for nodes in scaling.NODES]
    assert of_nodes == sorted(of_nodes, reverse=True)
    assert list(FOUND["node_tokens"].values()) == sorted(FOUND["node_tokens"].values())


def test_failures_and_checkpoints_are_the_arithmetic_of_the_page():
    low, high = scaling.failures(64).values()
    assert (low, high) == (pytest.approx(419 / 54 / 2048 * 64), pytest.approx(0.416))
    cell = scaling.checkpoints(10, 8, per_day=1.0)  # 140 GB: 14 s; one failure a day
    assert cell.seconds == pytest.approx(14) and cell.minutes * 60 == pytest.approx((2 * 14 * 86400) ** 0.5)
    assert cell.lost == pytest.approx((2 * 14 / 86400) ** 0.5)  # at the best interval both parts are equal


def test_a_roll_call_of_many_nodes_ends_within_seconds(monkeypatch):
    monkeypatch.setattr(scaling.rollcall, "say", scaling.rollcall.say)  # the benchmark replaces both
    monkeypatch.setattr(scaling.rollcall._Node, "_is_local", scaling.rollcall._Node._is_local)
    assert asyncio.run(scaling.roll_call(16)) < 20.0


def test_every_row_says_how_its_figure_was_got():
    breaks, grows, *_ = re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE)
    for text, columns, count in ((breaks, 6, 12), (grows, 4, 7)):
        rows = [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]
        assert len(rows) == count and {len(row) for row in rows} == {columns}
        for row in rows:
            assert re.search(r"\b(measured|simulated|arithmetic)\b", row[-1]) and re.search(
                r"\d", row[columns // 2]
            ), row
