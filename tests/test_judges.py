"""Judges of heartbeats, on states that a test makes up: what ends a run, what is only reported, what is no fault."""

import json
import time
from dataclasses import asdict, replace

import pytest
from torch.distributed import HashStore

from trl_multinode.run.heartbeats.activity import RankActivity
from trl_multinode.run.heartbeats.judges import (
    JUDGE_LATE_S,
    NAME_EVERY_S,
    Limits,
    NodeJudge,
    RunJudge,
)
from trl_multinode.run.heartbeats.rank_state import RankState
from trl_multinode.run.meeting import Meeting
from trl_multinode.run.phases import Phases
from trl_multinode.run.topology import Topology

LIMITS = Limits(heartbeat_s=30.0, stuck_s=600.0, start_s=900.0)
TOPOLOGY = Topology(0, 4, 0, 2, 0, 2, launched=True)
FRAMES = "rewards/verifier.py:12 in check"
ALIVE = RankState(
    rank=0, phase="train", phase_s=1.0, step=4, left="", silent_s=0.2, idle_s=0.2, same_s=0.2,
    synced=True, may_take_long=False, meeting=7, waits_s=0.0, frames=FRAMES,
)  # fmt: skip


def world(**changes) -> list[RankState]:
    """States of four ranks on two nodes; `r3=...` changes rank 3, other keywords all ranks."""
    per_rank = {
        int(name[1:]): changes.pop(name)
        for name in list(changes)
        if name[0] == "r" and name[1:].isdigit()
    }
    return [replace(ALIVE, rank=rank, **(changes | per_rank.get(rank, {}))) for rank in range(4)]


class Store:
    """The keys of the nodes' heartbeats."""

    def __init__(self, states: list[RankState]):
        self.number = [0, 0]
        self.states = states

    def check(self, keys) -> bool:
        return True

    def multi_get(self, keys) -> list[bytes]:
        nodes = (self.states[:2], self.states[2:])
        # of all nodes, because `check` found all
        return [
            f"{number} {json.dumps([asdict(state) for state in node])}".encode()
            for number, node in zip(self.number, nodes, strict=True)
        ]


def judged(states: list[RankState], limits: Limits = LIMITS) -> str | None:
    return RunJudge(TOPOLOGY, limits).judge(time.monotonic(), Store(states))


def test_a_silent_rank_ends_the_run_with_its_place_and_frames():
    line = NodeJudge(TOPOLOGY, LIMITS).judge(
        100.0, world(r1={"silent_s": 31.0, "idle_s": 31.0, "phase_s": 40.0})[:2]
    )
    assert (
        line.startswith("PeerFailureError: rank 1 (node 0) ")
        and "CPU for 31 s (`heartbeat_timeout` 30 s)" in line
    )
    assert line.endswith(f"phase train of step 5 for 40 s, at {FRAMES}")


@pytest.mark.parametrize(
    ("changes", "limits"),
    [
        ({"silent_s": 29.0, "idle_s": 29.0}, LIMITS),
        ({"silent_s": 500.0, "idle_s": 0.0}, LIMITS),  # works, with the interpreter lock held
        ({"silent_s": 800.0, "idle_s": 800.0, "synced": False}, LIMITS),  # before the first sync
        ({"silent_s": 9000.0, "idle_s": 9000.0}, replace(LIMITS, heartbeat_s=0.0)),
        ({"silent_s": 9000.0, "idle_s": 0.0}, replace(LIMITS, stuck_s=0.0)),
    ],
)
def test_silence_that_ends_nothing(changes, limits):
    assert NodeJudge(TOPOLOGY, limits).judge(100.0, world(r1=changes)[:2]) is None


def test_before_the_first_sync_the_limit_is_that_of_the_engines_start():
    line = NodeJudge(TOPOLOGY, LIMITS).judge(
        0.0, world(synced=False, r0={"silent_s": 901.0, "idle_s": 901.0})[:2]
    )
    assert "(`engine_start_timeout` 900 s)" in line


def test_a_rank_that_works_without_heartbeats_is_reported_and_ends_the_run_later(capsys):
    judge = NodeJudge(TOPOLOGY, LIMITS)
    for now in (0.0, 1.0, NAME_EVERY_S + 1):
        assert judge.judge(now, world(r0={"silent_s": 31.0 + now, "idle_s": 0.1})[:2]) is None
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert (
        "rank 0 (node 0)" in lines[0]
        and "31 s but uses the CPU" in lines[0]
        and "phase train" in lines[0]
    )
    line = judge.judge(700.0, world(r0={"silent_s": 601.0, "idle_s": 0.1})[:2])
    assert "rank 0 (node 0)" in line and "(`stuck_timeout` 600 s)" in line and "CPU" in line


@pytest.mark.fault("node_frozen")
def test_a_silent_node_ends_the_run_unless_the_judge_was_suspended():
    store, start = Store(world(phase_s=2.0)), time.monotonic()
    judge = RunJudge(TOPOLOGY, LIMITS)
    now = start
    while now < start + 33:
        store.number[0] += 1
        line = judge.judge(now, store)
        assert (line is not None) == (now > start + 30.0), (now - start, line)
        now += 1.0
    assert (
        "node 1 (ranks 2 to 3)" in line
        and "(`heartbeat_timeout` 30 s)" in line
        and "rank 2 (node 1)" in line
    )
    assert judge.judge(now + JUDGE_LATE_S + 1, store) is None
    assert judge.judge(now + JUDGE_LATE_S + 20, store) is None  # late again
    assert judge.judge(now + JUDGE_LATE_S + 21, store) is None


@pytest.mark.fault("13")
def test_a_run_without_progress_ends_with_the_frames_of_the_slowest():
    line = judged(world(same_s=601.0, phase_s=650.0, r3={"phase": "sync", "same_s": 700.0}))
    assert "601 s (`stuck_timeout` 600 s)" in line and "(3 in train, 1 in sync)" in line
    assert line.endswith(f" rank 3 (node 1), in phase sync of step 5 for 650 s, at {FRAMES}")


@pytest.mark.parametrize(
    "states",
    [
        world(same_s=700.0, r2={"same_s": 10.0}),  # one rank makes progress
        world(same_s=700.0, r2={"phase": "reward", "may_take_long": True}),
        world(same_s=700.0, r2={"synced": False}),
        world(same_s=599.0),
        world(same_s=700.0)[:3],  # a rank without a trainer
    ],
)
def test_runs_that_are_not_stuck(states):
    assert judged(states) is None


def test_without_a_limit_nothing_is_stuck():
    assert judged(world(same_s=9000.0), replace(LIMITS, stuck_s=0.0)) is None


def test_ranks_behind_the_others_are_reported(capsys):
    late = {"phase": "reward", "may_take_long": True, "phase_s": 62.0}
    judged(world(same_s=60.0))  # all in one place: the line of rank 0 about its phase is enough
    assert capsys.readouterr().out == ""
    judged(world(same_s=60.0, r3=late))
    (line,) = capsys.readouterr().out.splitlines()
    assert "node 0, rank 0: 3 ranks waiting 60 s " in line
    assert line.endswith(f" rank 3 (node 1), in phase reward of step 5 for 62 s, at {FRAMES}")


@pytest.mark.parametrize("synced", [False, True])
def test_a_meeting_has_a_line_of_its_own_about_late_ranks_and_those_without_a_trainer(
    capsys, synced
):
    late = {"meeting": 6, "waits_s": 0.0, "phase": "reward", "phase_s": 22.0, "same_s": 0.0}
    waiting = {"phase": "wait", "synced": synced}
    judged(world(waits_s=14.0, r3=late, **waiting))
    judged(world(waits_s=16.0, **waiting))  # it has just ended, and the heartbeats are older
    assert capsys.readouterr().out == ""
    judged(world(waits_s=16.0, same_s=60.0, r3=late, **waiting))
    (line,) = capsys.readouterr().out.splitlines()
    assert (
        f"3 ranks waiting 16 s for rank 3 (node 1), in phase reward of step 5 for 22 s, at {FRAMES}"
        in line
    )
    judged(world(waits_s=16.0, r1=late, r2=late, **waiting)[:3])
    (line,) = capsys.readouterr().out.splitlines()
    assert (
        "node 0, rank 0: 1 rank waiting 16 s for 3 ranks: rank 1 (node 0), in phase reward" in line
    )
    assert line.endswith("; rank 3 (node 1), without a trainer")


def test_what_may_take_long_and_what_counts_as_progress(tmp_path):
    phases = Phases()
    meeting = Meeting(TOPOLOGY, HashStore())
    activity = RankActivity(phases, meeting, lambda: 4, lambda phase: f"rows of {phase}")
    assert activity().may_take_long and not activity().synced  # the script's own code
    with activity.inside():
        assert not activity().may_take_long
        before = activity()
        for phase, long in (
            ("reward", True),
            ("generate", True),
            ("push", True),
            ("convert", True),
            ("train", False),
            ("sync", False),
        ):
            with phases(phase):
                assert activity().may_take_long == long
                assert activity().left == f"rows of {phase}" and activity().step == 4
        assert activity().progress != before.progress
        with phases("checkpoint"):
            before = activity()
            (tmp_path / "model").write_bytes(bytes(2**22))
            assert before.left != activity().left and activity().left.endswith(" MiB written")
