"""Rounds in flight on two nodes under ZeRO-3: rows go on across weight updates, and every id is trained once."""

import json
import re
from collections import Counter
from math import isfinite
from pathlib import Path

import pytest

from trl_multinode.testing.faults import FAKE, FORKED, Faults
from trl_multinode.testing.nodes import Nodes

SCRIPT = Path(__file__).parent / "scripts" / "in_flight.py"
pytestmark = [pytest.mark.zero3, pytest.mark.two_node, pytest.mark.timeout(600)]
GROUP, WORLD = 4, 4
SLOW = Faults().slow_tokens(0.06)  # generation takes longer than a step, whatever else the machine does

# Four ranks x 8 rows = 8 prompts a round, two groups a rank
RUN = {
    "prompts": 40, "per_device_train_batch_size": 8, "steps_per_generation": 1, "gradient_accumulation_steps": 1,
    "max_completion_length": 256, "weight_update": "in_flight", "open_rounds": 2,
}  # fmt: skip
WHOLE = {
    "name": "whole", "output": "whole", "prompts": 64, "num_train_epochs": 1, "open_rounds": 4, "compare": 3,
    "mean": 20, "min_tokens": 16,
}  # fmt: skip
# 16 prompts a round, each trained twice in 4 optimizer steps; the run ends inside the second epoch, 24 rows unused
FEATURES = {
    "name": "features", "output": "features", "prompts": 48, "max_steps": 14, "num_iterations": 2,
    "steps_per_generation": 2, "gradient_accumulation_steps": 1, "micro_batch_tokens": 2048, "recompute_kv": True,
    "eval_strategy": "steps", "eval_steps": 5, "per_device_eval_batch_size": 4, "open_rounds": 2,
}  # fmt: skip
# 3 rounds in each of 2 epochs
KILLED = {
    "output": "killed", "prompts": 24, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1, "mean": 24,
}  # fmt: skip
KILL_AT = 2


# Six rounds of 4 prompts; vLLM makes thousands of tokens a second, so every row must be long to see a swap
REAL = {
    "name": "real", "output": "real", "prompts": 24, "num_train_epochs": 1, "compare": 3, "ignore_eos": True,
    "max_completion_length": 700,
}  # fmt: skip


def results(folder: Path, name: str, world: int = WORLD) -> list[dict]:
    return [json.loads((folder / f"{name}_rank{rank}.json").read_text()) for rank in range(world)]


def launch(nodes: Nodes, folder: Path, *jobs: dict) -> list[int]:
    nodes.launch(SCRIPT, str(folder), json.dumps([RUN | job for job in jobs]))
    return nodes.wait(timeout_s=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("in_flight")
    with Nodes(2, 2, folder=folder, env=SLOW.environment(FAKE), forked=True) as nodes:
        first = KILLED | {"name": "first", "kill_at": KILL_AT}
        assert 0 not in launch(nodes, folder, WHOLE, FEATURES, first), nodes.rank_log(0)[-3000:]
        assert (folder / "first_rank3.json").exists(), nodes.rank_log(0)[-3000:]
        assert launch(nodes, folder, KILLED | {"name": "second", "resume": True}) == [0, 0], nodes.rank_log(0)[-3000:]
        (folder / "second.log").write_text("".join(nodes.rank_log(rank) for rank in range(WORLD)))
    return folder


def trained(runs: list[dict]) -> Counter:
    """Prompt -> rows that were trained, of all ranks."""
    return Counter(prompt for run in runs for one in run["rounds"] for prompt in one["prompts"])


def versions(runs: list[dict]) -> list[list[list[int]]]:
    return [row for run in runs for one in run["rounds"] for row in one["versions"]]


def losses(run: dict) -> list[float]:
    return [entry["loss"] for entry in run["log"] if "loss" in entry]


def test_every_id_of_every_epoch_is_trained_once_and_nothing_is_left_under_way(folder):
    runs = results(folder, "whole")
    assert trained(runs) == Counter({f"{i} + {i + 1} =": GROUP for i in range(WHOLE["prompts"])})
    assert [run["rows_left"] for run in runs] == [0] * WORLD
    assert all(len(losses(run)) == 8 and all(map(isfinite, losses(run))) for run in runs)


def test_at_least_a_third_of_the_rows_hold_several_versions_and_the_reward_sees_the_rows_that_were_taken(folder):
    runs = results(folder, "whole")
    rows = versions(runs)
    assert sum(len(row) > 1 for row in rows) > 0.3 * len(rows)
    lengths = [row[-1][2] for row in rows]
    assert max(lengths) > 4 * min(lengths)
    for run in runs:
        assert all(one["rows"] == one["made"] for one in run["rounds"])
        assert [one["open"] for one in run["rounds"]] == [8, 8, 8, 8, 6, 4, 2, 0]


def test_scoring_is_trls_own_on_the_same_rows(folder):
    """In a round with old and mixed rows; the loss is that of the same method on equal tensors."""
    for run in results(folder, "whole"):
        different, (expected, loss), names = run["compared"]
        assert different == [] and expected == loss and names > 6
        assert run["rounds"][WHOLE["compare"]]["lag"][0] > 0


def test_ages_are_logged_and_bounded_and_the_spot_check_runs_in_mixed_rounds(folder):
    runs = results(folder, "whole")
    log = [entry for entry in runs[0]["log"] if "loss" in entry]
    assert log[0]["staleness/rounds_mean"] == 0.0
    assert 0 < max(entry["staleness/rounds_max"] for entry in log) <= 3 * WHOLE["open_rounds"]
    assert max(entry["in_flight/mixed_rows"] for entry in log) > 0.3
    assert max(entry["in_flight/swapped_rows"] for entry in log) > 4
    assert all(entry["staleness/effective_sample_size"] > 0 for entry in log)
    assert all(0.0 <= run["spot_check"] < 1e-3 for run in runs) and any(run["spot_check"] > 0 for run in runs)


def test_iterations_blocks_balanced_batches_evaluation_and_the_end_of_the_run_in_an_epoch(folder):
    runs = results(folder, "features")
    # rounds of 4 optimizer steps: 3 in the first epoch; one and a half in the second, which begins the half one too
    assert [one["step"] for one in runs[0]["rounds"]] == [0, 4, 8, 12]
    first = [run | {"rounds": run["rounds"][:3]} for run in runs]
    assert trained(first) == Counter({f"{i} + {i + 1} =": GROUP for i in range(48)})
    assert sorted(Counter(trained([run | {"rounds": run["rounds"][3:]} for run in runs]).values())) == [GROUP]
    assert [run["rows_left"] for run in runs] == [0] * WORLD
    assert all(map(isfinite, losses(runs[0]))) and len(losses(runs[0])) == 14
    assert len([entry for entry in runs[0]["log"] if "eval_reward" in entry]) == 3  # the last one after the last step
    assert any(len(row) > 1 for row in versions(runs))


def test_ids_trained_before_a_kill_and_after_the_resume_are_all_ids_once(folder):
    first, second = results(folder, "first"), results(folder, "second")
    assert [one["step"] for one in first[0]["rounds"]] == list(range(KILL_AT))
    assert [one["step"] for one in second[0]["rounds"]] == list(range(KILL_AT, 6))
    assert trained(first + second) == Counter({f"{i} + {i + 1} =": 2 * GROUP for i in range(KILLED["prompts"])})
    kept = [row for row in versions(second) if row[0][0] < 0]
    assert kept, "no row of the checkpoint had ended"
    assert {step for row in kept for update, step, _ in row if update < 0} <= set(range(KILL_AT))
    continued = [row for row in kept if row[-1][0] > 0]
    said = re.findall(
        r"(\d+) rows that were under way at the checkpoint continue, (\d+) begin", (folder / "second.log").read_text()
    )
    assert len(continued) == sum(int(number) for number, _ in said) > 0


@pytest.mark.engine
def test_vllm_swaps_weights_under_rows_of_a_whole_run(tmp_path):
    """ZeRO-3 on two nodes of one rank; the log-probs of the rows' newest weights are the trainer's in every round."""
    with Nodes(2, 1, folder=tmp_path, env=Faults().environment(FORKED), forked=True) as nodes:
        assert launch(nodes, tmp_path, REAL) == [0, 0], nodes.rank_log(0)[-3000:]
    runs = results(tmp_path, "real", world=2)
    assert trained(runs) == Counter({f"{i} + {i + 1} =": GROUP for i in range(REAL["prompts"])})
    assert any(len(row) > 1 for row in versions(runs))
    for run in runs:
        assert run["compared"][0] == [] and 0.0 < run["spot_check"] < 1e-3 and run["rows_left"] == 0
        assert all(map(isfinite, losses(run)))
