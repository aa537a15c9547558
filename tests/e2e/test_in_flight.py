"""Losses, adapters and kills with rounds in flight on two nodes of one rank, under ZeRO-3.

`test_in_flight_rows.py` and `test_in_flight_agents.py` have the runs of two ranks per node.
"""

import re
from collections import Counter
from pathlib import Path

import pytest
from in_flight_runs import GROUP, SLOW, check_whole, end, results, start, versions
from waiting import HANG_S

from trl_multinode.testing.faults import FAKE
from trl_multinode.testing.models import tiny_qwen2
from trl_multinode.testing.nodes import Nodes

pytestmark = [pytest.mark.zero3, pytest.mark.two_node]

# Two ranks: six rounds of 4 prompts; the reference model is the base without its adapter
ADAPTER = {
    "name": "adapter", "output": "adapter", "prompts": 24, "num_train_epochs": 1, "compare": 3, "lora": True,
    "lora_sync": "adapter", "learning_rate": 0.1, "beta": 0.05, "mean": 24,
}  # fmt: skip
MERGED = ADAPTER | {"name": "merged", "output": "merged", "lora_sync": "merged"}
LOSSES = {"name": "losses", "prompts": 84}

# Two ranks, 8 prompts a round in two optimizer steps, four rounds in each of two epochs; a checkpoint at every third
# step, so that every second one is inside a round
KILLED = {
    "output": "killed", "prompts": 32, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 3, "mean": 24,
    "steps_per_generation": 2,
}  # fmt: skip
LAST, EPOCH = 16, 8  # steps
# where a run ends -> checkpoint from which the next one goes on
KILLS = {("take", 4): 3, ("step", 6): 6, ("saving", 9): 6, None: LAST}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A run that is killed three times, and beside it the other runs: each has two nodes of one rank."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("pair", "killed")}
    env = SLOW.environment(FAKE)
    tiny_qwen2(seed=1).save_pretrained(folders["pair"] / "reference")
    with (
        Nodes(2, 1, folder=folders["pair"], env=env, forked=True) as pair,
        Nodes(2, 1, folder=folders["killed"], env=env, forked=True) as killed,
    ):
        start(pair, ADAPTER, MERGED, LOSSES)
        for number, where in enumerate(KILLS):
            run_until_killed(killed, number, where)
        end(pair)
    return folders


def run_until_killed(nodes: Nodes, number: int, where: tuple[str, int] | None) -> None:
    """Continue the run of the launch before, to its end if `where` is `None`."""
    start(nodes, KILLED | {"name": f"run{number}", "kill_at": where, "resume": number > 0})
    codes = nodes.wait(timeout_s=HANG_S)
    assert (codes == [0, 0]) == (where is None), nodes.rank_log(0)[-3000:]
    (nodes.folder / f"run{number}.log").write_text("".join(nodes.rank_log(rank) for rank in range(2)))


@pytest.fixture
def pair(folders) -> Path:
    return folders["pair"]


@pytest.fixture
def killed(folders) -> Path:
    return folders["killed"]


@pytest.mark.parametrize("name", ["adapter", "merged"])
def test_an_adapter_beside_a_reference_model(pair, name):
    runs = results(pair, name, world=2)
    check_whole(runs, ADAPTER["prompts"])
    for run in runs:
        different, (expected, loss), names = run["compared"]
        assert different == [] and expected == loss and names > 7  # with the reference's log-probs
        assert run["spot_check"] < 1e-3
    assert any(run["spot_check"] > 0.0 for run in runs)
    log = [entry for entry in runs[0]["log"] if "loss" in entry]
    assert [entry["kl"] > 0 for entry in log] == [False, *[True] * 5]
    sent = [entry["sync/mib"] for entry in log]
    assert (max(sent[1:]) < 0.1 * sent[0]) == (name == "adapter")


def test_gradients_of_all_losses_are_trls_on_the_same_rows(pair):
    """Of TRL's own trainer, which takes the rows, tokens and log-probs of ours; with balanced micro-batches too."""
    runs = results(pair, "losses", world=2)
    taken = Counter(prompt for run in runs for prompt in run["prompts"])
    assert taken == Counter({f"{i} + {i + 1} =": GROUP for i in range(LOSSES["prompts"])})
    for run in runs:
        assert len(run["differences"]) == len(run["steps"]) and min(run["norms"]) > 1e-3 and run["not_taken"] == 0
        for (*step, balanced), difference in zip(run["steps"], run["differences"], strict=True):
            assert difference <= (1e-5 if balanced else 0.0), (step, run["differences"])
        assert run["losses"][0] == pytest.approx(run["losses"][1], rel=1e-4, abs=1e-5)
        assert [count > 0 for count in run["micro_steps"]] == [balanced for _, _, balanced in run["steps"]]
    rounds = zip(*(run["versions"] for run in runs), strict=True)
    mixed = [sum(count > 1 for rows in one for count in rows) for one in rounds]
    assert min(mixed[4:]) > 0, mixed
    assert all(abs(ratio - 1) > 1e-4 for ratio in runs[0]["ratios"][4:])


def test_ids_trained_before_and_after_three_kills_are_all_ids_once(killed):
    found = [results(killed, f"run{number}", world=2) for number in range(len(KILLS))]
    starts = [min(map(int, runs[0]["trained"])) for runs in found]
    assert starts == [0, *list(KILLS.values())[:-1]]
    kept: dict[int, list[str]] = {}  # before optimizer step -> rows of the run that went on
    for runs, first, last in zip(found, starts, KILLS.values(), strict=True):
        for step in range(first, last):
            kept[step] = [prompt for run in runs for prompt in run["trained"][str(step)]]
    epochs = [[prompt for step in range(at, at + EPOCH) for prompt in kept[step]] for at in range(0, LAST, EPOCH)]
    assert list(map(Counter, epochs)) == [Counter({f"{i} + {i + 1} =": GROUP for i in range(KILLED["prompts"])})] * 2
    assert any(len(row) > 1 for runs in found for row in versions(runs))
    logs = [(killed / f"run{number}.log").read_text() for number in range(len(KILLS))]
    assert "AssertionError" not in logs[0], "no row was under way when the first run was killed"
    assert "checkpoint-9 is skipped: unfinished" in logs[-1]


def test_rows_under_way_at_a_checkpoint_continue_with_their_versions(killed):
    continued, said = [], []
    for number, step in enumerate(list(KILLS.values())[:-1], start=1):
        rows = [row for row in versions(results(killed, f"run{number}", world=2)) if row[0][0] < 0]
        assert rows, f"the checkpoint of step {step} has no row"
        assert {made_at for row in rows for update, made_at, _ in row if update < 0} <= set(range(step + 1))
        continued += [row for row in rows if row[-1][0] > 0]
        log = (killed / f"run{number}.log").read_text()
        said += re.findall(r"(\d+) rows that were under way at the checkpoint continue, (\d+) begin again", log)
    # some continued rows had not begun, and a run that was killed has not trained all of its own
    assert 0 < len(continued) <= sum(int(number) for number, _ in said)
