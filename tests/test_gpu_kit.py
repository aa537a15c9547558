"""`make gpu` without a GPU: arguments, result file, table, limits, and the first stages with the fake engine."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gpu
import pytest
from gpu_kit import running, table
from gpu_kit.jobs import Job
from gpu_kit.machine import Machine
from gpu_kit.record import Recorder, events, merge, read
from gpu_kit.weights import run_stages
from waiting import until

from multinode_kit.engines import FAKE
from multinode_kit.faults import Faults
from trl_multinode.wire.supervisor import is_running

pytestmark = [pytest.mark.real, pytest.mark.nightly]
ROOT = Path(__file__).parents[1]
META = {"rehearsal": False, "device": "NVIDIA X", "num_gpus": 1, "memory_gib": 80.0, "driver": "1", "cuda": "13.0",
        "python": "3.12", "versions": {"vllm": "0.26.0"}, "commit": "abc", "cores": 16}  # fmt: skip


def row(result: str = "passed", **figures) -> dict:
    return {
        "result": result,
        "why": None if result == "passed" else "because",
        "seconds": 1.5,
        "figures": figures,
    }


# ---- arguments


def test_without_a_gpu_it_is_one_line_and_exit_code_2():
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""}
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stdout.splitlines()
    assert "torch sees no GPU here" in line and "--rehearse" in line


# ---- result file


def test_results_are_kept_after_each_stage_and_a_failed_stage_keeps_its_figures(tmp_path):
    recorder = Recorder(tmp_path / "events.jsonl")
    with recorder.stage("a one") as figures:
        figures["fresh"] = 1e-3 / 3
    with recorder.stage("b one") as figures:
        figures["worst"] = float("nan")
        raise AssertionError("too far apart\nand a second line")
    ended = {
        event["key"]: event
        for event in events(tmp_path / "events.jsonl")
        if event["event"] == "end"
    }
    assert ended["a one"]["result"] == "passed" and ended["a one"]["figures"] == {
        "fresh": 0.0003333
    }
    assert ended["b one"]["result"] == "failed" and ended["b one"]["figures"] == {"worst": "nan"}
    assert ended["b one"]["why"] == "AssertionError: too far apart"


def test_results_of_another_machine_or_commit_stay_until_their_stage_runs_again(tmp_path):
    results = tmp_path / "gpu.json"
    merge(results, META, {"a one": row(), "b one": row("failed")})
    merge(results, META, {"b one": row()})
    [run] = read(results)
    assert {key: stage["result"] for key, stage in run["stages"].items()} == dict.fromkeys(
        ["a one", "b one"], "passed"
    )
    merge(
        results, META | {"commit": "def"}, {"a one": row("skipped"), "b one": row(), "c one": row()}
    )
    assert [(run["meta"]["commit"], list(run["stages"])) for run in read(results)] == [
        (META["commit"], ["a one"]),
        ("def", ["b one", "c one"]),
    ]


SLOW = """if True:
    import json, subprocess, sys, time
    record = sys.argv[sys.argv.index("--record") + 1]
    with open(record, "w") as file:
        file.write(json.dumps({"event": "end", "key": "a slow", "result": "passed", "why": None, "seconds": 1.0,
                               "figures": {"fresh": 0.1}}) + "\\n")
    child = subprocess.Popen(["sleep", "61"], start_new_session=True)  # a rank, as torchrun starts it
    print(f"stuck in stage b {child.pid}", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def slow_job(monkeypatch) -> list[subprocess.Popen]:
    """Jobs end stage a at once and never end stage b."""
    started: list[subprocess.Popen] = []

    def helper(*arguments, **keywords):
        command = [sys.executable, "-c", SLOW, *arguments]
        started.append(subprocess.Popen(command, start_new_session=True, **keywords))
        log = Path(keywords["stdout"].name)
        # so that only the limit can end the job
        until(lambda: "stuck" in log.read_text(), "the end of stage a")
        return started[0]

    monkeypatch.setattr(running, "helper", helper)
    return started


@pytest.mark.parametrize(
    ("limit_s", "left_s", "result", "why"),
    [
        (2.0, 60.0, "failed", "no result after 2 s: stuck in stage b"),
        (60.0, 2.0, "skipped", "the time of the run"),
    ],
)
def test_a_limit_ends_a_job_and_what_was_measured_stays(
    slow_job, limit_s, left_s, result, why, tmp_path, monkeypatch
):
    monkeypatch.setattr(running, "STAGE_LIMIT_S", limit_s)
    results = gpu.Results(tmp_path / "gpu.json", META)
    job, deadline = Job("slow", "ab", print), time.monotonic() + left_s
    running.run_job(job, gpu.parse([]), tmp_path, deadline, results.keep)
    rows = read(tmp_path / "gpu.json")[0]["stages"]
    assert rows["a slow"]["figures"] == {"fresh": 0.1} and rows == results.rows
    assert rows["b slow"]["result"] == result and why in rows["b slow"]["why"]
    assert slow_job[0].poll() is not None
    rank = int((tmp_path / "slow" / "job.log").read_text().split()[-1])
    until(lambda: not is_running(rank), "the end of a rank of its own session")


def test_sigterm_ends_a_job_too(slow_job, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"])  # the kit adds to it
    monkeypatch.setattr(gpu, "describe", lambda rehearse: META)
    monkeypatch.setattr(gpu, "selected", lambda options: [Job("slow", "ab", print)])
    monkeypatch.setattr(running, "follow", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit):
            gpu.main(["--results", str(tmp_path / "gpu.json"), "--logs", str(tmp_path / "logs")])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert slow_job[0].poll() is not None


# ---- tables


def test_nothing_is_ticked_that_did_not_pass_on_a_gpu():
    host = "weights through host shared memory (`host`)"

    def run(**changes) -> dict:
        return {"meta": META | changes, "stages": {"b one": row(), "b two": row()}}

    def cell(row: str, stages: dict) -> str:
        return table.evidence(row, [{"meta": META, "stages": stages}])

    assert table.evidence(host, [run()]) == "✓ NVIDIA X, vLLM 0.26.0"
    assert (
        table.evidence(host, [run(), run(device="NVIDIA Y")])
        == "✓ NVIDIA X, vLLM 0.26.0; NVIDIA Y, vLLM 0.26.0"
    )
    assert table.evidence(host, []) == ""
    assert table.evidence(host, [run(rehearsal=True)]) == ""
    assert table.evidence(host, [run(), {"meta": META, "stages": {"b three": row("failed")}}]) == ""
    assert cell(host, {"b one": row(), "b two": row("failed")}) == ""
    assert cell(host, {"b one": row("skipped")}) == ""
    assert cell(host, {"b one": row(), "b 7B": row("skipped")}) != ""
    assert table.evidence("engine start, generation, TP 2, several engines", [run()]) == ""
    other = cell("balanced micro-batches, ZeRO-3 and one process", {"e optimizer steps": row()})
    assert other == "", "another job of stage e"
    assert table.evidence("mixture of experts", [run()]) == "", "no stage shows it"


# ---- stages


def test_the_first_stages_pass_on_a_sound_engine_and_fail_on_one_that_lies(tmp_path):
    """Stage a takes updates 2 to 5, b 6 to 11, a once more 12 to 15; from 14 on the engine loads nothing."""
    machine = Machine(True, Faults().lie_about_load(14, 15).engine(FAKE))
    record = Recorder(tmp_path / "events.jsonl")
    run_stages(machine, record, "fake", tmp_path, "aba", "0.5B", "fp32", eager=True)
    ended = [event for event in events(tmp_path / "events.jsonl") if event["event"] == "end"]
    assert [event["result"] for event in ended] == ["passed", "passed", "failed"], ended
    assert "fresh weights differ" in ended[2]["why"]
    assert ended[1]["figures"]["gb_per_s_vllm"] > 0 and ended[1]["figures"]["copy_gb_per_s"] > 0
