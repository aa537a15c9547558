"""The TrainJob: Kubeflow's own models keep every key; test_job_launches.py runs its command."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from trl_multinode.agent import agent
from trl_multinode.tools import main
from trl_multinode.wire import secret

pytestmark = pytest.mark.nightly  # a rarely changed kind; SLURM's script decides in every run

OPTIONS = [
    "--secret",
    "hf",
    "--node_selector",
    "gpu=h100",
    "--toleration",
    "nvidia.com/gpu:NoSchedule",
    "--image",
    "registry/grpo:1",
    "--volume",
    "runs:/runs",
    "--resource",
    "rdma/ib=8",
    "--restarts",
    "2",
]


@pytest.fixture
def render(tmp_path, monkeypatch, capsys):
    """Write the job of a layout, and return its documents by their kind."""
    monkeypatch.chdir(tmp_path)

    def run(
        layout: str, *options: str, script: str = "train.py --output_dir /runs/a"
    ) -> dict[str, Any]:
        assert main(["config", *layout.split(), "--out", "c.yaml"]) == 0
        capsys.readouterr()
        assert main(["render", "k8s", "c.yaml", "--script", script, *options]) == 0
        text = capsys.readouterr().out
        return {document["kind"]: document for document in yaml.safe_load_all(text)}

    return run


def test_secrets_labels_and_taints_of_the_cluster_reach_the_pod(render):
    options = ["--secret=a", "--secret=b", "--node_selector", "gpu=h100=x"]
    options += ["--toleration", "nvidia.com/gpu:NoSchedule", "--toleration", "team=rl"]
    pod = pod_of(render("4x8", "--image", "i", *options)["TrainingRuntime"])
    (container,) = pod["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": name}} for name in "ab"]
    assert pod["nodeSelector"] == {"gpu": "h100=x"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "rl"},
    ]


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
        "kubeflow_trainer_api.models",
        reason="the round trip needs kubeflow-trainer-api (requirements/cpu.in)",
    )
    model, document = getattr(models, MODELS[kind]), render("4x8", *options)[kind]
    assert model.from_dict(document).to_dict() == document
    document["metadata"]["terminationGracePeriodSeconds"] = (
        30  # the comparison sees a key that has no such place
    )
    assert model.from_dict(document).to_dict() != document


def test_the_three_documents_belong_together(render):
    documents = render("4x8 --engine_gpus 2", *OPTIONS)
    job, runtime, config = (
        documents[kind] for kind in ("TrainJob", "TrainingRuntime", "ConfigMap")
    )
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert yaml.safe_load(config["data"]["accelerate.yaml"]) == yaml.safe_load(
        Path("c.yaml").read_text()
    )
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


# ---- nodes that only generate

ENGINES = ["--engine_nodes", "2", "--setup", "cd /tmp", "--env", "NCCL_DEBUG=A B"]
SECRET = {"secretRef": {"name": "grpo-secret"}}


def test_the_pods_that_generate_join_node_0_of_the_pods_that_train(render, tmp_path, monkeypatch):
    """The command of a pod, with a `trl-multinode` that notes its words, which the real parser then reads."""
    documents = render("4x8", *OPTIONS, *ENGINES)
    program = tmp_path / "trl-multinode"
    program.write_text('#!/bin/sh\necho "$PWD" "$NCCL_DEBUG" "$@"\n')
    program.chmod(0o700)
    (container,) = documents["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(container["command"], env=environment, capture_output=True, text=True)
    start, words = done.stdout.split(" engines ")
    assert start == "/tmp A B", done.stderr
    served = []
    monkeypatch.setattr(agent, "run", lambda flags: served.append(flags) or 0)
    assert main(["engines", *words.split()]) == 0
    ((host, port),) = (flags.join for flags in served)
    # as JobSet names the first pod, within the subdomain of the set
    job, runtime = documents["TrainJob"], documents["TrainingRuntime"]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    name = job["metadata"]["name"]
    assert host == f"{name}-{replicated['name']}-0-0.{name}"
    assert (
        port
        == yaml.safe_load(documents["ConfigMap"]["data"]["accelerate.yaml"])["main_process_port"]
    )


def test_the_pods_that_generate_have_what_those_that_train_have_but_no_token(render):
    documents = render("4x8", *OPTIONS, *ENGINES)
    spec, training = documents["StatefulSet"]["spec"], pod_of(documents["TrainingRuntime"])
    pod, (other,) = spec["template"]["spec"], training["containers"]
    (container,) = pod["containers"]
    trainer = documents["TrainJob"]["spec"]["trainer"]
    assert spec["replicas"] == 2
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    assert container["image"] == trainer["image"]
    assert container["resources"] == trainer["resourcesPerNode"]
    for key in ("nodeSelector", "tolerations"):
        assert pod[key] == training[key]
    assert [one for one in training["volumes"] if one["name"] != "config"] == pod["volumes"]
    assert [one for one in other["volumeMounts"] if one["name"] != "config"] == container[
        "volumeMounts"
    ]
    assert container["envFrom"] == [SECRET]
    assert other["envFrom"] == [{"secretRef": {"name": "hf"}}, SECRET]
    # an engine has 30 s to end, then its owner kills it
    assert pod["terminationGracePeriodSeconds"] > 30


def test_the_head_of_the_file_makes_the_secret_with_the_key_that_the_nodes_read(render, capsys):
    render("4x8", "--image", "i")
    assert main(["render", "k8s", "c.yaml", "--script", "a", "--image", "i", *ENGINES]) == 0
    (line,) = re.findall("# .* create secret generic (.*)", capsys.readouterr().out)
    assert line.split()[:2] == ["grpo-secret", f"--from-file={secret.SECRET}=/dev/stdin"]


def test_a_job_without_such_nodes_has_no_such_documents(render):
    documents = render("4x8", "--image", "i")
    assert "StatefulSet" not in documents
    assert "envFrom" not in pod_of(documents["TrainingRuntime"])["containers"][0]


def test_a_launch_of_one_node_whose_ports_no_other_pod_reaches_is_refused(render, capsys):
    with pytest.raises(AssertionError):
        render("1x8", "--image", "i", *ENGINES)
    assert "`num_machines` 1" in capsys.readouterr().err


@pytest.mark.parametrize("options", [OPTIONS, ["--image", "i"]], ids=["all", "none"])
def test_the_model_of_a_pod_keeps_every_key_of_the_pods_that_generate(render, options):
    models = pytest.importorskip(
        "kubeflow_trainer_api.models",
        reason="the round trip needs kubeflow-trainer-api (requirements/cpu.in)",
    )
    template = render("4x8", *options, *ENGINES)["StatefulSet"]["spec"]["template"]
    assert models.IoK8sApiCoreV1PodTemplateSpec.from_dict(template).to_dict() == template


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--image"),
        (["--image", "i", "--engine_nodes", "0"], "--engine_nodes"),
        (["--image", "i", "--volume", "runs"], "--volume"),
        (["--image", "i", "--resource", "rdma/ib"], "--resource"),
    ],
)
def test_wrong_options_are_refused(render, options, message, capsys):
    with pytest.raises(SystemExit) as stop:
        render("4x8", *options)
    assert stop.value.code == 2 and message in capsys.readouterr().err
