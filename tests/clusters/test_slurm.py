"""`trl-multinode render slurm` on a real SLURM: a training that is pre-empted, `scancel`, failures, the time limit."""

import json
import os
import re
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest
from waiting import HANG_S, until

from multinode_kit.engines import FAKE
from multinode_kit.launch_files import ZERO3, NodesSpec
from multinode_kit.slurm import SlurmCluster, slurm_available
from trl_multinode.tools import main

SCRIPTS = Path(__file__).parent / "scripts"
GPUS = 8
pytestmark = [
    pytest.mark.two_node,
    # test_slurm_script.py runs the same script with stand-ins for the commands of SLURM
    pytest.mark.nightly,
    pytest.mark.skipif(slurm_available() is not None, reason=str(slurm_available())),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    NodesSpec((1, 1), {}, ZERO3).write(folder, "n0")
    (folder / "bin").mkdir()
    stand_in = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {SCRIPTS}/stand_in.py "$@"\n'
    (folder / "bin" / "accelerate").write_text(stand_in)
    (folder / "bin" / "accelerate").chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def cluster(folder):
    with SlurmCluster(
        2, folder=folder, gpus_per_node=GPUS, env={"TRL_MULTINODE_ENGINE_MODULE": FAKE}
    ) as cluster:
        yield cluster


def render(folder: Path, name: str, script: str, *more: str) -> str:
    """Write a job file and return its name."""
    flags = ["--script", script, "--name", name, "--gpus_per_node", str(GPUS), *more]
    assert (
        main(
            [
                "render",
                "slurm",
                f"{folder}/accelerate.yaml",
                *flags,
                "--out",
                f"{folder}/{name}.sbatch",
            ]
        )
        == 0
    )
    return f"{name}.sbatch"


def stand_in(folder: Path, what: str) -> str:
    """Write a job file whose launcher is the stand-in; the rest, the roll-call too, is real."""
    return render(
        folder, what, f"{SCRIPTS}/stand_in.py {what}", "--setup", f"PATH={folder}/bin:$PATH"
    )


def log_of(folder: Path, name: str, job: str, node: int | None = None) -> str:
    return text_of(
        folder / (f"{name}-{job}.log" if node is None else f"{name}-{job}-node{node}.log")
    )


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def until_logged(cluster: SlurmCluster, read, text: str) -> None:
    until(lambda: text in read(), lambda: f"{text!r} in\n{read()}\n{cluster.tails()}")


def check_nothing_is_left(cluster: SlurmCluster) -> None:
    until(lambda: not cluster.job_processes(), lambda: f"the end of {cluster.job_processes()}")


def test_a_failed_run_ends_all_nodes_with_its_code_and_is_not_queued_again(cluster, folder):
    job = cluster.submit(stand_in(folder, "fail"))
    fields = cluster.wait_for(job, "FAILED", HANG_S)
    # srun's SIGTERM ends the other node
    assert (fields["ExitCode"], fields["Restarts"]) == (
        "143:0",
        "0",
    )
    assert all(f"node {node} fails" in log_of(folder, "fail", job, node) for node in range(2))
    assert "task 1: Exited with exit code 6" in log_of(folder, "fail", job)
    assert "back into the queue" not in log_of(folder, "fail", job)
    check_nothing_is_left(cluster)


@pytest.fixture(scope="module")
def cancelled(cluster, folder):
    """A job that is pre-empted without a time of grace, starts again, and is cancelled."""
    logs = []

    def until_both_have(word: str, number: int) -> None:
        for node in range(2):
            read = partial(log_of, folder, "wait", job, node)
            until(lambda read=read: read().count(word) == number, cluster.tails)
        logs.append([log_of(folder, "wait", job, node) for node in range(2)])

    job = cluster.submit("--partition", "at_once", stand_in(folder, "wait"))
    until_both_have("waits", 1)
    cluster.submit("--partition", "urgent", "--nodes", "2", "--exclusive", "--wrap", "sleep 1")
    until_both_have("saved", 1)
    until_both_have("waits", 2)
    restarts = cluster.job(job)["Restarts"]
    cluster.run("scancel", job)
    check_nothing_is_left(cluster)
    fields = cluster.wait_for(job, "CANCELLED", HANG_S)
    return {
        "restarts": restarts,
        "fields": fields,
        "log": log_of(folder, "wait", job),
        "nodes": logs[-1],
    }


def test_a_job_that_slurm_puts_back_itself_can_save_and_starts_once_more(cancelled):
    """SLURM signals the tasks, and `srun`, which signals them again: two SIGTERM, and no SIGKILL before `saved`."""
    assert cancelled["restarts"] == "1"
    assert all(
        log.count("saves") in (1, 2) and log.count("saved") == 1 for log in cancelled["nodes"]
    )


def test_scancel_leaves_time_for_a_checkpoint_and_is_the_end_of_the_job(folder, cancelled):
    assert cancelled["fields"]["Restarts"] == "1" and "back into the queue" not in cancelled["log"]
    logs = [log_of(folder, "wait", cancelled["fields"]["JobId"], node) for node in range(2)]
    assert [log.count("saved") for log in logs] == [2, 2], logs


@pytest.fixture(scope="module")
def training(cluster, folder):
    """A job that is pre-empted in step 3, comes near its time limit in step 5, and ends with step 6."""

    def released(step: int, signal: str) -> None:
        until_logged(
            cluster,
            lambda: log_of(folder, "train", job, 0),
            f"received {signal}. A checkpoint follows",
        )
        (folder / f"go-{step}").touch()

    def restarted(count: int) -> None:
        cluster.wait_for(job, "RUNNING", HANG_S, lambda fields: fields["Restarts"] == str(count))

    script = f"{SCRIPTS}/train.py {folder}"
    job = cluster.submit("--time", "30", render(folder, "train", script, "--grace", "90"))
    until_logged(cluster, lambda: text_of(folder / "broken-rank0.jsonl"), '"done": 2')
    urgent = cluster.submit(
        "--partition", "urgent", "--nodes", "2", "--exclusive", "--wrap", "sleep 1"
    )
    released(2, "SIGTERM")
    cluster.wait_for(urgent, "COMPLETED", HANG_S)
    restarted(1)
    until_logged(cluster, lambda: text_of(folder / "broken-rank0.jsonl"), '"done": 4')
    # The signal comes 120 s before the limit. SLURM looks every 30 s, so the run has 30 s at least
    minutes = int(
        cluster.run("squeue", "--noheader", "--jobs", job, "--format", "%M").split(":")[-2]
    )
    cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 2}")
    released(4, "SIGUSR1")
    cluster.wait_for(job, "PENDING", HANG_S)
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=30")
    restarted(2)
    fields = cluster.wait_for(job, "COMPLETED", HANG_S)
    check_nothing_is_left(cluster)
    return {
        "fields": fields,
        "log": log_of(folder, "train", job),
        "nodes": [log_of(folder, "train", job, node) for node in (0, 1)],
    }


def records(folder: Path, name: str, rank: int) -> list[dict]:
    return [json.loads(line) for line in text_of(folder / f"{name}-rank{rank}.jsonl").splitlines()]


@pytest.mark.zero3
def test_a_node_has_all_cores_and_gpus_and_a_log_of_its_own(training):
    devices = ",".join(map(str, range(GPUS)))
    for node, log in enumerate(training["nodes"]):
        assert log.count("roll-call: 2 of 2 nodes here") == 3  # in one log, from all starts
        assert log.count(f"{os.cpu_count()} cores, GPUs {devices}") == 3
        assert f"node {node}, rank {node}" in log


@pytest.mark.zero3
def test_pre_emption_and_time_limit_put_the_job_back_into_the_queue(training):
    reasons = re.findall(r"back into the queue, because (.*)", training["log"])
    assert reasons == ["it is pre-empted (exit code 143)", "the time limit is near (exit code 143)"]
    assert (training["fields"]["Restarts"], training["fields"]["ExitCode"]) == ("2", "0:0")


@pytest.mark.zero3
def test_the_requeued_job_continues_exactly(training, folder):
    for rank in range(2):
        whole, broken = (records(folder, name, rank) for name in ("whole", "broken"))
        starts = [(line["start"], line["step"]) for line in broken if "step" in line]
        assert starts == [("0", 1), ("0", 2), ("0", 3), ("1", 4), ("1", 5), ("2", 6)]
        assert [line | {"start": "0"} for line in broken] == whole
        assert len({line["loss"] for line in whole if "loss" in line}) > 3
