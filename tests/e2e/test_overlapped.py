"""`max_staleness=1` against 0 in real trainers: the same prompts, steps and seeds, one round behind."""

import json
from pathlib import Path

import pytest
from waiting import HANG_S

from multinode_kit.engines import FAKE
from multinode_kit.nodes import Nodes

SCRIPT = Path(__file__).parent / "scripts" / "continued.py"
# `rollouts/test_upcoming.py`, `_generation_ahead.py` and `_agents.py` decide, and on two nodes `test_continued.py`
pytestmark = [pytest.mark.zero3, pytest.mark.two_node, pytest.mark.nightly]

# 4 rows a rank and micro-step; a round has `steps_per_generation` prompts, an epoch has `prompts`
RUN = {"save_strategy": "no", "max_completion_length": 6, "per_device_train_batch_size": 4}
CASES = {
    "blocks of two": {"prompts": 8, "steps_per_generation": 2, "num_train_epochs": 2},
    "two rounds a step": {
        "prompts": 6, "gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_train_epochs": 2,
    },
    "a short last step": {  # windows of 4, 4 and 2 micro-steps
        "prompts": 10, "gradient_accumulation_steps": 4, "steps_per_generation": 2, "num_train_epochs": 2,
    },
    "two iterations": {"prompts": 4, "steps_per_generation": 2, "num_iterations": 2, "num_train_epochs": 2},
    "ends inside a block": {"prompts": 8, "steps_per_generation": 2, "max_steps": 11},
    "ends with a step of two rounds": {
        "prompts": 6, "gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": 5,
    },
    "eval at every step": {
        "prompts": 4, "steps_per_generation": 2, "num_train_epochs": 2, "eval_strategy": "steps", "eval_steps": 1,
        "eval_prompts": ["1 + 1 =", "2 + 2 ="], "per_device_eval_batch_size": 4,
        "learning_rate": 0.0,  # then also the rows must be the same
    },
    "a stream": {"prompts": 8, "iterable": True, "steps_per_generation": 2, "max_steps": 11},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """All cases in one launch of one rank, each without staleness and with it."""
    folder = tmp_path_factory.mktemp("overlapped")
    jobs = [
        RUN
        | case
        | {"name": f"{name}{staleness}", "output": f"{name}{staleness}", "max_staleness": staleness}
        for name, case in CASES.items()
        for staleness in (0, 1)
    ]
    with Nodes(
        1, 1, folder=folder / "nodes", env={"TRL_MULTINODE_ENGINE_MODULE": FAKE}, forked=True
    ) as nodes:
        nodes.launch(SCRIPT, str(folder), json.dumps(jobs))
        assert nodes.wait(timeout_s=HANG_S) == [0], nodes.rank_log(0)[-3000:]
    return folder


def runs_of(folder: Path, name: str) -> list[dict]:
    return [
        json.loads((folder / f"{name}{staleness}_rank0.json").read_text()) for staleness in (0, 1)
    ]


def prompts(run: dict) -> list[list[str]]:
    return [[prompt for prompt, _ in one["rows"]] for one in run["rounds"]]


@pytest.mark.parametrize("name", CASES)
def test_prompts_and_steps_are_those_of_no_staleness_and_rows_those_of_the_weights_before(
    folder, name
):
    fresh, ahead = runs_of(folder, name)
    assert prompts(fresh) == prompts(ahead) and fresh["steps"].keys() == ahead["steps"].keys()
    steps = [one["step"] for one in ahead["rounds"]]
    assert steps == [one["step"] for one in fresh["rounds"]]
    assert all(one["lag"] == [0, 0] for one in fresh["rounds"])
    per_epoch = CASES[name]["prompts"] // CASES[name]["steps_per_generation"]
    # the first of an epoch is made by the newest weights
    for index, one in enumerate(ahead["rounds"]):
        lag = 0 if index % per_epoch == 0 else steps[index] - steps[index - 1]
        assert one["lag"] == [int(lag > 0), lag], index
    assert any(one["lag"][0] for one in ahead["rounds"])
    for run in (fresh, ahead):
        assert run["left_over"] == [] and run["difference"] < 1e-3  # the alarm's, of the last round


def test_seeds_do_not_depend_on_when_a_row_is_made_and_eval_between_changes_nothing(folder):
    fresh, ahead = runs_of(folder, "eval at every step")
    assert [one["rows"] for one in fresh["rounds"]] == [one["rows"] for one in ahead["rounds"]]
    # sampled, not constant
    assert len({str(row) for one in ahead["rounds"] for row in one["rows"]}) > 8


def test_older_weights_really_made_the_rows(folder):
    """Completions differ from those of the newest weights, where these had time to move."""
    fresh, ahead = runs_of(folder, "blocks of two")
    same = [a["rows"] == b["rows"] for a, b in zip(fresh["rounds"], ahead["rounds"], strict=True)]
    assert same[0] and not any(same[1:4])
