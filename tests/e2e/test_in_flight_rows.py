"""Rows go on across weight updates on two nodes under ZeRO-3, and every id is trained once."""

from collections import Counter
from math import isfinite
from pathlib import Path

import pytest
from in_flight_runs import GROUP, SLOW, WORLD, check_whole, end, losses, losses_of, results, start, trained, versions

from trl_multinode.testing.faults import FAKE
from trl_multinode.testing.nodes import Nodes

pytestmark = [pytest.mark.zero3, pytest.mark.two_node]

WHOLE = {
    "name": "whole", "output": "whole", "prompts": 64, "num_train_epochs": 1, "open_rounds": 4, "compare": 3,
    "mean": 20, "min_tokens": 16, "num_engines": 2,
}  # fmt: skip
# 16 prompts a round, each trained twice in 4 optimizer steps; the run ends inside the second epoch, 24 rows unused
FEATURES = {
    "name": "features", "output": "features", "prompts": 48, "max_steps": 14, "num_iterations": 2,
    "steps_per_generation": 2, "gradient_accumulation_steps": 1, "micro_batch_tokens": 2048, "recompute_kv": True,
    "eval_strategy": "steps", "eval_steps": 5, "per_device_eval_batch_size": 4, "open_rounds": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Both runs, side by side, because their engines mostly sleep."""
    folders = {job["name"]: tmp_path_factory.mktemp(job["name"]) for job in (WHOLE, FEATURES)}
    env = SLOW.environment(FAKE)
    with (
        Nodes(2, 2, folder=folders["whole"], env=env, forked=True) as whole,
        Nodes(2, 2, folder=folders["features"], env=env, forked=True) as features,
    ):
        start(whole, WHOLE)
        start(features, FEATURES)
        end(whole)
        end(features)
    return folders


def test_every_id_of_every_epoch_is_trained_once_and_nothing_is_left_under_way(folders):
    runs = results(folders["whole"], "whole")
    check_whole(runs, WHOLE["prompts"])
    assert {engine for run in runs for one in run["rounds"] for engine in one["engines"]} == {0, 1}
    assert all(len(losses(run)) == 8 and all(map(isfinite, losses(run))) for run in runs)


def test_rows_of_every_rank_hold_several_versions_and_the_reward_sees_the_rows_that_were_taken(folders):
    runs = results(folders["whole"], "whole")
    rows = versions(runs)
    # How many they are depends on how long a step takes on this machine
    assert all(any(len(row) > 1 for row in versions([run])) for run in runs)
    lengths = [row[-1][2] for row in rows]
    assert max(lengths) > 4 * min(lengths)
    for run in runs:
        assert all(one["rows"] == one["made"] for one in run["rounds"])
        assert [one["open"] for one in run["rounds"]] == [8, 8, 8, 8, 6, 4, 2, 0]


def test_scoring_is_trls_own_on_the_same_rows(folders):
    """In a round with old and mixed rows; the loss is that of the same method on equal tensors."""
    for run in results(folders["whole"], "whole"):
        different, (expected, loss), names = run["compared"]
        assert different == [] and expected == loss and names > 6
        assert run["rounds"][WHOLE["compare"]]["lag"][0] > 0


def test_ages_are_logged_and_bounded_and_the_spot_check_runs_in_mixed_rounds(folders):
    runs = results(folders["whole"], "whole")
    log = [entry for entry in runs[0]["log"] if "loss" in entry]
    assert log[0]["staleness/rounds_mean"] == 0.0
    assert 0 < max(entry["staleness/rounds_max"] for entry in log) <= 3 * WHOLE["open_rounds"]
    assert max(entry["in_flight/mixed_rows"] for entry in log) > 0
    assert max(entry["in_flight/swapped_rows"] for entry in log) > 0
    assert all(entry["staleness/effective_sample_size"] > 0 for entry in log)
    assert all(0.0 <= run["spot_check"] < 1e-3 for run in runs) and any(run["spot_check"] > 0 for run in runs)


def test_iterations_blocks_balanced_batches_evaluation_and_the_end_of_the_run_in_an_epoch(folders):
    runs = results(folders["features"], "features")
    # rounds of 4 optimizer steps: 3 in the first epoch; one and a half in the second, which begins the half one too
    assert [one["step"] for one in runs[0]["rounds"]] == [0, 4, 8, 12]
    first = [run | {"rounds": run["rounds"][:3]} for run in runs]
    assert trained(first) == Counter({f"{i} + {i + 1} =": GROUP for i in range(48)})
    assert sorted(Counter(trained([run | {"rounds": run["rounds"][3:]} for run in runs]).values())) == [GROUP]
    epoch = [
        run | {"trained": {step: rows for step, rows in run["trained"].items() if int(step) < 12}} for run in runs
    ]
    assert Counter(losses_of(epoch)) == Counter({f"{i} + {i + 1} =": 2 * GROUP for i in range(48)})
    assert [run["rows_left"] for run in runs] == [0] * WORLD
    assert all(map(isfinite, losses(runs[0]))) and len(losses(runs[0])) == 14
    assert len([entry for entry in runs[0]["log"] if "eval_reward" in entry]) == 3  # the last one after the last step
    assert max(entry.get("balance/moved_between_nodes_mib", 0.0) for entry in runs[0]["log"]) > 0
    assert any(len(row) > 1 for row in versions(runs))
