"""The projection: what it prints and records, its inputs with their sources, and what docs/projection.md shows."""

import json
import re
import shlex
import sys
from pathlib import Path

import projection
import pytest
from published import PUBLISHED

from trl_multinode.plan.sync_seconds import TRANSPORTS, Rates

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "projection.md").read_text()
COMMANDS = re.findall(r"```console\n\$ python benchmarks/projection.py *(.*)\n((?:.*\n)*?)```", PAGE)


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run the command with the recorded cells, into a folder of its own."""
    (tmp_path / projection.MEASURED).write_text((RESULTS / projection.MEASURED).read_text())
    monkeypatch.setattr(projection, "RESULTS", tmp_path)

    def call(words: str = "") -> str:
        monkeypatch.setattr(sys, "argv", ["projection.py", *shlex.split(words)])
        projection.main()
        return capsys.readouterr().out

    call.folder = tmp_path
    return call


def test_the_recorded_projection_is_that_of_the_code():
    recorded = json.loads((RESULTS / "projection.json").read_text())
    expected = json.loads(json.dumps(projection.project()))  # as JSON has it: keys are text
    assert {name: recorded[name] for name in expected} == expected


def test_every_model_transport_network_and_number_of_nodes_has_its_seconds():
    one, all_rails = projection.project()["projected"].values()
    cells = {(row["model"], row["transport"]) for row in one}
    assert cells == {(name, kind) for name in ("7B", "32B", "70B", "235B", "405B") for kind in TRANSPORTS}
    assert all(list(row["seconds"]) == [2, 4, 8, 16, 32, 64, 128] for row in (*one, *all_rails))
    assert {row["rails"] for row in one} == {1}
    assert {row["model"]: row["rails"] for row in all_rails} == {"7B": 7, "32B": 7, "70B": 6, "235B": 4, "405B": 4}
    for slow, fast in zip(one, all_rails, strict=True):
        assert all(fast["seconds"][nodes] <= slow["seconds"][nodes] for nodes in slow["seconds"])


def test_every_rate_and_every_published_figure_says_where_it_is_from():
    found = projection.project()
    assert found["inputs"].keys() == Rates.__dataclass_fields__.keys()
    for each in found["inputs"].values():
        assert (each["source"] or "").startswith("https://") or re.search("assumed|benchmarks/", each["how"]), each
    assert all(other.source.startswith("https://") and 0 < other.low_s <= other.high_s for other in PUBLISHED)
    assert all(source in (ROOT / "benchmarks" / "RESULTS.md").read_text() for source in {o.source for o in PUBLISHED})


def test_the_seconds_of_a_loaders_call_are_of_the_measured_order():
    measured = json.loads((RESULTS / "loader_calls.json").read_text())["experts"]["call_s"]
    assert Rates().call_s / 3 < measured < Rates().call_s * 3


def test_the_command_records_the_defaults_only(run):
    run("--nic 200")
    run("--rails 7")
    assert not (run.folder / "projection.json").exists()
    run()
    assert json.loads((run.folder / "projection.json").read_text())["worst_error"] <= projection.LIMIT


def test_other_hardware_and_other_settings_change_the_tables(run):
    usual = run()
    assert "NCCL's payload gets 92%" in usual and "from the command line" not in usual
    slow = run("--nic 100 --gpu-host 20")
    assert "from the command line" in slow and "12.5 GB/s" in slow and "20 GB/s" in slow
    assert "7 NICs per node" in run("--rails 7") and "one NIC per node" not in run("--rails 7")
    row = re.compile(r"32B .* host +([\d.]+)")
    took = [float(row.search(run(words))[1]) for words in ("", "--unlocked worker", "--unlocked both")]
    assert took[0] < 3 < took[1] <= took[2]


def test_the_fitted_cells_are_reproduced_and_the_others_are_not_used():
    cells = json.loads((RESULTS / projection.MEASURED).read_text())["cells"]
    rows = projection.check(cells)
    assert [row["error"] for row in rows if row["fitted"]] == pytest.approx([0.0, 0.0], abs=1e-3)
    for cell in cells:
        if cell["model"] == "150M":
            cell["wall_s"]["ours"]["median"] *= 2
    again = projection.check(cells)
    assert [row["predicted_s"] for row in again] == [row["predicted_s"] for row in rows]


def test_a_formula_that_misses_a_measured_cell_ends_in_an_error(run):
    cells = json.loads((run.folder / projection.MEASURED).read_text())
    cells["cells"][-1]["wall_s"]["ours"]["median"] *= 1.5
    (run.folder / projection.MEASURED).write_text(json.dumps(cells))
    with pytest.raises(SystemExit, match=r"RESULTS\.md"):
        run()


@pytest.mark.parametrize(("words", "shown"), COMMANDS)
def test_the_page_has_what_the_command_prints(run, words, shown):
    printed = [line.rstrip() for line in run(words).splitlines()]
    assert shown.strip() and all(line == "..." or line.rstrip() in printed for line in shown.splitlines())
