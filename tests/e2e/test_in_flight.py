"""Rounds in flight on two nodes under ZeRO-3: rows go on across weight updates and kills, each id is trained once."""

import re
from collections import Counter
from math import isfinite
from pathlib import Path

import pytest
from in_flight_runs import (
    GROUP,
    HELD,
    SLOW,
    WORLD,
    check_whole,
    end,
    losses,
    losses_of,
    results,
    start,
    trained,
    versions,
)
from waiting import HANG_S, until

from multinode_kit.faults import FAKE
from multinode_kit.models import tiny_qwen2
from multinode_kit.nodes import Nodes

pytestmark = [pytest.mark.zero3, pytest.mark.two_node]

WHOLE = {
    "name": "whole", "output": "whole", "prompts": 64, "num_train_epochs": 1, "max_staleness": 4, "compare": 3,
    "mean": 20, "min_tokens": 16, "num_engines": 2,
}  # fmt: skip
# 16 prompts a round, each trained twice in 4 optimizer steps; the run ends inside the second epoch, 24 rows unused
FEATURES = {
    "name": "features", "output": "features", "prompts": 48, "max_steps": 14, "num_iterations": 2,
    "steps_per_generation": 2, "gradient_accumulation_steps": 1, "micro_batch_tokens": 2048, "recompute_kv": True,
    "eval_strategy": "steps", "eval_steps": 5, "per_device_eval_batch_size": 4, "max_staleness": 2,
}  # fmt: skip
LOSSES = {"name": "losses", "prompts": 84}

# Two ranks, 8 prompts a round in two optimizer steps, five rounds in each of two epochs; a checkpoint at every third
# step, so that every second one is inside a round
KILLED = {
    "output": "killed", "prompts": 40, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3, "mean": 24,
    "steps_per_generation": 2, "max_completion_length": 96, "learning_rate": 1e-4,
}  # fmt: skip
LAST, EPOCH = 20, 10  # steps
# where a run ends -> checkpoint from which the next one goes on
KILLS = {("begin", 4): 3, ("step", 6): 6, ("saving", 9): 6, None: LAST}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Three runs side by side, because their engines mostly sleep; one of them is killed three times."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("whole", "features", "killed")}
    slow, held = SLOW.environment(FAKE), HELD.environment(FAKE)
    with (
        Nodes(2, 2, folder=folders["whole"], env=held, forked=True) as whole,
        Nodes(2, 2, folder=folders["features"], env=held, forked=True) as features,
        Nodes(2, 1, folder=folders["killed"], env=slow, forked=True) as killed,
    ):
        start(whole, WHOLE)
        start(features, FEATURES)
        for number, where in enumerate(KILLS):
            run_until_killed(killed, number, where)
        end(whole)
        end(features)
    return folders


def run_until_killed(nodes: Nodes, number: int, where: tuple[str, int] | None) -> None:
    """Continue the run of the launch before, to its end if `where` is `None`."""
    start(nodes, KILLED | {"name": f"run{number}", "kill_at": where, "resume": number > 0})
    codes = nodes.wait(timeout_s=HANG_S)
    assert (codes == [0, 0]) == (where is None), nodes.rank_log(0)[-3000:]
    (nodes.folder / f"run{number}.log").write_text(
        "".join(nodes.rank_log(rank) for rank in range(2))
    )
    until(lambda: not any(map(nodes.pids, range(2))), "the engines of killed ranks to end")


def test_every_id_of_every_epoch_is_trained_once_and_nothing_is_left_under_way(folders):
    runs = results(folders["whole"], "whole")
    check_whole(runs, WHOLE["prompts"])
    assert {engine for run in runs for one in run["rounds"] for engine in one["engines"]} == {0, 1}
    assert all(len(losses(run)) == 8 and all(map(isfinite, losses(run))) for run in runs)


def test_rows_of_every_rank_hold_several_versions_and_the_reward_sees_the_rows_that_were_taken(
    folders,
):
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
    assert 0 < max(entry["staleness/rounds_max"] for entry in log) <= 3 * WHOLE["max_staleness"]
    assert max(entry["in_flight/mixed_rows"] for entry in log) > 0
    assert max(entry["in_flight/swapped_rows"] for entry in log) > 0
    assert all(entry["staleness/effective_sample_size"] > 0 for entry in log)
    assert all(0.0 <= run["spot_check"] < 1e-3 for run in runs) and any(
        run["spot_check"] > 0 for run in runs
    )


def test_iterations_blocks_balanced_batches_evaluation_and_the_end_of_the_run_in_an_epoch(folders):
    runs = results(folders["features"], "features")
    # rounds of 4 optimizer steps: 3 in the first epoch; one and a half in the second, which begins the half one too
    assert [one["step"] for one in runs[0]["rounds"]] == [0, 4, 8, 12]
    first = [run | {"rounds": run["rounds"][:3]} for run in runs]
    assert trained(first) == Counter({f"{i} + {i + 1} =": GROUP for i in range(48)})
    assert sorted(
        Counter(trained([run | {"rounds": run["rounds"][3:]} for run in runs]).values())
    ) == [GROUP]
    epoch = [
        run | {"trained": {step: rows for step, rows in run["trained"].items() if int(step) < 12}}
        for run in runs
    ]
    assert Counter(losses_of(epoch)) == Counter({f"{i} + {i + 1} =": 2 * GROUP for i in range(48)})
    assert [run["rows_left"] for run in runs] == [0] * WORLD
    assert all(map(isfinite, losses(runs[0]))) and len(losses(runs[0])) == 14
    # the last one after the last step
    assert len([entry for entry in runs[0]["log"] if "eval_reward" in entry]) == 3
    assert max(entry.get("balance/moved_between_nodes_mib", 0.0) for entry in runs[0]["log"]) > 0
    assert any(len(row) > 1 for row in versions(runs))


@pytest.mark.nightly  # the loss of mixed rows is TRL's above, and all losses of whole rows in test_features.py
def test_gradients_of_all_losses_are_trls_on_the_same_rows(tmp_path):
    """Of TRL's own trainer, which takes the rows, tokens and log-probs of ours; with balanced micro-batches too."""
    tiny_qwen2(seed=1).save_pretrained(tmp_path / "reference")
    with Nodes(2, 1, folder=tmp_path, env=SLOW.environment(FAKE), forked=True) as nodes:
        start(nodes, LOSSES)
        end(nodes)
    runs = results(tmp_path, "losses", world=2)
    taken = Counter(prompt for run in runs for prompt in run["prompts"])
    assert taken == Counter({f"{i} + {i + 1} =": GROUP for i in range(LOSSES["prompts"])})
    for run in runs:
        assert (
            len(run["differences"]) == len(run["steps"])
            and min(run["norms"]) > 1e-3
            and run["not_taken"] == 0
        )
        for (*step, balanced), difference in zip(run["steps"], run["differences"], strict=True):
            assert difference <= (1e-5 if balanced else 0.0), (step, run["differences"])
        assert run["losses"][0] == pytest.approx(run["losses"][1], rel=1e-4, abs=1e-5)
        assert [count > 0 for count in run["micro_steps"]] == [
            balanced for _, _, balanced in run["steps"]
        ]
    rounds = zip(*(run["versions"] for run in runs), strict=True)
    mixed = [sum(count > 1 for rows in one for count in rows) for one in rounds]
    assert min(mixed[4:]) > 0, mixed
    assert all(abs(ratio - 1) > 1e-4 for ratio in runs[0]["ratios"][4:])


@pytest.fixture
def killed(folders) -> Path:
    return folders["killed"]


def test_ids_trained_before_and_after_three_kills_are_all_ids_once(killed):
    found = [results(killed, f"run{number}", world=2) for number in range(len(KILLS))]
    starts = [min(map(int, runs[0]["trained"])) for runs in found]
    assert starts == [0, *list(KILLS.values())[:-1]]
    kept: dict[int, list[str]] = {}  # before optimizer step -> rows of the run that went on
    for runs, first, last in zip(found, starts, KILLS.values(), strict=True):
        for step in range(first, last):
            kept[step] = [prompt for run in runs for prompt in run["trained"][str(step)]]
    epochs = [
        [prompt for step in range(at, at + EPOCH) for prompt in kept[step]]
        for at in range(0, LAST, EPOCH)
    ]
    assert (
        list(map(Counter, epochs))
        == [Counter({f"{i} + {i + 1} =": GROUP for i in range(KILLED["prompts"])})] * 2
    )
    assert any(len(row) > 1 for runs in found for row in versions(runs))
    logs = [(killed / f"run{number}.log").read_text() for number in range(len(KILLS))]
    assert "checkpoint-9 is skipped: unfinished" in logs[-1]


def test_rows_under_way_at_a_checkpoint_continue_with_their_versions(killed):
    continued, said = [], []
    for number, step in enumerate(list(KILLS.values())[:-1], start=1):
        rows = [row for row in versions(results(killed, f"run{number}", world=2)) if row[0][0] < 0]
        assert rows, f"the checkpoint of step {step} has no row"
        assert {made_at for row in rows for update, made_at, _ in row if update < 0} <= set(
            range(step + 1)
        )
        continued += [row for row in rows if row[-1][0] > 0]
        log = (killed / f"run{number}.log").read_text()
        said += re.findall(
            r"(\d+) rows that were under way at the checkpoint continue, (\d+) begin again", log
        )
    # some continued rows had not begun, and a run that was killed has not trained all of its own
    assert 0 < len(continued) <= sum(int(number) for number, _ in said)
