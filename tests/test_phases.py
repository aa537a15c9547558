"""Seconds by phase: exclusive when nested, one JSON line each, and the split that they ask for."""

import json

import pytest

from trl_multinode.run import phases as phases_module
from trl_multinode.run.phases import PHASES, Phases, split_advice, summarize


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
    phases = Phases(tmp_path / "rank0.jsonl")
    with phases("sync"):
        clock.pass_(1)
    with phases.uncounted(), phases("generate"):
        clock.pass_(64)
    assert sum(phases.take_sums()) == 1
    assert len((tmp_path / "rank0.jsonl").read_text().splitlines()) == 2


def test_nested_phases_count_their_own_time_only(clock, tmp_path):
    phases = Phases(tmp_path / "phases" / "rank0.jsonl")
    phases.step = 3
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
    lines = [json.loads(line) for line in (tmp_path / "phases" / "rank0.jsonl").read_text().splitlines()]
    assert [(line["phase"], line["seconds"]) for line in lines] == [
        ("wait", 4), ("generate", 2), ("reward", 16), ("train", 9),
    ]  # fmt: skip
    assert {line["step"] for line in lines} == {3} and all(line["start"] > 1e9 for line in lines)


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
    phases.step = 1
    assert phases.current == "between steps"


def test_a_summary_names_the_node_of_the_slowest_rank():
    seconds = [[1.0, 5.0, 0, 0, 0], [1.5, 6.0, 0, 0, 0], [0.5, 9.0, 0, 0, 0], [1.0, 7.0, 0, 0, 0]]
    summary = summarize(seconds, ranks_per_node=2)
    assert (summary["phase/sync_s/min"], summary["phase/sync_s/max"]) == (0.5, 1.5)
    assert (summary["phase/sync_s/slowest_node"], summary["phase/generate_s/slowest_node"]) == (0.0, 1.0)
    assert len(summary) == 3 * len(PHASES)


def test_advice_moves_gpus_to_the_side_that_needs_them():
    # g = 30 s x 1 GPU, t = 10 s x 7 GPUs; R=3 of 8: 30/3 + 70/5 = 24 s, the least; colocated (30 + 70) / 8 = 12.5 s
    advice = split_advice(generate_s=30.0, train_s=10.0, training=7, reserved=1)
    assert "7+1 takes 40.0 s" in advice
    assert "5+3 would take about 24.0 s (num_processes = 5 per node)" in advice
    assert "colocation on all 8 would take about 12.5 s" in advice


def test_advice_moves_gpus_back_to_training():
    # g = 2 x 4, t = 20 x 4: R=1: 8/1 + 80/7 = 19.4; R=2: 8/2 + 80/6 = 17.3, the least; R=4: 22
    assert "4+4 takes 22.0 s of generation and training per step; 6+2 would take about 17.3 s" in split_advice(
        generate_s=2.0, train_s=20.0, training=4, reserved=4
    )


def test_advice_leaves_a_split_that_is_within_five_percent_of_the_best():
    # g = 10 x 3, t = 14 x 5 as above: 5+3 is the best
    advice = split_advice(generate_s=10.0, train_s=14.0, training=5, reserved=3)
    assert "5+3 takes 24.0 s" in advice and "the best or within 5 %" in advice and "num_processes" not in advice


def test_advice_on_the_smallest_node_has_no_other_split():
    assert "1+1 takes 3.0 s" in split_advice(generate_s=2.0, train_s=1.0, training=1, reserved=1)


def test_advice_for_an_overlapped_run_takes_the_longer_side():
    # g = 12 x 2, t = 4 x 6: max(24/R, 24/(8-R)): 12 s now, least at R=4: 6 s; one after the other 24/2 + 24/6 = 16 s
    advice = split_advice(generate_s=12.0, train_s=4.0, training=6, reserved=2, overlapped=True)
    assert "6+2 takes 12.0 s of generation beside training per step" in advice
    assert "4+4 would take about 6.0 s (num_processes = 4 per node)" in advice
    assert "colocation on all 8 would take about 6.0 s" in advice
    assert "6+2 takes 16.0 s of generation and training" in split_advice(12.0, 4.0, 6, 2)


def test_advice_differs_where_only_the_overlap_makes_a_split_good():
    # g = 5 x 1, t = 5 x 7: 7+1 hides all of the generation; alternating, 6+2 takes 2.5 + 5.8 = 8.3 s instead of 10
    assert "the best or within 5 %" in split_advice(5.0, 5.0, 7, 1, overlapped=True)
    assert "6+2 would take about 8.3 s" in split_advice(5.0, 5.0, 7, 1)
