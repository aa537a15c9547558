"""The TrainJob: Kubeflow's own models keep every key, and its command runs with the variables of a pod."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from waiting import HANG_S, until

from trl_multinode.command import main
from trl_multinode.testing.launch_files import free_port, fresh_environment

ROOT = Path(__file__).parents[2]
OPTIONS = ["--image", "registry/grpo:1", "--volume", "runs:/runs", "--resource", "rdma/ib=8", "--restarts", "2"]
# Ends as a pre-empted rank: with a file that holds the code, because torchrun turns every code into 1.
SCRIPT = """\
import json, os, signal, sys
from pathlib import Path
import torch.distributed as dist

def preempted(*_):
    Path(os.environ["TRL_MULTINODE_ENDING_FILE"]).write_text(json.dumps({"code": 143, "cause": "pre-empted"}))
    sys.exit(143)

signal.signal(signal.SIGTERM, preempted)
dist.init_process_group("gloo")
dist.barrier()
limit = os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
print(f"rank {dist.get_rank()} of {dist.get_world_size()}, {limit} s, {sys.argv[1]}", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def render(tmp_path, monkeypatch, capsys):
    """Write the job of a layout, and return its three documents by their kind."""
    monkeypatch.chdir(tmp_path)

    def run(layout: str, *options: str, script: str = "train.py --output_dir /runs/a") -> dict[str, Any]:
        assert main(["config", *layout.split(), "--out", "c.yaml"]) == 0
        capsys.readouterr()
        assert main(["render", "k8s", "c.yaml", "--script", script, *options]) == 0
        text = capsys.readouterr().out
        return {document["kind"]: document for document in yaml.safe_load_all(text)}

    return run


def pod_of(runtime: dict) -> dict:
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return job["template"]["spec"]["template"]["spec"]


# ---- the documents


MODELS = {
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "ConfigMap": "IoK8sApiCoreV1ConfigMap",
}


@pytest.mark.parametrize("options", [OPTIONS, ["--image", "i"]], ids=["all", "none"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_models_of_kubeflow_keep_every_key(render, kind, options):
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="the round trip needs kubeflow-trainer-api (requirements/cpu.in)"
    )
    model, document = getattr(models, MODELS[kind]), render("4x8", *options)[kind]
    assert model.from_dict(document).to_dict() == document
    document["metadata"]["terminationGracePeriodSeconds"] = 30  # the comparison sees a key that has no such place
    assert model.from_dict(document).to_dict() != document


def test_the_three_documents_belong_together(render):
    documents = render("4x8 --engine_gpus 2", *OPTIONS)
    job, runtime, config = (documents[kind] for kind in ("TrainJob", "TrainingRuntime", "ConfigMap"))
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert yaml.safe_load(config["data"]["accelerate.yaml"]) == yaml.safe_load(Path("c.yaml").read_text())
    trainer = job["spec"]["trainer"]
    assert trainer["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] == 4
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "8", "rdma/ib": "8"}}
    assert runtime["spec"]["mlPolicy"]["torch"] == {}, "which sets PET_*"


def test_the_pod_has_shared_memory_its_volumes_and_the_time_for_a_checkpoint(render):
    runtime = render("4x8", *OPTIONS, script="train.py --preemption_grace 900")["TrainingRuntime"]
    pod = pod_of(runtime)
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes.pop(mount["name"]) for mount in container["volumeMounts"]}
    assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory"} and not volumes
    assert mounts["/etc/trl-multinode"]["configMap"] == {"name": "grpo"}
    assert mounts["/runs"]["persistentVolumeClaim"] == {"claimName": "runs"}
    assert pod["terminationGracePeriodSeconds"] > 905 and pod["restartPolicy"] == "Never"


def test_only_a_preempted_run_starts_again(render):
    """Code 143 or an eviction fails the job with the reason PodFailurePolicy, and the set restarts for that."""
    spec = render("4x8", "--image", "i")["TrainingRuntime"]["spec"]["template"]["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    codes, evicted = job["podFailurePolicy"]["rules"]
    assert codes["onExitCodes"] == {"containerName": "node", "operator": "In", "values": [143]}
    assert evicted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert {codes["action"], evicted["action"]} == {"FailJob"} and job["backoffLimit"] == 0
    assert spec["failurePolicy"]["maxRestarts"] == 0
    (rule,) = spec["failurePolicy"]["rules"]
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--image"),
        (["--image", "i", "--volume", "runs"], "--volume"),
        (["--image", "i", "--resource", "rdma/ib"], "--resource"),
    ],
)
def test_wrong_options_are_refused(render, options, message, capsys):
    with pytest.raises(SystemExit) as stop:
        render("4x8", *options)
    assert stop.value.code == 2 and message in capsys.readouterr().err


# ---- the command of the container


@pytest.mark.two_node
@pytest.mark.nightly
def test_the_command_meets_launches_and_ends_with_the_code_of_the_run(render, tmp_path):
    """Two pods on this machine: roll-call, launch, then SIGTERM to the first process of each, as at an eviction."""
    Path("script.py").write_text(SCRIPT)
    options = ["--image", "i", "--env", "A=1", "--timeout", "600", "--grace", "20"]
    documents = render("2x1 --cpu", *options, script="script.py $A-$PET_NODE_RANK")
    port = free_port()
    text = documents["ConfigMap"]["data"]["accelerate.yaml"].replace("29500", str(port))
    Path("accelerate.yaml").write_text(text)
    command = documents["TrainJob"]["spec"]["trainer"]["command"]
    command = [word.replace("/etc/trl-multinode", str(tmp_path)) for word in command]
    pods, logs = [], [Path(f"pod{rank}.log") for rank in range(2)]
    for rank, log in enumerate(logs):
        variables = {"PET_NNODES": "2", "PET_NODE_RANK": str(rank), "PET_MASTER_ADDR": "127.0.0.1",
                     "PET_MASTER_PORT": "29400", "PET_NPROC_PER_NODE": "auto", "JOB_COMPLETION_INDEX": str(rank),
                     "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "GLOO_SOCKET_IFNAME": "lo",
                     "PYTHONPATH": str(ROOT)}  # fmt: skip
        with log.open("wb") as file:
            pods.append(
                subprocess.Popen(command, env=fresh_environment() | variables, stdout=file, stderr=subprocess.STDOUT)
            )
    try:
        until(lambda: all("rank " in log.read_text() for log in logs), lambda: str([log.read_text() for log in logs]))
        for pod in pods:
            pod.send_signal(signal.SIGTERM)
        assert [pod.wait(HANG_S) for pod in pods] == [143, 143], [log.read_text() for log in logs]
    finally:
        for pod in pods:
            pod.kill()
    for rank, log in enumerate(logs):
        assert "2 of 2 nodes here" in log.read_text()
        assert f"rank {rank} of 2, 25 s, 1-{rank}\n" in log.read_text()
