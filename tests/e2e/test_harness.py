"""Agents that own their loop, on two nodes under ZeRO-3: each sampled token is trained once, whatever happens."""

import json
from collections import Counter
from math import isfinite
from pathlib import Path

import pytest
from waiting import HANG_S

from multinode_kit.engines import FAKE
from multinode_kit.models import tiny_qwen2
from multinode_kit.nodes import Nodes

pytestmark = [pytest.mark.zero3, pytest.mark.two_node]
SCRIPT = Path(__file__).parent / "scripts" / "harnesses.py"
GROUP = 4
# two ranks x 8 sessions = 4 prompts a round
ROUND = {
    "per_device_train_batch_size": 8,
    "steps_per_generation": 1,
    "gradient_accumulation_steps": 1,
}
JOBS = {
    "sync": {
        "prompts": 12, "num_train_epochs": 1, "evaluates": True, "per_device_eval_batch_size": 4, "beta": 0.1,
        "loss_type": "dapo", "rehearse_longest": True, **ROUND,
    },
    "ahead": {
        "prompts": 12, "num_train_epochs": 1, "max_staleness": 1, "loss_type": "grpo", "num_iterations": 2,
        **ROUND,
    },
    "flight": {
        "prompts": 24, "num_train_epochs": 1, "max_staleness": 3, "score_groups": 0, "loss_type": "dapo", "kill": 2,
        **ROUND,
    },
    # a group of each round fails, and texts go to a reward function
    "texts": {
        "prompts": 12, "num_train_epochs": 1, "max_staleness": 2, "score_groups": 0, "dynamic_sampling": 1,
        "loss_type": "dapo", "fails": [0, 5], "writes": True, **ROUND,
    },
    "cut": {
        "prompts": 24, "num_train_epochs": 1, "max_staleness": 2, "loss_type": "dapo", "output": "cut", "stop": 3,
        "save_strategy": "steps", "save_steps": 2, **ROUND,
    },
    "resumed": {
        "prompts": 24, "num_train_epochs": 1, "max_staleness": 2, "loss_type": "dapo", "output": "cut",
        "resume": True, **ROUND,
    },
}  # fmt: skip
WHOLE = ("sync", "ahead", "flight")
NUM_ITERATIONS = {"sync": 1, "ahead": 2, "flight": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Three trainers, one after the other."""
    folder = tmp_path_factory.mktemp("harness")
    tiny_qwen2(tied=False).save_pretrained(folder / "model")
    with Nodes(
        2, 1, folder=folder, env={"TRL_MULTINODE_ENGINE_MODULE": FAKE}, forked=True
    ) as nodes:
        jobs = [{"name": name, **settings} for name, settings in JOBS.items()]
        nodes.launch(SCRIPT, str(folder), json.dumps(jobs))
        codes = nodes.wait(timeout_s=HANG_S)
        assert codes == [0, 0], nodes.rank_log(0)[-6000:]
    return folder


def test_a_rehearsal_has_a_row_that_fills_the_context(folder):
    assert [rank["rehearsed"] for rank in results(folder, "sync")] == [[[1, 511]]] * 2


def results(folder: Path, name: str, world: int = 2) -> list[dict]:
    return [json.loads((folder / f"{name}_rank{rank}.json").read_text()) for rank in range(world)]


def sampled_by(rows: list[dict]) -> Counter:
    """Every sampled token of rows that were trained: what stands before it, and its log-prob."""
    found: Counter = Counter()
    for row in rows:
        ids = [*row["prompt"], *row["completion"]]
        for place, mark in enumerate(row["mask"], len(row["prompt"])):
            if mark:
                logprob = row["logprobs"][place - len(row["prompt"])]
                found[tuple(ids[: place + 1]), round(logprob, 5)] += 1
    return found


def sampled_in(sessions: list[dict]) -> Counter:
    """Every token that an engine has sampled: what stood before it, and its log-prob."""
    found: Counter = Counter()
    for session in sessions:
        for call in session["calls"]:
            ids = [*call["prompt"], *call["tokens"]]
            for place, logprob in enumerate(call["logprobs"], len(call["prompt"])):
                found[tuple(ids[: place + 1]), round(logprob, 5)] += 1
    return found


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.fault("harness_forks")
def test_each_sampled_token_is_trained_exactly_once_behind_what_the_engine_has_seen(folder, name):
    runs = results(folder, name)
    # the sessions of the evaluation are not trained
    sessions = [
        one for run in runs for one in run["sessions"][: JOBS[name]["prompts"] * GROUP // 2]
    ]
    assert len(sessions) == JOBS[name]["prompts"] * GROUP
    expected = sampled_in(sessions)
    trained = sampled_by([row for run in runs for row in run["trained"]])
    times = NUM_ITERATIONS[name]
    assert trained == Counter({key: times * count for key, count in expected.items()})


@pytest.mark.parametrize("name", WHOLE)
def test_every_prompt_has_its_sessions_and_every_step_a_loss(folder, name):
    runs = results(folder, name)
    for run in runs:
        losses = [entry["loss"] for entry in run["log"] if "loss" in entry]
        assert losses and all(map(isfinite, losses))
    numbers = Counter(
        session["number"]
        for run in runs
        for session in run["sessions"][: JOBS[name]["prompts"] * GROUP // 2]
    )
    assert numbers == Counter(dict.fromkeys(range(JOBS[name]["prompts"]), GROUP))


def test_calls_continue_rows_although_their_text_is_tokenized_anew(folder):
    (log,) = [
        entry
        for entry in results(folder, "sync")[0]["log"]
        if entry.get("step") == 1 and "loss" in entry
    ]
    assert log["harness/continued"] > 0 and log["harness/replaced"] > 0
    # a third of the prompts rewrite their beginning
    assert 0 < log["harness/forked"] < log["harness/calls"]
    assert log["harness/rows"] == 1 + log["harness/forked"]
    assert log["harness/failed"] == log["harness/refused"] == 0


def test_an_evaluation_runs_sessions_too(folder):
    for run in results(folder, "sync"):
        assert isfinite(run["evaluation"]["eval_loss"])
        (rewards,) = [entry["eval_reward"] for entry in run["log"] if "eval_reward" in entry]
        assert rewards > 0
        values = [one["value"] for one in run["sessions"][JOBS["sync"]["prompts"] * GROUP // 2 :]]
        assert len(values) == 8  # 4 prompts, half of their sessions on each rank


def test_a_session_in_flight_has_the_weights_of_several_updates(folder):
    sessions = [one for run in results(folder, "flight") for one in run["sessions"]]
    updates = [
        {span[0] for call in session["calls"] for span in call["versions"]} for session in sessions
    ]
    assert max(map(len, updates)) > 1


@pytest.mark.fault("engine_of_session")
def test_sessions_of_a_killed_engine_begin_again(folder):
    first, _ = results(folder, "flight")
    assert first["restarts"] == 1
    assert sum(session["counts"].get("again", 0) for session in first["sessions"]) > 0


@pytest.mark.fault("harness_fails")
def test_sessions_that_fail_are_left_out_and_nothing_else_is(folder):
    runs = results(folder, "texts")
    sessions = [one for run in runs for one in run["sessions"]]
    failed = [one for one in sessions if one["counts"].get("failed")]
    assert failed and all(one["number"] in (0, 5) and one["calls"] == [] for one in failed)
    # what is trained was sampled in sessions that have ended well; of these, some belong to groups that were dropped
    trained = sampled_by([row for run in runs for row in run["trained"]])
    assert trained and not trained - sampled_in(sessions)
    # the reward functions see the texts that the harness has returned
    values = {one["value"] for one in sessions if one["value"]}
    assert values and values <= {text for run in runs for text in run["texts"]}
    for run in runs:
        assert all(isfinite(entry["loss"]) for entry in run["log"] if "loss" in entry)


def test_a_resumed_run_trains_every_prompt_that_the_checkpoint_had_not(folder):
    before, after = results(folder, "cut"), results(folder, "resumed")
    trained = [Counter(row["step"] for row in run["trained"]) for run in (before[0], after[0])]
    assert max(trained[0]) == 2 and min(trained[1]) == 2  # the third step is done again
    last = [entry["step"] for entry in after[0]["log"] if "loss" in entry][-1]
    assert last == 6  # 24 prompts, 4 in each
