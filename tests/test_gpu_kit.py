"""`make gpu` without a GPU: arguments, result file, table, limits, and the first stages with the fake engine."""

import os
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace

import gpu
import pytest
import torch
from gpu_kit import preflight, running, table
from gpu_kit.jobs import JOBS, STAGES, Job
from gpu_kit.machine import Machine, build_model
from gpu_kit.record import Recorder, events, merge, read
from gpu_kit.rows import rounding_floor, swap_points, trainer_logprobs
from gpu_kit.weights import run_stages
from waiting import until

from trl_multinode.testing.engines import FAKE
from trl_multinode.testing.faults import Faults
from trl_multinode.vllm_worker.plugin import register
from trl_multinode.wire.supervisor import is_running

pytestmark = [pytest.mark.real, pytest.mark.nightly]
ROOT = Path(__file__).parents[1]
META = {"rehearsal": False, "device": "NVIDIA X", "num_gpus": 1, "memory_gib": 80.0, "driver": "1", "cuda": "13.0",
        "python": "3.12", "versions": {"vllm": "0.26.0"}, "commit": "abc", "cores": 16}  # fmt: skip


def row(result: str = "passed", **figures) -> dict:
    return {"result": result, "why": None if result == "passed" else "because", "seconds": 1.5, "figures": figures}


# ---- arguments


def test_stages_select_the_jobs_and_every_job_has_keys_of_its_own():
    assert [job.name for job in gpu.selected(gpu.parse(["--stages", "h"]))] == ["fp8"]
    keys = [key for job in JOBS for key in job.keys(STAGES)]
    assert len(set(keys)) == len(keys) and {key[0] for key in keys} == set("abcdefghij")
    assert "".join(job.stages for job in JOBS[:2]) == "abcdabcd", "a to d of both dtypes come first"


def test_without_a_gpu_it_is_one_line_and_exit_code_2():
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 2, done.stderr
    (line,) = done.stdout.splitlines()
    assert "torch sees no GPU here" in line and "--rehearse" in line


def test_a_plain_checkout_has_the_entry_point_that_vllm_looks_for(tmp_path, monkeypatch):
    assert preflight.entry_points(tmp_path) == [], "the tests' environment has the package installed"
    monkeypatch.setattr(preflight, "version_of", lambda name: None)
    assert preflight.entry_points(tmp_path) == [str(tmp_path)]
    (found,) = [d for d in distributions(path=[str(tmp_path)]) if d.metadata["Name"] == "trl-multinode"]
    (point,) = found.entry_points.select(group="vllm.general_plugins")
    assert point.load() is register


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (Job("x", "j", print, least_gpus=2), "needs 2 GPUs, this machine has 1"),
        (Job("x", "b", print, least_gib=100.0), "needs 100 GiB of GPU memory, this GPU has 80"),
        (Job("x", "a", print), None),
    ],
)
def test_a_job_that_the_machine_is_too_small_for_is_skipped_with_the_reason(job, why):
    assert running.why_not(job, META) == why


# ---- result file


def test_results_are_kept_after_each_stage_and_a_failed_stage_keeps_its_figures(tmp_path):
    recorder = Recorder(tmp_path / "events.jsonl")
    with recorder.stage("a one") as figures:
        figures["fresh"] = 1e-3 / 3
    with recorder.stage("b one") as figures:
        figures["worst"] = float("nan")
        raise AssertionError("too far apart\nand a second line")
    ended = {event["key"]: event for event in events(tmp_path / "events.jsonl") if event["event"] == "end"}
    assert ended["a one"]["result"] == "passed" and ended["a one"]["figures"] == {"fresh": 0.0003333}
    assert ended["b one"]["result"] == "failed" and ended["b one"]["figures"] == {"worst": "nan"}
    assert ended["b one"]["why"] == "AssertionError: too far apart"


def test_results_of_other_stages_stay_on_the_same_machine_and_commit_only(tmp_path):
    results = tmp_path / "gpu.json"
    merge(results, META, {"a one": row(), "b one": row("failed")})
    merge(results, META, {"b one": row()})
    assert {key: stage["result"] for key, stage in read(results)["stages"].items()} == dict.fromkeys(
        ["a one", "b one"], "passed"
    )
    merge(results, META | {"commit": "def"}, {"c one": row()})
    assert list(read(results)["stages"]) == ["c one"]


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
        until(lambda: "stuck" in log.read_text(), "the end of stage a")  # so that only the limit can end the job
        return started[0]

    monkeypatch.setattr(running, "helper", helper)
    return started


@pytest.mark.parametrize(
    ("limit_s", "left_s", "result", "why"),
    [(2.0, 60.0, "failed", "no result after 2 s: stuck in stage b"), (60.0, 2.0, "skipped", "the time of the run")],
)
def test_a_limit_ends_a_job_and_what_was_measured_stays(slow_job, limit_s, left_s, result, why, tmp_path, monkeypatch):
    monkeypatch.setattr(running, "STAGE_LIMIT_S", limit_s)
    results = gpu.Results(tmp_path / "gpu.json", META)
    job, deadline = Job("slow", "ab", print), time.monotonic() + left_s
    running.run_job(job, gpu.parse([]), tmp_path, deadline, results.keep)
    rows = read(tmp_path / "gpu.json")["stages"]
    assert rows["a slow"]["figures"] == {"fresh": 0.1} and rows == results.rows
    assert rows["b slow"]["result"] == result and why in rows["b slow"]["why"]
    assert slow_job[0].poll() is not None
    rank = int((tmp_path / "slow" / "job.log").read_text().split()[-1])
    until(lambda: not is_running(rank), "the end of a rank of its own session")


# ---- tables


def test_nothing_is_ticked_that_did_not_pass_on_a_gpu():
    host = "weights through host shared memory (`host`)"
    passed = {"meta": META, "stages": {"b one": row(), "b two": row()}}
    assert table.evidence(host, passed) == "✓ NVIDIA X, vLLM 0.26.0"
    assert table.evidence(host, {}) == ""
    assert table.evidence(host, passed | {"meta": META | {"rehearsal": True}}) == ""
    assert table.evidence(host, {"meta": META, "stages": {"b one": row(), "b two": row("failed")}}) == ""
    assert table.evidence(host, {"meta": META, "stages": {"b one": row("skipped")}}) == ""
    assert table.evidence(host, {"meta": META, "stages": {"b one": row(), "b 7B": row("skipped")}}) != ""
    assert table.evidence("engine start, generation, TP 2, several engines", passed) == ""
    assert table.evidence("mixture of experts", passed) == "", "no stage shows it"


def test_the_pages_were_written_from_the_result_file_and_have_every_row():
    found = read(gpu.RESULTS)
    assert table.replaced(gpu.PAGE.read_text(), found) == gpu.PAGE.read_text()
    executed = gpu.EXECUTED.read_text()
    assert table.with_evidence(executed, found) == executed
    lines = [line.split("|") for line in executed.splitlines() if line.startswith("| ") and line.count("|") > 3]
    assert table.EVIDENCE.keys() <= {cells[1].strip() for cells in lines}


# ---- stages


def test_measuring_the_rounding_leaves_weights_and_buffers_as_they_were():
    model = build_model(Machine(True), "0.5B", "bf16").to(torch.bfloat16)
    frequencies = model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.float()
    rows = [([5, 6, 7], SimpleNamespace(tokens=torch.arange(20, 60)))]
    before = trainer_logprobs(model, rows)
    assert 0 < rounding_floor(model, rows) < 1
    assert torch.equal(trainer_logprobs(model, rows), before)
    assert model.model.rotary_emb.inv_freq is frequencies and frequencies.dtype == torch.float32


def test_the_swap_is_found_where_the_explanation_changes():
    before, after = torch.full((2, 6), -1.0), torch.full((2, 6), -3.0)
    got = torch.tensor([[-1.0] * 4 + [-3.0] * 2, [-1.0] + [-3.0] * 5])
    assert swap_points(before, after, got) == [4, 1]


def test_the_first_stages_pass_on_a_sound_engine_and_fail_on_one_that_lies(tmp_path):
    """Stage a takes updates 2 to 5, b 6 to 11, a once more 12 to 15; from 14 on the engine loads nothing."""
    machine = Machine(True, Faults().lie_about_load(14, 15).engine(FAKE))
    record = Recorder(tmp_path / "events.jsonl")
    run_stages(machine, record, "fake", tmp_path, "aba", "0.5B", "fp32", eager=True)
    ended = [event for event in events(tmp_path / "events.jsonl") if event["event"] == "end"]
    assert [event["result"] for event in ended] == ["passed", "passed", "failed"], ended
    assert "fresh weights differ" in ended[2]["why"]
    assert ended[1]["figures"]["gb_per_s_vllm"] > 0 and ended[1]["figures"]["copy_gb_per_s"] > 0
