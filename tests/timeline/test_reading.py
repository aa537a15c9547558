"""What is read of a run: clocks of nodes, attempts, folders of several nodes, and files that are broken or old."""

import json
import shutil
import time

import pytest
from timeline.runs import (
    AHEAD_S,
    BEGIN,
    STEPS,
    engine_lines,
    rank_lines,
    write_completions,
    write_lines,
    write_run,
)

from trl_multinode.run.phase_file import PhaseFile
from trl_multinode.tools.timeline.completions import read_completions
from trl_multinode.tools.timeline.reading import TimelineError, read_run

MARKS = [("agent 2 serves with 1 engine(s)", 12.0), ("agent 2 leaves", 33.0)]


@pytest.mark.fault("clock_skew")
def test_all_lanes_are_on_the_clock_of_node_0(tmp_path):
    """Both nodes do the same at the same time, and the clock of node 1 is 7.5 s ahead."""
    run = read_run([write_run(tmp_path)])
    assert [(lane.node, lane.name) for lane in run.lanes] == [
        (0, "rank 0"), (0, "rank 1"), (0, "engine 0"), (1, "rank 2"), (1, "rank 3"), (1, "engine 0"),
    ]  # fmt: skip
    trains = [
        [span.start for span in lane.spans if span.phase == "train"]
        for lane in run.lanes
        if lane.kind == "rank"
    ]
    assert trains == [[BEGIN + 10 * step for step in range(STEPS)]] * 4
    syncs = [[span.start for span in lane.spans if span.phase == "sync"] for lane in run.lanes]
    assert syncs[5][:3] == syncs[2][:3] == syncs[0][:3] and not run.notes


@pytest.mark.nightly
def test_a_node_without_a_step_of_node_0_is_a_note(tmp_path):
    write_run(tmp_path)
    for rank in (2, 3):
        path = tmp_path / "_multinode" / "phases" / f"rank{rank}.jsonl"
        write_lines(path, [line for line in rank_lines(rank) if line["phase"] != "train"])
    run = read_run([tmp_path])
    assert len(run.notes) == 1 and "clock of node 1" in run.notes[0]
    assert run.lanes[3].spans[1].start == BEGIN + AHEAD_S + 0.5
    for rank in (0, 1):
        (tmp_path / "_multinode" / "phases" / f"rank{rank}.jsonl").unlink()
    run = read_run([tmp_path])
    assert {lane.name for lane in run.lanes} >= {"rank 2", "rank 3"}
    assert any("clock of node 1" in note for note in run.notes)


@pytest.mark.nightly
def test_the_step_in_which_a_run_was_killed_is_shown(tmp_path):
    """Its outer phase has no line, because a killed rank does not leave it."""
    write_run(tmp_path)
    for rank in range(4):
        lines = [
            line
            for line in rank_lines(rank)
            if line["phase"] != "train" or line["step"] < STEPS - 1
        ]
        write_lines(tmp_path / "_multinode" / "phases" / f"rank{rank}.jsonl", lines)
    run = read_run([tmp_path])
    assert (
        run.steps() == [1, 2, 3, 4]
        and run.starts[4] == BEGIN + 30.5
        and run.starts[3] == BEGIN + 20
    )
    assert run.cut(range(4, 5)).lanes[0].seconds() == {
        "sync": 1.0,
        "wait": 1.0,
        "reward": 2.0,
        "generate": 3.0,
    }


def write_two_attempts(folder, ranks) -> None:
    """Write a run of which only these ranks and the engine of node 0 started again."""
    phases = write_run(folder) / "_multinode" / "phases"
    for rank in ranks:
        lines = rank_lines(rank) + rank_lines(rank, attempt=2, begin=BEGIN + 500)
        write_lines(phases / f"rank{rank}.jsonl", lines)
    write_lines(
        phases / "node0_engine0.jsonl",
        engine_lines(0) + engine_lines(0, attempt=2, begin=BEGIN + 500),
    )


def test_the_last_attempt_is_shown_and_an_earlier_one_can_be_chosen(tmp_path):
    write_two_attempts(tmp_path, ranks=(0, 1, 2, 3))
    last, first = read_run([tmp_path]), read_run([tmp_path], attempt=1)
    assert (last.attempt, last.attempts, last.begin) == (2, [1, 2], BEGIN + 480) and len(
        last.lanes
    ) == 5
    assert first.begin == BEGIN - 20 and len(first.lanes) == 6
    assert set(last.endings) == {0, 1} and not first.endings
    with pytest.raises(TimelineError, match=r"attempt 3 .*\[1, 2\]"):
        read_run([tmp_path], attempt=3)
    write_two_attempts(tmp_path / "half", ranks=(0, 1))
    (note,) = read_run([tmp_path / "half"]).notes
    assert "node 1" in note and "attempt 2" in note


@pytest.mark.nightly
def test_numbers_that_json_does_not_have_become_texts(tmp_path):
    """The page of a run refuses them, and earlier versions wrote them."""
    path = write_run(tmp_path) / "_multinode" / "settings.jsonl"
    settings = {"attempt": 1, "settings": {"epsilon": float("inf"), "beta": float("nan")}}
    path.write_text(json.dumps(settings) + "\n")
    assert read_run([tmp_path]).settings["settings"] == {"epsilon": "Infinity", "beta": "NaN"}


def test_the_folders_of_nodes_are_one_run(tmp_path):
    whole = read_run([write_run(tmp_path / "all")])
    for node in range(2):
        part = tmp_path / f"node{node}"
        shutil.copytree(tmp_path / "all", part)
        for rank in (0, 1) if node else (2, 3):
            (part / "_multinode" / "phases" / f"rank{rank}.jsonl").unlink()
        (part / "_multinode" / "phases" / f"node{1 - node}_engine0.jsonl").unlink()
    parts = read_run([tmp_path / "node0", tmp_path / "node1"])
    assert parts.lanes == whole.lanes and set(parts.endings) == {0, 1}


def test_marks_of_agents_are_on_the_clock_of_node_0_and_cut_with_the_steps(tmp_path):
    whole = read_run([write_run(tmp_path)])
    phases = tmp_path / "_multinode" / "phases"
    file = PhaseFile(phases, rank=3, node=1)
    file.attempt = 1
    begin = time.time()
    file.mark("agent 2 joins")
    file.flush()
    run = read_run([tmp_path])
    (mark,) = run.lanes[4].marks
    assert (mark.kind, mark.text) == ("agent", "agent 2 joins")
    assert begin <= mark.at + AHEAD_S <= time.time()
    assert not run.notes and run.attempts == [1]
    assert [lane.spans for lane in run.lanes] == [lane.spans for lane in whole.lanes]
    # one in step 2 and one in step 4
    ends = [{"mark": text, "start": BEGIN + at, "node": 0, "attempt": 1} for text, at in MARKS]
    write_lines(phases / "rank0.jsonl", [*rank_lines(0), *ends])
    run = read_run([tmp_path])
    assert [mark.text for mark in run.cut(range(2, 4)).lanes[0].marks] == [MARKS[0][0]]
    assert [mark.text for mark in run.cut(range(4, 5)).lanes[0].marks] == [MARKS[1][0]]


def test_marks_alone_are_no_attempt(tmp_path):
    write_run(tmp_path)
    file = PhaseFile(tmp_path / "_multinode" / "phases", rank=0, node=0)
    file.mark("agent 2 joins")
    file.flush()
    assert file.attempt == 2 and read_run([tmp_path]).attempts == [1]


def test_a_rotated_file_comes_before_the_current_one(tmp_path):
    whole = read_run([write_run(tmp_path)]).lanes
    with open(tmp_path / "_multinode" / "phases" / "rank1.jsonl", "a") as file:
        file.write('{"phase": "tra')
    path = tmp_path / "_multinode" / "phases" / "rank0.jsonl"
    lines = rank_lines(0)
    write_lines(path.with_name("rank0.jsonl.1"), lines[:7])
    write_lines(path, lines[7:])
    run = read_run([tmp_path])
    assert run.lanes == whole and run.notes[0].startswith("1 line(s)")  # half a line of rank 1


@pytest.mark.nightly
def test_logs_come_from_the_trainers_state_if_the_run_has_no_file_of_its_own(tmp_path):
    write_run(tmp_path)
    (tmp_path / "_multinode" / "log.jsonl").unlink()
    assert read_run([tmp_path]).logs == []
    state = tmp_path / "checkpoint-2" / "trainer_state.json"
    state.parent.mkdir()
    state.write_text(json.dumps({"log_history": [{"step": 1, "reward": 0.5}]}))
    assert read_run([tmp_path]).logs == [{"step": 1, "reward": 0.5}]


def test_completions_are_those_of_the_newest_whole_file(tmp_path):
    folder = tmp_path / "completions"
    write_completions(folder, step=2, rows=3)
    write_completions(folder, step=4, rows=12)
    (folder / "completions_00006.parquet").write_bytes(b"PAR1 half")  # it is being written
    found = read_completions([tmp_path])
    assert (found["step"], found["of"], len(found["rows"])) == (4, 12, 10)
    assert found["columns"] == ["accuracy_reward", "advantage", "prompt", "completion"]
    advantages = [float(row[1]) for row in found["rows"]]
    # row 2 has the smallest of 12, the rows in the middle are left out
    assert advantages == sorted(advantages, reverse=True) and advantages[-1] == 0.2
    assert found["rows"][-1] == ["1", "0.2", "user: 1+1?", "it is 2"]
    assert read_completions([tmp_path / "none"]) == {}
