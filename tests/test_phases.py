"""Seconds by phase: exclusive when nested, one JSON line each, and the split that they ask for."""

import gc
import json
from pathlib import Path

import pytest

from trl_multinode.run import phases as phases_module
from trl_multinode.run.phase_file import PhaseFile
from trl_multinode.run.phases import PHASES, Phases
from trl_multinode.wire import line_file


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves by hand."""

    class Clock:
        now = 100.0

        def pass_(self, seconds: float) -> None:
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(phases_module.time, "perf_counter", lambda: clock.now)
    return clock


def test_an_evaluation_is_written_down_and_not_counted_into_the_step(clock, tmp_path):
    phases = Phases(PhaseFile(tmp_path, rank=0, node=0))
    with phases("sync"):
        clock.pass_(1)
    with phases.uncounted(), phases("generate"):
        clock.pass_(64)
    with phases("train"):
        clock.pass_(2)
    assert sum(phases.take_sums()) == 3
    assert [line.get("evaluation", False) for line in lines(tmp_path / "rank0.jsonl")] == [
        False,
        True,
        False,
    ]


def test_nested_phases_count_their_own_time_only(clock, tmp_path):
    phases = Phases(PhaseFile(tmp_path / "phases", rank=0, node=0))
    phases.begin_step(3)
    with phases("train"):
        clock.pass_(1)
        with phases("generate"):
            clock.pass_(2)
            with phases("wait"):
                clock.pass_(4)
        clock.pass_(8)
        with phases("reward"):
            clock.pass_(16)
    assert dict(zip(PHASES, phases.take_sums(), strict=True)) == {
        "sync": 0, "generate": 2, "reward": 16, "train": 9, "wait": 4,
    }  # fmt: skip
    lines = [
        json.loads(line) for line in (tmp_path / "phases" / "rank0.jsonl").read_text().splitlines()
    ]
    assert [(line["phase"], line["seconds"], line["total"]) for line in lines] == [
        ("wait", 4, 4), ("generate", 2, 6), ("reward", 16, 16), ("train", 9, 31),
    ]  # fmt: skip
    assert {line["step"] for line in lines} == {3} and all(line["start"] > 1e9 for line in lines)


# ---- the files


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(file: PhaseFile, count: int = 1) -> None:
    for _ in range(count):
        file.write("train", start=1.5, total=3.0, seconds=2.0, step=7)
        file.flush()


def test_a_line_has_what_a_timeline_of_all_nodes_needs(tmp_path):
    file = PhaseFile(tmp_path, rank=5, node=2)
    write(file)
    line = {
        "phase": "train",
        "start": 1.5,
        "seconds": 2.0,
        "total": 3.0,
        "step": 7,
        "node": 2,
        "attempt": 1,
    }
    assert lines(tmp_path / "rank5.jsonl") == [line]


def test_a_resumed_run_appends_with_the_next_number_also_on_ranks_that_are_new(tmp_path):
    for attempt in (1, 2):
        files = [PhaseFile(tmp_path, rank, node=0) for rank in (0, 1)]
        for file in files:
            write(file)
        assert [file.attempt for file in files] == [attempt] * 2
    assert PhaseFile(tmp_path, rank=9, node=3).attempt == 3
    assert [line["attempt"] for line in lines(tmp_path / "rank1.jsonl")] == [1, 2]


def live(phases: Phases, step: int, num_micro_batches: int) -> None:
    """Go through the phases of a step, whose round is made in its first micro-batch."""
    for number in range(num_micro_batches):
        phases.begin_step(step, is_last=number == num_micro_batches - 1)
        with phases("train"):
            for name in ("sync", "generate", "reward") if number == 0 else ():
                with phases(name):
                    pass


@pytest.mark.parametrize("num_micro_batches", [1, 8])
def test_the_lines_of_a_step_are_written_at_once_and_when_it_ends(
    tmp_path, monkeypatch, num_micro_batches
):
    """A process that is killed later has none of them in its memory."""
    file = PhaseFile(tmp_path, rank=0, node=0)
    writes = []
    write = file._write
    monkeypatch.setattr(file, "_write", lambda text: writes.append(write(text)))
    phases = Phases(file)
    with phases("set-up"):
        pass
    for step in range(3):
        live(phases, step, num_micro_batches)
        assert len(writes) == 2 + step
        assert len(lines(file.path)) == 1 + (step + 1) * (3 + num_micro_batches)
    with phases("checkpoint"):  # it may take minutes
        pass
    assert lines(file.path)[-1]["phase"] == "checkpoint"


@pytest.mark.parametrize("content", ["", "{", '{"phase": "sync", "step": 1}\n', "[1]\n", "\0\n"])
def test_a_file_of_an_earlier_version_or_with_half_a_line_is_no_attempt(tmp_path, content):
    (tmp_path / "rank0.jsonl").write_text(content)
    assert PhaseFile(tmp_path, rank=0, node=0).attempt == 1


def test_a_file_is_rotated_and_only_the_one_before_it_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(line_file, "ROTATE_BYTES", 1000)
    file = PhaseFile(tmp_path, rank=0, node=0)
    write(file, 50)
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == ["rank0.jsonl", "rank0.jsonl.1"]
    assert all(len(lines(path)) > 0 and path.stat().st_size < 1300 for path in paths)


def full_disk(file: PhaseFile, tmp_path: Path) -> None:
    file._file = open("/dev/full", "a", buffering=1)


def closed_file(file: PhaseFile, tmp_path: Path) -> None:
    if file._file is not None:
        file._file.close()


def lost_folder(file: PhaseFile, tmp_path: Path) -> None:
    closed_file(file, tmp_path)
    file.path = tmp_path / "a file" / "rank0.jsonl"
    (tmp_path / "a file").write_text("")


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("harm", [full_disk, closed_file, lost_folder])
def test_an_error_while_writing_is_one_warning_and_never_ends_a_run(tmp_path, caplog, harm):
    phases = Phases(PhaseFile(tmp_path, rank=0, node=3))
    for _ in range(3):
        with phases("sync"):
            pass
        harm(phases.file, tmp_path)
    gc.collect()
    (record,) = caplog.records
    assert record.message.startswith("node 3, rank 0: lines of phases are missing in /")
    assert phases.take_sums()[0] > 0


def test_writing_goes_on_when_the_disk_has_room_again(tmp_path):
    file = PhaseFile(tmp_path, rank=0, node=0)
    full_disk(file, tmp_path)
    write(file, 3)
    assert len(lines(file.path)) == 2


# ---- sums


def test_sums_are_taken_once(clock):
    phases = Phases()
    for _ in range(2):
        with phases("sync"):
            clock.pass_(1.5)
    assert phases.take_sums() == [3.0, 0, 0, 0, 0]
    assert phases.take_sums() == [0] * 5


def test_a_phase_that_fails_is_counted_and_stays_the_current_one_for_the_failure_line(clock):
    phases = Phases()
    with pytest.raises(ValueError, match="reward"), phases("train"), phases("reward"):  # noqa: PT012
        clock.pass_(2)
        raise ValueError("reward")
    assert phases.take_sums() == [0, 0, 2, 0, 0]
    assert phases.current == "reward"
    with phases("sync"):
        assert phases.current == "sync"
    assert phases.current == "set-up"


def test_the_current_phase_is_the_innermost():
    phases = Phases()
    assert phases.current == "set-up"
    with phases("train"), phases("generate"):
        assert phases.current == "generate"
    phases.begin_step(0)  # a callback at the end of step 1 is not in the set-up
    assert phases.current == "between steps"
