"""`trl-multinode render slurm` on a real SLURM: plain runs, failures, `scancel`, pre-emption, the time limit."""

import json
import os
import re
import time
from pathlib import Path

import pytest

from trl_multinode.command import main
from trl_multinode.testing.engines import FAKE
from trl_multinode.testing.launch_files import ZERO3, NodesSpec
from trl_multinode.testing.slurm import SlurmCluster, slurm_available
from trl_multinode.testing.waiting import wait_until

SCRIPTS = Path(__file__).parent / "scripts"
GPUS = 8
pytestmark = [
    pytest.mark.two_node,
    pytest.mark.timeout(400),
    pytest.mark.skipif(slurm_available() is not None, reason=str(slurm_available())),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    NodesSpec(2, 1, {}, ZERO3).write(folder, "n0")
    return folder


@pytest.fixture(scope="module")
def cluster(folder):
    with SlurmCluster(2, folder=folder, gpus_per_node=GPUS, env={"TRL_MULTINODE_ENGINE_MODULE": FAKE}) as cluster:
        yield cluster


def render(folder: Path, name: str, script: str, *more: str) -> str:
    """Write a job file and return its name."""
    flags = ["--script", f"{SCRIPTS}/{script}", "--name", name, "--gpus_per_node", str(GPUS), *more]
    path = folder / f"{name}.sbatch"
    assert main(["render", "slurm", f"{folder}/accelerate.yaml", *flags, "--out", str(path)]) == 0
    return path.name


def log_of(folder: Path, name: str, job: str, node: int | None = None) -> str:
    path = folder / (f"{name}-{job}.log" if node is None else f"{name}-{job}-node{node}.log")
    return path.read_text() if path.exists() else ""


def until_logged(cluster: SlurmCluster, read, text: str, timeout_s: float) -> None:
    assert wait_until(lambda: text in read(), timeout_s), f"{text!r} is not in\n{read()}\n{cluster.tails()}"


def check_nothing_is_left(cluster: SlurmCluster) -> None:
    assert wait_until(lambda: not cluster.jobs_processes(), 20.0), cluster.jobs_processes()


def test_a_plain_run_has_all_cores_and_gpus_of_its_nodes_and_a_log_per_node(cluster, folder):
    job = cluster.submit(render(folder, "plain", "print_node.py print"))
    assert cluster.wait_for(job, "COMPLETED", 90)["ExitCode"] == "0:0"
    devices = ",".join(map(str, range(GPUS)))
    for node in range(2):
        log = log_of(folder, "plain", job, node)
        assert "roll-call: 2 of 2 nodes here" in log
        assert f"node {node} of 2: {os.cpu_count()} cores, GPUs {devices}" in log
        assert f"node {1 - node} of 2" not in log
    check_nothing_is_left(cluster)


def test_a_failed_run_ends_all_nodes_with_its_code_and_is_not_queued_again(cluster, folder):
    job = cluster.submit(render(folder, "failed", "print_node.py fail"))
    fields = cluster.wait_for(job, "FAILED", 90)
    assert (fields["ExitCode"], fields["Restarts"]) == ("1:0", "0")
    assert "no reason" in log_of(folder, "failed", job, 1)
    assert "queue" not in log_of(folder, "failed", job)
    check_nothing_is_left(cluster)


def test_scancel_leaves_time_for_a_checkpoint_and_is_the_end_of_the_job(cluster, folder):
    job = cluster.submit(render(folder, "cancelled", "print_node.py wait"))
    for node in range(2):
        until_logged(cluster, lambda node=node: log_of(folder, "cancelled", job, node), "waits", 60)
    cluster.run("scancel", job)
    check_nothing_is_left(cluster)
    assert all("saved" in log_of(folder, "cancelled", job, node) for node in range(2))
    fields = cluster.wait_for(job, "CANCELLED", 20)
    assert fields["Restarts"] == "0" and "queue" not in log_of(folder, "cancelled", job)


def test_a_time_limit_that_would_warn_at_the_start_is_refused(cluster, folder):
    job = cluster.submit("--time", "10", render(folder, "short", "print_node.py print"))
    assert cluster.wait_for(job, "FAILED", 30)["ExitCode"] == "2:0"
    assert re.search(r"leaves \d+ s, expected more than the 630 s of --signal: raise --time", log_of(folder, "short", job))
    assert log_of(folder, "short", job, 0) == ""


@pytest.fixture(scope="module")
def training(cluster, folder):
    """A job that is pre-empted in step 3, comes near its time limit in step 5, and ends with step 6."""
    seconds = {}

    def released(step: int, signal: str) -> None:
        begin = time.monotonic()
        until_logged(cluster, lambda: log_of(folder, "train", job, 0), f"received {signal}. A checkpoint follows", 60)
        seconds[signal] = time.monotonic() - begin
        (folder / f"go-{step}").touch()

    def restarted(count: int) -> None:
        cluster.wait_for(job, "RUNNING", 60, lambda fields: fields["Restarts"] == str(count))

    job = cluster.submit("--time", "30", render(folder, "train", f"train.py {folder}", "--grace", "90"))
    until_logged(cluster, lambda: lines_of(folder), '"done": 2', 150)
    urgent = cluster.submit("--partition", "urgent", "--nodes", "2", "--exclusive", "--wrap", "sleep 1")
    released(2, "SIGTERM")
    cluster.wait_for(urgent, "COMPLETED", 60)
    restarted(1)
    until_logged(cluster, lambda: lines_of(folder), '"done": 4', 100)
    # SLURM looks every 30 s; from then on at least 30 of the 120 s before the limit are left
    minutes = cluster.run("squeue", "--noheader", "--jobs", job, "--format", "%M").strip().split(":")[-2]
    cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={int(minutes) + 2}")
    released(4, "SIGUSR1")
    restarted(2)
    fields = cluster.wait_for(job, "COMPLETED", 150)
    check_nothing_is_left(cluster)
    print(f"signals were received after {seconds}")
    return {"job": job, "fields": fields, "log": log_of(folder, "train", job)}


def lines_of(folder: Path, name: str = "broken", rank: int = 0) -> str:
    path = folder / f"{name}-rank{rank}.jsonl"
    return path.read_text() if path.exists() else ""


def records(folder: Path, name: str, rank: int) -> list[dict]:
    return [json.loads(line) for line in lines_of(folder, name, rank).splitlines()]


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
