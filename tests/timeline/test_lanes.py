"""Lanes never overlap, and their sums are those of the phases, whatever the clock of a node does."""

import json
import random
from types import SimpleNamespace

import pytest

from trl_multinode.run import phases as phases_module
from trl_multinode.run.phase_file import PhaseFile
from trl_multinode.run.phases import PHASES, Phases
from trl_multinode.tools.timeline.lanes import Lane, State, engine_lane
from trl_multinode.tools.timeline.reading import read_run


@pytest.fixture
def clock(monkeypatch):
    """Both clocks of a rank, moved by hand; `wall` may be set to another time."""
    clock = SimpleNamespace(now=100.0, wall=1e9)

    def pass_(seconds: float) -> None:
        clock.now += seconds
        clock.wall += seconds

    clock.pass_ = pass_
    fake = SimpleNamespace(
        perf_counter=lambda: clock.now, time=lambda: clock.wall, monotonic=lambda: clock.now
    )
    monkeypatch.setattr(phases_module, "time", fake)
    return clock


def live(phases: Phases, clock, chance: random.Random, depth: int = 0, jumps: bool = False) -> None:
    """Enter and leave phases at random, some of them for less time than a line can hold."""
    for _ in range(chance.randrange(1, 4)):
        with phases(chance.choice(PHASES)):
            clock.pass_(chance.choice([0.0, 2e-7, 1e-4, 0.3, 2.0]))
            if jumps and chance.random() < 0.2:
                clock.wall += chance.choice([-5.0, 3.0])
            if depth < 3:
                live(phases, clock, chance, depth + 1, jumps)
            clock.pass_(chance.choice([0.0, 0.05]))
        clock.pass_(chance.choice([0.0, 1.0]))


def overlaps(lane: Lane) -> list:
    pieces = lane.pieces()
    assert all(piece.end >= piece.start for piece in pieces)
    return [
        (one, next_)
        for one, next_ in zip(pieces, pieces[1:], strict=False)
        if one.end > next_.start + 1e-9
    ]


@pytest.mark.parametrize("jumps", [False, True])
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.nightly  # random schedules beside the fixed one below
def test_lanes_of_random_phases_do_not_overlap_and_sum_up(clock, tmp_path, seed, jumps):
    phases = Phases(PhaseFile(tmp_path / "_multinode" / "phases", rank=0, node=0))
    live(phases, clock, random.Random(seed), jumps=jumps)
    (lane,) = read_run([tmp_path]).lanes
    assert not overlaps(lane)
    sums = dict(zip(PHASES, phases.take_sums(), strict=True))
    assert lane.seconds() == pytest.approx(
        {name: each for name, each in sums.items() if name in lane.seconds()}, abs=5e-5
    )
    assert sum(lane.seconds().values()) == pytest.approx(sum(sums.values()), abs=5e-5)


def test_a_phase_is_a_piece_before_and_one_after_the_phase_inside_it(clock, tmp_path):
    phases = Phases(PhaseFile(tmp_path / "_multinode" / "phases", rank=0, node=0))
    with phases("train"):
        clock.pass_(1)
        with phases("generate"):
            clock.pass_(2)
            with phases("wait"):
                clock.pass_(4)
        clock.pass_(8)
    clock.pass_(5)
    with phases("sync"):
        clock.pass_(1)
    (lane,) = read_run([tmp_path]).lanes
    found = [
        (piece.phase, round(piece.start - 1e9, 3), round(piece.end - 1e9, 3))
        for piece in lane.pieces()
    ]
    assert found == [
        ("train", 0, 1),
        ("generate", 1, 3),
        ("wait", 3, 7),
        ("train", 7, 15),
        ("sync", 20, 21),
    ]
    assert [span.depth for span in lane.spans] == [0, 1, 2, 0]


# ---- engines


def states(*lines: tuple) -> list[State]:
    return [State(phase, at, rows, update) for phase, at, rows, update in lines]


def test_a_state_lasts_until_the_next_one_and_rows_do_not_divide_it():
    lane = engine_lane(0, 0, states(
        ("start", 0, 0, 0), ("idle", 2, 0, 0), ("sync", 3, 0, 1), ("generate", 4, 8, 1), ("generate", 5, 4, 1),
        ("idle", 7, 0, 1), ("end", 9, 0, 1),
    ), end=20)  # fmt: skip
    assert [(span.phase, span.start, span.end) for span in lane.spans] == [
        ("start", 0, 2), ("sync", 3, 4), ("generate", 4, 7),
    ]  # fmt: skip
    assert lane.rows[3:5] == [(4, 8), (5, 4)] and not lane.marks and not overlaps(lane)


def test_weights_that_replace_those_of_running_rows_are_a_swap_and_others_are_not():
    lane = engine_lane(
        0,
        0,
        states(("sync", 1, 0, 1), ("generate", 2, 8, 1), ("sync", 5, 6, 2), ("generate", 6, 6, 2)),
        9,
    )
    assert [(mark.kind, mark.at) for mark in lane.marks] == [("swap", 5)]
    assert (
        "2" in lane.marks[0].text
        and "6 rows" in lane.marks[0].text
        and "6 rows" in lane.spans[2].note
    )
    assert lane.spans[-1].end == 9


def test_a_lost_engine_does_nothing_until_its_next_process_starts():
    lines = [
        State("generate", 1, 5, 1), State("lost", 4, process=0, cause="killed by SIGKILL"),
        State("start", 6, process=1), State("sync", 8, 0, 2, 1), State("idle", 9, 0, 2, 1),
    ]  # fmt: skip
    lane = engine_lane(1, 0, lines, 10)
    assert lane.seconds() == {"generate": 3, "start": 2, "sync": 1}
    assert [(mark.kind, mark.text) for mark in lane.marks] == [
        ("lost", "killed by SIGKILL"),
        ("restart", "restart 1"),
    ]
    set_back = engine_lane(
        0, 0, states(("generate", 10, 1, 1), ("sync", 7, 0, 2), ("generate", 12, 1, 2)), 13
    )
    assert not overlaps(set_back) and set_back.seconds() == {"sync": 2, "generate": 1}  # the clock


# ---- a part of a run


def test_a_part_keeps_whole_phases_of_its_steps_and_cuts_the_states_of_engines(tmp_path):
    folder = tmp_path / "_multinode" / "phases"
    folder.mkdir(parents=True)
    lines = [
        {
            "phase": "set-up",
            "start": 0.0,
            "seconds": 9.0,
            "total": 9.0,
            "step": 0,
            "node": 0,
            "attempt": 1,
        }
    ]
    for step in range(4):
        at = 10.0 * (step + 1)
        lines += [
            {
                "phase": "sync",
                "start": at + 1,
                "seconds": 2.0,
                "total": 2.0,
                "step": step,
                "node": 0,
            },
            {"phase": "train", "start": at, "seconds": 5.0, "total": 7.0, "step": step, "node": 0},
        ]
    (folder / "rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    engine = {"node": 0, "engine": 0, "rows": 3}
    (folder / "node0_engine0.jsonl").write_text(
        json.dumps({"phase": "generate", "start": 12.0} | engine) + "\n"
    )
    run = read_run([tmp_path])
    assert run.steps() == [1, 2, 3, 4] and run.begin == 0.0
    part = run.cut(range(2, 4))
    assert (part.begin, part.end, list(part.starts)) == (20.0, 37.0, [2, 3])
    rank, engine = part.lanes
    assert rank.seconds() == {"train": 10.0, "sync": 4.0} and engine.seconds() == {"generate": 17.0}
    assert engine.rows == [(20.0, 3)]
