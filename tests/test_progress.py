"""Lines of rank 0 in a long phase: at most 15 s of silence, none outside of phases, and no line that ends a run."""

import re
import threading
import time
from types import SimpleNamespace

import pytest
from waiting import HANG_S, until

from trl_multinode.host.presence import Presence
from trl_multinode.host.updates import Updates
from trl_multinode.run import progress, reporter
from trl_multinode.run.phases import Phases
from trl_multinode.run.progress import ProgressLines


def test_an_output_that_takes_nothing_holds_up_no_caller_and_gets_its_lines_later(monkeypatch):
    monkeypatch.setattr(reporter, "BLOCKED_S", 0.2)
    monkeypatch.setattr(reporter, "MAX_WAITING", 3)
    monkeypatch.setattr(reporter, "_printer", None)
    free, written = threading.Event(), []

    def write(text: str) -> None:
        free.wait(HANG_S)
        written.append(text)

    for number in range(9):
        reporter.show(str(number), write)
    assert written == []
    free.set()
    reporter.show("the last", write)
    until(lambda: len(written) >= 4)
    # one is being written, three wait
    assert written[:4] == ["0", "1", "2", "3"] and "8" not in written


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(reporter, "time", clock)
    monkeypatch.setattr(reporter, "_last_line", 1000.0)
    return clock


@pytest.fixture
def run(clock, capsys):
    """Let seconds pass, with a look once a second, and return the lines that were printed."""
    state = SimpleNamespace(step=4, phases=Phases(), rows=100)
    beat = ProgressLines(
        state.phases,
        lambda: state.step,
        lambda name: f"{state.rows} rows left" * (name == "generate"),
    )

    def pass_(seconds: int) -> list[str]:
        for _ in range(seconds):
            clock.now += 1
            state.rows -= 1
            beat.beat()
        return [
            line.removeprefix("[trl_multinode] ") for line in capsys.readouterr().out.splitlines()
        ]

    state.pass_ = pass_
    return state


@pytest.mark.fault("5")
def test_a_long_phase_is_reported_every_15_seconds_with_what_is_left(run):
    with run.phases("generate"):
        assert run.pass_(14) == []
        assert run.pass_(20) == [
            "step 5: generating for 15 s, 84 rows left",
            "step 5: generating for 30 s, 69 rows left",
        ]
    with run.phases("reward"):
        # 15 s after the last line, not after its start
        assert run.pass_(12) == ["step 5: computing rewards for 11 s"]


def test_short_steps_and_other_lines_of_this_library_are_signs_of_life(run):
    for _ in range(10):
        with run.phases("train"):
            assert run.pass_(10) == []
        run.step += 1
    with run.phases("train"):
        run.pass_(10)
        reporter.report("step 15: reward 0.3")
        assert run.pass_(14) == ["step 15: reward 0.3"]


def test_a_script_between_phases_and_a_wait_that_has_lines_of_its_own_are_left_alone(run):
    assert run.pass_(60) == []
    with run.phases("wait"):
        assert run.pass_(60) == []
    with pytest.raises(ValueError, match="wrong"), run.phases("generate"):
        raise ValueError("wrong")
    assert run.pass_(60) == []  # a notebook after an error


def test_an_error_in_a_line_does_not_end_the_thread(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY_S", 0.05)
    monkeypatch.setattr(progress, "POLL_S", 0.01)
    errors = [ValueError("engines are closed")]

    def left(name: str) -> str:
        if errors:
            raise errors.pop()
        return "12 of 40 buckets gathered"

    phases = Phases()
    beat = ProgressLines(phases, lambda: 0, left)
    beat.start()
    printed, deadline = "", time.monotonic() + HANG_S
    with phases("sync"):
        while "12 of 40" not in printed and time.monotonic() < deadline:
            time.sleep(0.05)
            printed += capsys.readouterr().out
    beat.close()
    assert re.search(r"step 1: sending weights for \d+ s, 12 of 40 buckets gathered", printed)
    assert not errors
    until(lambda: not any(thread.name == "progress-lines" for thread in threading.enumerate()))


def test_a_host_knows_what_is_left_in_its_phases(tmp_path):
    presence = Presence(SimpleNamespace(step=lambda: 8, args=SimpleNamespace(output_dir=tmp_path)))
    updates = Updates.__new__(Updates)
    updates.engines, updates.ahead_engines = (
        SimpleNamespace(rows_left=3),
        SimpleNamespace(rows_left=2),
    )
    updates._sync = SimpleNamespace(num_gathered=3, buckets=range(5))
    presence.work |= {"generate": updates._rows_left, "sync": updates._buckets_gathered}
    (tmp_path / "checkpoint-8" / "global_step8").mkdir(parents=True)
    (tmp_path / "checkpoint-8" / "global_step8" / "states.pt").write_bytes(b"")
    with open(tmp_path / "checkpoint-8" / "model.safetensors", "wb") as file:
        file.truncate(1_500_000_000)  # no disk space: a hole
    assert presence.left("generate") == "5 rows left"
    presence.user_calls = [lambda: "", lambda: "the tool `f` runs for 20 s"]
    assert presence.left("generate") == "5 rows left, the tool `f` runs for 20 s"
    assert presence.left("sync") == "3 of 5 buckets gathered"
    assert presence.left("checkpoint") == "1.5 GB written"
    assert presence.left("train") == ""
    presence._ends = True
    # for ranks that wait for this one in vain
    assert "closed its trainer" in presence.left("generate")
