"""`--run`: seconds from the files of a run, and what they decide."""

import json
from pathlib import Path

import pytest
from plan_kit import CONFIGS, layouts, task

from trl_multinode.tools import main
from trl_multinode.tools.plan import PlanError
from trl_multinode.tools.plan.measured import read_run

FLAGS = "--nodes 4x8 --prompt 512 --completion 2048 --rows 256"
DEVICES = 2 * 8


def write_run(
    folder: Path,
    generate: float,
    train: float,
    tail: float | None = 0.0,
    hidden: float = 0.0,
    more=None,
):
    """Files of a run of 2 nodes of 7 ranks, 10 steps; the first step takes a minute longer, rank 3 trains longest.

    Args:
        tail (`float`, *optional*):
            Seconds per step. `None`: the run has no checkpoint yet.
    """
    phases = folder / "_multinode" / "phases"
    phases.mkdir(parents=True)
    for rank in range(14):
        lines = [_line("train", 3.0, 5, rank, attempt=1)]  # of an earlier start
        for step in range(10):
            warm_up = 60.0 if step == 0 else 0.0
            lines += [
                _line("sync", 1.0, step, rank),
                _line("generate", generate + warm_up, step, rank),
            ]
            lines += [
                _line("train", train - (0.0 if rank == 3 else 0.5), step, rank),
                _line("wait", 9.0, step, rank),
            ]
        # killed in a line
        (phases / f"rank{rank}.jsonl").write_text("\n".join(lines) + "\n" + lines[-1][:30])
    if tail is None:
        return
    wall = 1.0 + generate + train
    log = {
        "perf/step_s": wall,
        "perf/hidden_share": hidden / wall,
        "engine/tail_share": tail / wall,
    }
    log |= {"perf/tokens_per_s": 8000.0, "perf/tokens_per_s_per_device": 8000.0 / DEVICES}
    log |= {"completions/mean_length": 700.0} | (more or {})
    for step, old in ((10, 0.0), (5, 1.0)):
        tails = {"engine/tail_share": log["engine/tail_share"] + old}
        state = {
            "global_step": step,
            "log_history": [log | tails | {"step": i + 1} for i in range(step)],
        }
        (folder / f"checkpoint-{step}").mkdir()
        (folder / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))


def _line(phase: str, seconds: float, step: int, rank: int, attempt: int = 2) -> str:
    times = {"start": 0.0, "seconds": seconds, "total": seconds}
    return json.dumps({"phase": phase, "step": step, "node": rank // 7, "attempt": attempt} | times)


def test_a_run_gives_the_seconds_of_its_slowest_rank_after_the_warm_up(tmp_path):
    write_run(tmp_path, generate=40.0, train=10.0, tail=30.0)
    run = read_run(str(tmp_path))
    assert (run.times.generate_s, run.times.train_s) == (pytest.approx(40.0), pytest.approx(10.0))
    assert run.times.tail_s == pytest.approx(30.0) and run.sync_s == pytest.approx(1.0)
    assert (run.training, run.reserved, run.nodes, run.steps) == (7, 1, 2, 8)
    assert run.mean_length == pytest.approx(700.0) and not run.ahead
    with open(tmp_path / "_multinode" / "phases" / "rank0.jsonl", "a") as file:
        line = json.loads(_line("generate", 300.0, 5, 0)) | {"evaluation": True}
        file.write("\n" + json.dumps(line) + "\n")
    # an evaluation is of no step
    assert read_run(str(tmp_path)).times.generate_s == pytest.approx(40.0)
    write_run(tmp_path / "ahead", generate=4.0, train=10.0, hidden=9.0)
    run = read_run(str(tmp_path / "ahead"))
    assert run.times.generate_s == pytest.approx(13.0) and run.ahead


def test_a_node_whose_files_are_elsewhere_is_named(tmp_path):
    write_run(tmp_path, generate=40.0, train=10.0)
    settings = tmp_path / "_multinode" / "settings.jsonl"
    settings.write_text(json.dumps({"nodes": 2}) + "\n")
    assert read_run(str(tmp_path)).nodes == 2
    settings.write_text(json.dumps({"nodes": 3}) + "\n")
    with pytest.raises(PlanError, match=r"3 nodes .*node 2"):
        read_run(str(tmp_path))


@pytest.mark.nightly  # `the_seconds_of_a_run_decide` prints them
def test_the_measured_seconds_are_scaled_to_each_split(tmp_path):
    # g = 40 s on 1 GPU of which 30 are a tail, t = 10 s on 7: 4+4 needs 30 + 10/4 and 70/4; in flight (10 + 3)/4
    write_run(tmp_path, generate=40.0, train=10.0, tail=30.0)
    found = layouts(task("0.5B", f"{FLAGS} --run {tmp_path}"))["4+4", 1].seconds
    assert (found.generate, found.train, found.tail) == (
        pytest.approx(32.5),
        pytest.approx(17.5),
        pytest.approx(30.0),
    )
    assert found.after == pytest.approx(51.0) and found.beside == pytest.approx(33.5)
    assert found.in_flight == pytest.approx(1 + 17.5)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        # 7+1: max(13, 10); 6+2: max(6.5, 11.7); 6+2 on 3 of 4 nodes, 1.5 GPUs of 8: max(8.7, 10.8) s; a second of sync
        (
            {"generate": 40.0, "train": 10.0, "tail": 30.0},
            [
                "take 1x8+0/3x6+2 with `max_staleness=3`",
                "30.0 of 36.7 s",
                "launch 4node_6+2.yaml --ranks 6,6,6,8 train.py",
                "sync 1.0 s, generate 40.0 s, tail 30.0 s, train 10.0 s",
                "700 on average",
                "8 measured steps",
            ],
        ),
        # 11 s; 6+2 12.7; in flight no faster
        ({"generate": 9.0, "train": 10.0}, ["take 7+1 with `max_staleness=1`"]),
        # of equal nodes; 7,8,8,8 with a round ahead would take 10.0 instead of 11.2 s
        (
            {"generate": 0.2, "train": 10.0, "flags": "--splits 7+1,6+2"},
            ["take 7+1 with `max_staleness=0`", "5 %"],
        ),
        # one GPU of four nodes generates: 70/7.75 s of training instead of 10 s
        (
            {"generate": 0.02, "train": 10.0},
            [
                "take 3x8+0/1x7+1 with `max_staleness=0`",
                "launch 4node.yaml --ranks 7,8,8,8 train.py",
            ],
        ),
        ({"generate": 9.0, "train": 10.0, "tail": None}, ["tail is unknown"]),
        # engines in flight are taken as busy all the time
        (
            {"generate": 1.0, "train": 10.0, "more": {"in_flight/mixed_rows": 0.4}},
            ["in flight", "generate 12.0 s"],
        ),
    ],
    ids=["long tail", "one round ahead", "no staleness", "one GPU", "unknown tail", "in flight"],
)
def test_the_seconds_of_a_run_decide_what_to_take(tmp_path, capsys, seconds, words):
    flags = f"{FLAGS} {seconds.pop('flags', '')} --run {tmp_path}"
    write_run(tmp_path, **seconds)
    assert main(["plan", str(CONFIGS / "0.5B.json"), *flags.split()]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert [word for word in words if word not in text] == []


def test_a_folder_without_phases_or_with_one_step_and_engines_that_share_gpus_are_refused(tmp_path):
    with pytest.raises(PlanError, match="`--run` .*`output_dir`"):
        read_run(str(tmp_path))
    write_run(
        tmp_path / "shared",
        generate=1.0,
        train=1.0,
        more={"perf/tokens_per_s_per_device": 8000.0 / 14},
    )
    with pytest.raises(PlanError, match="GPUs that only generate"):
        read_run(str(tmp_path / "shared"))
    phases = tmp_path / "_multinode" / "phases"
    phases.mkdir(parents=True)
    (phases / "rank0.jsonl").write_text(_line("train", 1.0, 0, 0) + "\n")
    with pytest.raises(PlanError, match="two steps"):
        read_run(str(tmp_path))
