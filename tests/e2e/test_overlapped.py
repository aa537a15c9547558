"""`max_staleness=1` against 0 on TRL's real loop: the same prompts, steps and seeds, one round behind."""

import json
import os
import runpy
import sys
from functools import cache
from pathlib import Path

import pytest
from forks import forked

SCRIPT = Path(__file__).parent / "scripts" / "overlapped.py"
# Rounds ahead decide in `rollouts/test_look_ahead.py`, `_generation_ahead.py` and `_agents.py`, and on two nodes in
# `test_continued.py`
pytestmark = pytest.mark.nightly

# 4 rows a rank and micro-step; a round has `steps_per_generation` prompts, an epoch has `prompts`
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
    "ends with a block": {"prompts": 8, "steps_per_generation": 2, "max_steps": 14},
    "ends with a step of two rounds": {
        "prompts": 6, "gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": 5,
    },
    "eval at every step": {
        "prompts": 4, "steps_per_generation": 2, "num_train_epochs": 2, "eval_strategy": "steps", "eval_steps": 1,
        "learning_rate": 0.0,  # then also the rows must be the same
    },
    "a stream": {"prompts": 8, "iterable": True, "steps_per_generation": 2, "max_steps": 11},
}  # fmt: skip


@pytest.fixture(scope="module")
def run_case(tmp_path_factory):
    """Returns the run without staleness and the one with it. All are one fork's."""
    folder = tmp_path_factory.mktemp("overlapped")

    def body(cases: dict) -> None:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
        sys.path.insert(0, str(SCRIPT.parent))
        sys.argv = [str(SCRIPT), str(folder), json.dumps(cases)]
        runpy.run_path(str(SCRIPT), run_name="__main__")

    @cache
    def run_all() -> None:
        with forked(lambda rank: body(CASES), 1, folder) as (process,):
            assert process.wait() == 0, process.text

    def run(name: str) -> list[dict]:
        run_all()
        return json.loads((folder / f"{name}_rank0.json").read_text())["runs"]

    return run


@pytest.fixture(params=CASES)
def name(request) -> str:
    return request.param


@pytest.fixture
def pair(run_case, name):
    return run_case(name)


def prompts(run: dict) -> list[list[str]]:
    return [[prompt for prompt, _ in one["rows"]] for one in run["rounds"]]


def test_prompts_their_order_and_the_number_of_steps_are_those_of_no_staleness(pair):
    fresh, ahead = pair
    assert prompts(fresh) == prompts(ahead) and fresh["steps"] == ahead["steps"]
    assert [one["step"] for one in fresh["rounds"]] == [one["step"] for one in ahead["rounds"]]
    assert len(set(map(str, prompts(ahead)))) > 1


def rounds_per_epoch(name: str) -> int:
    return CASES[name]["prompts"] // CASES[name]["steps_per_generation"]


def test_a_round_was_made_by_the_weights_of_the_round_before_and_the_epochs_first_by_the_newest(pair, name):
    fresh, ahead = pair
    assert all(one["lag"] == [0, 0] for one in fresh["rounds"])
    steps = [one["step"] for one in ahead["rounds"]]
    for index, one in enumerate(ahead["rounds"]):
        lag = 0 if index % rounds_per_epoch(name) == 0 else steps[index] - steps[index - 1]
        assert one["lag"] == [int(lag > 0), lag] and one["made_by_step"] == one["step"] - lag, index
    assert any(one["lag"][0] for one in ahead["rounds"])


def test_nothing_is_generated_that_is_not_used(pair, name):
    fresh, ahead = pair
    asked, evals = [who for who, _ in ahead["calls"]], len(ahead["evals"])
    bubbles = -(-len(ahead["rounds"]) // rounds_per_epoch(name))  # one per epoch
    assert asked.count("main") == bubbles + evals
    assert len(asked) == len(ahead["rounds"]) + evals == len(fresh["calls"])
    assert ahead["left_over"] == []


def test_weights_never_change_while_an_engine_generates(pair):
    for run in pair:
        assert run["broken_rules"] == []
        updates = [update for _, update in run["calls"]]
        assert updates == sorted(updates)


def test_the_alarm_looks_at_every_round_and_finds_nothing(pair):
    for run in pair:
        assert len(run["differences"]) == len(run["rounds"]) + len(run["evals"])
        assert max(run["differences"]) < 1e-3


def test_seeds_do_not_depend_on_when_a_row_is_made_and_eval_between_changes_nothing(run_case):
    fresh, ahead = run_case("eval at every step")
    assert [one["rows"] for one in fresh["rounds"]] == [one["rows"] for one in ahead["rounds"]]
    assert [one["rows"] for one in fresh["evals"]] == [one["rows"] for one in ahead["evals"]]
    assert len(fresh["evals"]) == 2 * fresh["steps"]  # two eval prompts of four completions, one batch each
    assert len({str(row) for one in ahead["rounds"] for row in one["rows"]}) > 8  # sampled, not constant


def test_older_weights_really_made_the_rows(run_case):
    """Completions differ from those of the newest weights, where these had time to move."""
    fresh, ahead = run_case("blocks of two")
    same = [a["rows"] == b["rows"] for a, b in zip(fresh["rounds"], ahead["rounds"], strict=True)]
    assert same[0] and not any(same[1:4])
