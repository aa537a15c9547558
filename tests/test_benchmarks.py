"""The table of results is what the recorded figures say, and every figure has its control and its spread beside it."""

import json
from pathlib import Path

import balance_nodes
import long_tail
import numpy as np
import pytest
import table
from projection import MEASURED

from trl_multinode.batches.batching import plan_micro_steps

pytestmark = pytest.mark.nightly  # records of benchmarks, which no user runs
FOLDER = Path(__file__).parents[1] / "benchmarks"


def recorded(name: str) -> dict:
    return json.loads((FOLDER / "results" / f"{name}.json").read_text())


def controls(found: object) -> list[float]:
    """Return the median of each comparison of two equal arms in a record."""
    if isinstance(found, list):
        return [ratio for each in found for ratio in controls(each)]
    if not isinstance(found, dict):
        return []
    ratio = found.get("control_ratio")
    own = [] if ratio is None else [ratio["median"] if isinstance(ratio, dict) else ratio]
    return own + [ratio for each in found.values() for ratio in controls(each)]


CONTROLLED = ("agents", "balance", "exchange", "lora", "long_tail", "overlap", "scoring", "sync")


@pytest.mark.parametrize("name", CONTROLLED)
def test_equal_arms_of_a_benchmark_take_the_same_time(name):
    ratios = controls(recorded(name))
    assert ratios and all(ratio == pytest.approx(1.0, abs=0.25) for ratio in ratios), ratios


def test_each_record_keeps_the_bound_that_the_documents_promise():
    assert recorded("balance")["gradient_rel_diff"] < 1e-5
    for mix in recorded("agents").values():
        assert mix["step_ratio_vs_max"]["median"] <= 1.15
    for name in ("waits", "awaits"):
        assert recorded("scoring")[name]["step_ratio"]["median"] <= 1.1
    lora = recorded("lora")
    assert lora["bytes_ratio"] <= 1.05 and lora["base_digest_identical"]
    for cell in recorded("exchange")["cells"]:
        assert cell["exchange_s_per_mtoken"]["median"] <= 0.3
    for cell in recorded("sync")["cells"]:
        assert cell["world_collectives"] <= cell["buckets"] + 2 < cell["world_collectives_trl"]
        assert cell["inbound_ratio"]["high"] <= cell["inbound_limit"]
        assert cell["worst_logprob_difference"] < 1e-3 and cell["stale_logprob_difference"] > 0.1
        assert cell["extra_memory_buckets"] <= 3
    for cell in recorded("long_tail")["cells"].values():
        assert cell["aim"] == long_tail.reached(cell)
        # an arm that leaves the long rows for later would be fast for no good reason
        assert cell["arms"]["in_flight_3"]["trained_share"]["low"] > 0.85
    for world in recorded("control_plane").values():
        assert world["on_over_off"] <= 1.5 and world["connections_per_rank"] <= 3.0


def test_the_balance_over_nodes_is_that_of_the_planner_and_of_the_page():
    found = recorded("balance_nodes")
    for cell in found["cells"]:
        for arm in ("node", "world"):
            assert cell["arms"][arm]["planning_ms"] + cell["arms"][arm]["exchange_ms"] <= 50
        assert cell["arms"]["world"]["lock_step_efficiency"] >= (0.85 if cell["rows"] == 8 else 0.94)
    (cell,) = [cell for cell in found["cells"] if (cell["nodes"], cell["rows"]) == (8, 32)]
    for arm, across in (("node", 7), ("world", 56)):
        drawn = [balance_nodes.lengths(56, 32, seed) for seed in range(found["seeds"])]
        plans = [plan_micro_steps(one, across, balance_nodes.CAP, balance_nodes.LINEAR) for one in drawn]
        efficiency = np.mean([plan.lock_step_efficiency() for plan in plans])
        assert efficiency == pytest.approx(cell["arms"][arm]["lock_step_efficiency"], rel=1e-9)
    lines = [line for line in table.balance_nodes(found).splitlines() if line.startswith("|")]
    assert "\n".join(lines) in (FOLDER.parent / "docs" / "balance.md").read_text()


def measured_cells() -> list[dict]:
    return recorded(Path(MEASURED).stem)["cells"]


def test_the_projection_says_how_far_its_arithmetic_is_from_every_measured_cell():
    found = recorded("projection")
    measured = {(c["model"], c["nodes"], c["link"]): c["wall_s"]["ours"]["median"] for c in measured_cells()}
    assert {(c["model"], c["nodes"], c["link"]): c["measured_s"] for c in found["cells"]} == measured
    assert found["worst_error"] == max(abs(cell["error"]) for cell in found["cells"]) <= found["limit"] == 0.15
    assert sum(cell["fitted"] for cell in found["cells"]) == 2  # the others are predictions
