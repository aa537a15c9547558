"""Engines die in a run of two nodes of two ranks: it goes on, and without rows ahead it trains what it would have."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from waiting import HANG_S

from multinode_kit.faults import FAKE, Faults
from multinode_kit.nodes import Nodes
from trl_multinode.tools.timeline.lanes import STEP_PHASES
from trl_multinode.tools.timeline.reading import read_run
from trl_multinode.tools.timeline.table import step_seconds

SCRIPT = Path(__file__).parent / "scripts" / "restarted.py"
pytestmark = [pytest.mark.two_node, pytest.mark.zero3, pytest.mark.nightly]

IN_FLIGHT = {
    "max_staleness": 2, "vllm_importance_sampling_mode": "token_truncate",
    "vllm_importance_sampling_clip_max": 2.0,
}  # fmt: skip
EVAL = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "eval_prompts": 4,
    "per_device_eval_batch_size": 4,
}
LATE_S = 50.0  # longer than both limits of that job
LATE = {"slow_restart": LATE_S, "heartbeat_timeout": 30.0, "stuck_timeout": 40.0}
JOBS = [
    {"name": "plain", "deaths": [], **EVAL},
    {"name": "generate", "deaths": [{"moment": "generate@1"}, {"moment": "eval@2"}, {"moment": "sync@4"}], **EVAL,
     "engine_restarts": 3},
    {"name": "turns", "deaths": [], "turns": True},
    {"name": "a turn", "deaths": [{"moment": "generate@1", "call": 3}, {"moment": "idle@2"}], "turns": True},
    {"name": "late ahead", "deaths": [{"moment": "ahead@0"}], "max_staleness": 1, **LATE},
    {"name": "in_flight", "deaths": [{"moment": "idle@1"}, {"moment": "sync@3"}], **IN_FLIGHT},
]  # fmt: skip
SAME = [("generate", "plain"), ("a turn", "turns")]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """By job: what each rank has written. Beside them the log of rank 2, whose engine dies."""
    folder = tmp_path_factory.mktemp("restarted")
    with Nodes(
        2, 2, folder=folder, forked=True, env=Faults().slow_tokens(0.01).environment(FAKE)
    ) as nodes:
        nodes.launch(SCRIPT, str(folder), json.dumps(JOBS))
        assert nodes.wait(timeout_s=HANG_S, grace_s=20) == [0, 0], nodes.tails()
        found = {
            job["name"]: [
                json.loads((folder / f"{job['name']}_rank{rank}.json").read_text())
                for rank in range(4)
            ]
            for job in JOBS
        }
        found["log"], found["folder"] = nodes.rank_log(2), folder
    return found


@pytest.mark.parametrize(("name", "same"), SAME)
def test_rows_1_2_8_losses_rewards_and_rows_are_those_of_a_run_without_a_death(results, name, same):
    """Also if ranks call `generate` a different number of times: the others are in the meeting after it."""
    for plain, died in zip(results[same], results[name], strict=True):
        assert died["rounds"] == plain["rounds"] and died["losses"] == plain["losses"]
        assert died["evals"] == plain["evals"]
    deaths = len(next(job for job in JOBS if job["name"] == name)["deaths"])
    assert results[name][2]["left"] == 0 and results[name][0]["restarts"][-1] == deaths
    assert re.search("node 1: engine 0 .*SIGKILL", results["log"])


@pytest.mark.parametrize("name", ["late ahead", "in_flight"])
def test_row_2_rows_ahead_are_made_again_and_the_run_goes_on(results, name):
    ranks = results[name]
    assert ranks[2]["left"] == 0 and ranks[0]["restarts"][-1] == len(
        next(j for j in JOBS if j["name"] == name)["deaths"]
    )
    assert len(ranks[0]["losses"]) == 4 and all(
        rank["losses"] == ranks[0]["losses"] for rank in ranks
    )


def test_row_2_no_limit_of_silence_or_progress_trips_while_an_engine_starts_again(results):
    """One start takes longer than `heartbeat_timeout` and `stuck_timeout` of its job, and the launch goes on."""
    seconds = [
        float(found)
        for found in re.findall(r"engine 0 was started again in ([\d.]+) s", results["log"])
    ]
    assert LATE["stuck_timeout"] < LATE_S <= max(seconds)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["name"])
def test_the_timeline_of_a_run_has_the_seconds_of_its_log_and_every_death(results, job):
    run = read_run([results["folder"] / f"run-{job['name']}"])
    ranks = [lane for lane in run.lanes if lane.kind == "rank"]
    assert len(ranks) == 4 and len(run.lanes) == 6 and not run.notes
    for lane in run.lanes:
        pieces = lane.pieces()
        assert all(one.end <= next_.start + 1e-6 for one, next_ in pairwise(pieces))
    logs = [log for log in run.logs if "perf/train_s" in log]
    assert [log["step"] for log in logs] == [1, 2, 3, 4] == run.steps()
    for log in logs:
        step = run.cut(range(log["step"], log["step"] + 1))
        by_step = step_seconds([lane for lane in step.lanes if lane.kind == "rank"])
        found = {
            phase: sum(took for (_, each), took in by_step.items() if each == phase)
            for phase in STEP_PHASES
        }
        assert found == pytest.approx(
            {phase: log[f"perf/{phase}_s"] for phase in STEP_PHASES}, abs=1e-3
        )
    marks = [
        (lane.node, mark.kind) for lane in run.lanes for mark in lane.marks if mark.kind != "swap"
    ]
    assert marks == [(1, "lost"), (1, "restart")] * len(job["deaths"])


def test_the_timeline_shows_generation_beside_training_only_with_rows_ahead(results):
    """The engine of node 0, which does not die."""
    beside = {}
    for name in ("plain", "late ahead", "in_flight"):
        rank, _, engine, *_ = read_run([results["folder"] / f"run-{name}"]).lanes
        trains = [piece for piece in rank.pieces() if piece.phase == "train"]
        beside[name] = sum(
            max(0.0, min(span.end, piece.end) - max(span.start, piece.start))
            for span in engine.spans if span.phase == "generate" for piece in trains
        )  # fmt: skip
    assert beside["plain"] < 0.1 < min(beside["late ahead"], beside["in_flight"]), beside


def test_rows_1_8_ahead_the_weights_come_from_the_slots_of_the_node_itself(results):
    jobs = results["log"].split("JOB DONE ")
    for name in ("late ahead", "in_flight"):
        (job,) = [
            text for text, end in zip(jobs, jobs[1:], strict=False) if end.split("\n")[0] == name
        ]
        assert "from the slots" in job
