"""The table of results is what the recorded figures say, and every figure has its control and its spread beside it."""

import json
import runpy
from pathlib import Path

import balance_nodes
import long_tail
import numpy as np
import pytest
import table
from projection import MEASURED

from trl_multinode.batches.batching import plan_micro_steps
from trl_multinode.wire.messages import Generate, pack_ids

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


def test_the_table_was_written_from_these_results():
    assert runpy.run_path(str(FOLDER / "table.py"))["render"]() == (FOLDER / "RESULTS.md").read_text()


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


def test_lengths_of_the_long_tail_are_the_same_for_every_arm():
    lengths = long_tail.Lengths(48, 40, seed=0)
    again = long_tail.Lengths(48, 40, seed=0)
    assert lengths.rounds == again.rounds
    rows = np.array(lengths.rounds)
    assert rows.max() <= long_tail.LONGEST and rows.max(axis=1).mean() > 3 * rows.mean()
    groups = np.log(rows).reshape(-1, long_tail.GROUP)  # half of the variance of log lengths is common to a group
    assert groups.mean(axis=1).std() == pytest.approx(0.74, abs=0.08)
    for turn in (1, 2):  # the rows of a prompt get their lengths in the order of requests
        prompts = lengths.prompts(turn, 3)
        asked = [Generate(prompt=pack_ids(p), num_completions=1, max_tokens=9, sampling={}) for p in prompts]
        assert [lengths.limit(message).max_tokens for message in asked] == lengths.rounds[3]


def a_turn(arm: "long_tail.Arm", step_s: float, share: float) -> "long_tail.Turn":
    """Turn of 240 slots whose measured rounds take `step_s`, and the other ones longer."""
    measured = range(arm.first, arm.first + arm.measured)
    seconds = [step_s if number in measured else 9.0 for number in range(arm.rounds)]
    ends = np.cumsum([5.0, *seconds]).tolist()
    return long_tail.Turn(
        ends=ends, train_s=[0.5] * arm.rounds, tokens=[4800] * arm.rounds, ages=[(1.5, 4)] * arm.rounds,
        mixed=[0.6] * arm.rounds, clocks=[(share * end, end) for end in ends],
    )  # fmt: skip


def test_figures_of_the_long_tail_leave_out_the_ends_and_know_the_ideal():
    arm = long_tail.ARMS["in_flight_3"]
    step = {24: 0.006, 96: 0.008, 144: 0.01}.__getitem__  # seconds of one token of each of so many rows
    found = long_tail.figures(arm, a_turn(arm, 0.6, 0.4), 48, 240, 4800, step)
    assert found["step_s"] == pytest.approx(0.6) and found["whole_s"] > 1
    assert found["running_rows"] == pytest.approx(96) and found["row_seconds_share"] == pytest.approx(96 / 144)
    # 96 rows at once: 4800 tokens in 50 engine steps of 8 ms are less than the training
    assert found["ratio_to_ideal"] == pytest.approx(0.6 / 0.5)
    slower = long_tail.figures(arm, a_turn(arm, 0.6, 0.1), 48, 240, 4800, step)  # 24 rows, 200 steps of 6 ms
    assert slower["ratio_to_ideal"] == pytest.approx(0.6 / 1.2)
    assert (found["mean_age"], found["max_age"], found["trained_share"]) == (1.5, 4, 1.0)


def test_a_cell_of_the_long_tail_pairs_the_turns_of_a_repeat():
    def repeat(step_s: float) -> dict:
        return {
            name: {"step_s": step_s * (0.5 if "in_flight" in name else 1), "max_age": 3, "ratio_to_ideal": 1.2}
            for name in long_tail.ARMS
        }

    cell = long_tail.summarize([repeat(2.0), repeat(3.0)])
    assert cell["control_ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert cell["arms"]["in_flight_3"]["speedup_over_staleness_1"]["median"] == 2.0
    assert cell["arms"]["in_flight_3"]["step_s"] == {"median": 1.25, "low": 1.0, "high": 1.5}
    assert set(long_tail.reached(cell).values()) == {"reached"}
    cell["arms"]["in_flight_3"]["ratio_to_ideal"]["median"] = 1.3
    assert list(long_tail.reached(cell).values()) == ["reached", "missed"]
    cell["control_ratio"] = {"median": 1.0, "low": 0.5, "high": 1.5}  # two equal arms are far apart
    assert set(long_tail.reached(cell).values()) == {"undecided"}
