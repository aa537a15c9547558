"""Examinations of one node, on this machine, on invented limits, and on folders that look like a cache."""

import json
import os
import resource
import socket
from pathlib import Path
from types import SimpleNamespace

import numpy
import psutil
import pytest
from doctoring import case, results
from safetensors.numpy import save_file

from trl_multinode.check.launch import Engines
from trl_multinode.doctor import cores, models, network, software, storage
from trl_multinode.doctor.cores import cores_of_task, examine_cores, examine_limits
from trl_multinode.doctor.facts import Fact, Finding
from trl_multinode.doctor.models import examine_dataset, examine_hub, examine_model
from trl_multinode.doctor.network import chosen_interfaces, examine_address, examine_names, examine_variables
from trl_multinode.doctor.node import EXAMINATIONS, examine
from trl_multinode.doctor.software import examine_launch, examine_tracker, examine_versions
from trl_multinode.doctor.storage import examine_disks, examine_shared_memory

SLURM = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1"}


@pytest.fixture(autouse=True)
def _no_cache():
    models._model.cache_clear()


# ---- cores and limits


def test_one_core_of_a_task_under_slurm_is_an_error_with_both_cures(monkeypatch):
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        facts, (finding,) = results(examine_cores, case(SLURM))
        _, (other,) = results(examine_cores, case({**SLURM, "SLURM_CPUS_PER_TASK": "96"}))
        _, (on_cpu,) = results(examine_cores, case(gpus=0, ranks=2))
    finally:
        os.sched_setaffinity(0, before)
    assert facts["cores"] == f"1 of {os.cpu_count()}" and finding.severity == "error"
    assert "(expected 8 or more: 7 ranks and 1 engine)" in finding.what
    assert f"N = {os.cpu_count()}" in finding.cure and "`--ntasks-per-node 1`" in finding.cure
    assert "`srun`" in other.cure and "`--cpus-per-task`" in other.cure
    assert on_cpu.severity == "warning" and "docker: --cpus" in on_cpu.cure
    monkeypatch.setattr(cores, "cores_of_task", lambda: os.cpu_count())
    (machine,) = results(examine_cores, case(SLURM, ranks=(os.cpu_count() or 1)))[1]
    assert "`num_processes`" in machine.cure


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_the_quota_of_a_container_counts(tmp_path, monkeypatch, files, expected):
    monkeypatch.setattr(cores, "CGROUP", tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert cores_of_task() == (expected or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(("nodes", "hard", "severity"), [(64, 1024, "error"), (32, 1024, None), (64, -1, None)])
def test_open_files_must_suffice_for_the_connections_of_node_0(monkeypatch, nodes, hard, severity):
    """64 nodes x 7 ranks x 3 connections."""
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (1024, hard) if which == resource.RLIMIT_NOFILE else (-1, -1)
    )
    facts, findings = results(examine_limits, case(nodes=nodes))
    assert (
        facts["ulimit -n"] == f"1024 (hard {'unlimited' if hard < 0 else hard})" and facts["ulimit -l"] == "unlimited"
    )
    assert [one.severity for one in findings] == ([severity] if severity else [])
    assert all("1024" in one.what and "expected 1544" in one.what for one in findings)


def test_locked_memory_must_hold_the_slots_of_a_launch_on_gpus(monkeypatch):
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (8 << 20, 8 << 20) if which == resource.RLIMIT_MEMLOCK else (-1, -1)
    )
    facts, (finding,) = results(examine_limits, case())
    assert facts["ulimit -l"] == "8 MiB" and finding.severity == "warning"
    assert "8 MiB" in finding.what and "1 GiB" in finding.what
    assert results(examine_limits, case(values={"sync_bucket_mb": 4}))[1] == []
    assert results(examine_limits, case(gpus=0))[1] == []


# ---- shared memory and disks


def free(monkeypatch, **by_folder: int) -> None:
    """Free bytes by the first word of the path; everything else has a TiB."""
    found = {f"/{name}": value for name, value in by_folder.items()}
    size_of = lambda path: next((value for name, value in found.items() if str(path).startswith(name)), 1 << 40)  # noqa: E731
    monkeypatch.setattr(storage, "free_bytes", lambda path: (size_of(path), 1 << 40))
    monkeypatch.setattr(storage, "leftovers", lambda remove: [])


def test_shared_memory_must_hold_both_slots_and_vllms_queues(monkeypatch):
    free(monkeypatch, dev=1 << 30)
    facts, (finding,) = results(examine_shared_memory, case())
    assert facts["/dev/shm"] == "1 GiB free of 1 TiB, 1.16 GiB needed"
    assert finding.severity == "error" and "--shm-size" in finding.cure and "`sync_bucket_mb`" in finding.cure
    assert results(examine_shared_memory, case(values={"sync_bucket_mb": "256"}))[1] == []
    two = case(values={"sync_bucket_mb": 400}, engines=Engines(num_engines=2))
    assert len(results(examine_shared_memory, two)[1]) == 1


def test_what_killed_runs_left_is_named_and_counts_as_free(monkeypatch):
    free(monkeypatch, dev=1 << 30)
    dead = type("Dead", (), {"kept": None, "num_bytes": 1 << 30})()
    alive = type("Alive", (), {"kept": "its run lives", "num_bytes": 1 << 30})()
    monkeypatch.setattr(storage, "leftovers", lambda remove: [dead, alive])
    _, (finding,) = results(examine_shared_memory, case())
    assert finding.severity == "warning" and "1 folder(s) and 1 GiB" in finding.what
    assert "`trl-multinode clean`" in finding.cure


def test_a_disk_without_space_for_a_checkpoint_is_named(monkeypatch, tmp_path):
    model = model_in(tmp_path / "model", megabytes=8)  # 4 M parameters of 2 bytes
    output = {"output_dir": "/scratch/out"}
    free(monkeypatch, scratch=30 << 20)
    facts, findings = results(examine_disks, case(model=str(model), values=output))
    assert facts["disk of `output_dir`"] == "30 MiB free of 1 TiB (/scratch/out)"
    full, checkpoint = findings
    assert full.severity == "error" and "/scratch/out has 30 MiB free (expected 1 GiB" in full.what
    assert checkpoint.severity == "warning" and "56 MiB" in checkpoint.what
    free(monkeypatch)
    assert results(examine_disks, case(model=str(model), values=output))[1] == []


# ---- network


def test_interfaces_are_chosen_as_nccl_does():
    names = ["eth0", "eth1", "ib0", "lo"]
    assert chosen_interfaces("eth", names) == ["eth0", "eth1"]
    assert chosen_interfaces("=eth1", names) == ["eth1"] and chosen_interfaces("=eth", names) == []
    assert chosen_interfaces("^eth0", names) == ["eth1", "ib0"] and chosen_interfaces("^=eth0,ib0", names) == ["eth1"]
    assert chosen_interfaces("bond0,ib", names) == ["ib0"]


def test_an_interface_that_does_not_exist_is_an_error_with_those_that_do():
    variables = {"NCCL_SOCKET_IFNAME": "bond7", "GLOO_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "INFO", "OTHER": "1"}
    facts, (finding,) = results(examine_variables, case(variables))
    assert facts["NCCL and gloo"] == "GLOO_SOCKET_IFNAME=lo NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=bond7"
    assert "NCCL_SOCKET_IFNAME=bond7" in finding.what
    assert "lo" in finding.what and finding.severity == "error"


def test_infiniband_is_counted_by_state_and_its_absence_from_nccl_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(network, "INFINIBAND", tmp_path)
    for index, state in enumerate(["4: ACTIVE", "4: ACTIVE", "1: DOWN"]):
        port = tmp_path / f"mlx5_{index}" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    facts, findings = results(examine_variables, case())
    assert facts["InfiniBand"] == "2 x 400 Gb/sec (4X NDR) ACTIVE, 1 x 400 Gb/sec (4X NDR) DOWN" and findings == []
    _, (finding,) = results(examine_variables, case({"NCCL_IB_DISABLE": "1"}))
    assert finding.severity == "warning" and finding.cure == "unset NCCL_IB_DISABLE"


def test_the_address_of_node_0_and_the_interface_towards_it_are_shown():
    facts, findings = results(examine_address, case(address="127.0.0.1"))
    assert facts["NIC"] == "lo 127.0.0.1" and facts["network"].startswith("MTU ") and findings == []
    facts, (finding,) = results(examine_address, case(address="no-such-host.invalid"))
    assert "`main_process_ip` no-such-host.invalid" in finding.what


def test_the_address_of_node_0_belongs_to_rank_0(monkeypatch):
    monkeypatch.setattr(network, "nics", lambda: [network.Nic("lo", "127.0.0.1"), network.Nic("eth0", "10.0.0.5")])
    monkeypatch.setattr(network, "route_to", lambda address: "10.0.0.5")
    assert results(examine_address, case(address="10.0.0.5"))[1] == []
    _, (finding,) = results(examine_address, case(address="10.0.0.5", rank=3))
    assert finding.severity == "error" and "machine_rank 3" in finding.what
    _, (finding,) = results(examine_address, case(address="10.0.0.9"))
    assert finding.severity == "warning" and "machine_rank 0" in finding.what
    assert results(examine_address, case(address="10.0.0.9", rank=3))[1] == []
    assert results(examine_address, case(address="127.0.0.1", rank=3))[1] == []  # all nodes are this machine


def test_a_name_server_that_loses_questions_is_a_warning(monkeypatch):
    asked = []

    def getnameinfo(address, flags):
        asked.append(address[0])
        now.seconds += 5.0 if len(asked) == 2 else 0.01
        raise OSError

    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(network, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    monkeypatch.setattr(network.socket, "getnameinfo", getnameinfo)
    _, (finding,) = results(examine_names, case(address="127.0.0.1"))
    assert finding.severity == "warning" and "5 s" in finding.what and "127.0.0.1" in finding.what
    assert "RES_OPTIONS" in finding.cure and set(asked) == {"::ffff:127.0.0.1"}  # as torch asks, not as `ping` does
    facts, findings = results(examine_names, case(address="127.0.0.1"))
    assert facts == {"name of this address": "quick or unknown"} and findings == []


def test_a_slow_interface_is_a_warning(monkeypatch):
    state = psutil.net_if_stats()["lo"]._replace(speed=1000)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"lo": state})
    _, (finding,) = results(examine_address, case())
    assert finding.severity == "warning" and "lo has 1 Gbit/s (expected 10" in finding.what


def test_a_host_name_on_loopback_is_an_error_where_gloo_connects_nodes(monkeypatch):
    monkeypatch.setattr(network, "route_to", lambda address: "10.0.0.5")
    monkeypatch.setattr(network, "nics", lambda: [network.Nic("lo", "127.0.1.1"), network.Nic("ib0", "10.0.0.5")])
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    _, (finding,) = results(examine_variables, case(gpus=0, ranks=2, address="10.0.0.1"))
    assert finding.severity == "error" and "export GLOO_SOCKET_IFNAME=ib0" in finding.cure
    assert results(examine_variables, case(address="10.0.0.1"))[1][0].severity == "warning"
    assert results(examine_variables, case({"GLOO_SOCKET_IFNAME": "ib0"}, gpus=0, address="10.0.0.1"))[1] == []
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.5")
    assert results(examine_variables, case(gpus=0, address="10.0.0.1"))[1] == []


# ---- versions, tracker


def test_versions_are_shown_and_a_missing_library_is_an_error(monkeypatch):
    facts, findings = results(examine_versions, case())
    assert "torch " in facts["versions"] and "python " in facts["versions"] and findings == []
    monkeypatch.setattr(software, "local_versions", lambda: {"torch": "2", "trl": "1", "transformers": "5",
                        "accelerate": "1", "vllm": "none", "deepspeed": "1"})  # fmt: skip
    _, (finding,) = results(examine_versions, case())
    assert finding.what.startswith("vllm ") and finding.severity == "error"


def test_a_tracker_needs_its_package_and_its_key_on_rank_0(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    installed = {"wandb", "trackio"}
    monkeypatch.setattr(software.importlib.util, "find_spec", lambda name: name in installed or None)
    wandb = {"report_to": ["wandb"]}
    facts, (finding,) = results(examine_tracker, case(values=wandb))
    assert facts["tracker"] == "wandb" and "WANDB_API_KEY" in finding.what
    assert (
        finding.severity == "error"
        and results(examine_tracker, case(values=wandb, rank=1))[1][0].severity == "warning"
    )
    for variables in ({"WANDB_API_KEY": "k" * 40}, {"WANDB_MODE": "offline"}):
        facts, findings = results(examine_tracker, case(variables, values=wandb))
        assert findings == [] and "kkkk" not in str(facts)
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert results(examine_tracker, case(values=wandb))[1] == []
    assert "mlflow" in results(examine_tracker, case(values={"report_to": "mlflow"}))[1][0].what
    assert results(examine_tracker, case())[0]["tracker"] == "none"


def test_the_script_is_compared_by_its_content(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "script" not in results(examine_launch, case())[0]
    Path("train.py").write_text("a")
    first = results(examine_launch, case())[0]
    Path("train.py").write_text("b")
    second = results(examine_launch, case())[0]
    assert first["script"] != second["script"] and first["launch"] == "2 nodes x 7 ranks, DEEPSPEED, port 29500"


# ---- model and dataset


def model_in(folder: Path, megabytes: int = 1, **config) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16", **config}))
    save_file({"weight": numpy.zeros(megabytes << 20, numpy.uint8)}, folder / "model.safetensors")
    return folder


def in_cache(cache: Path, kind: str, name: str) -> Path:
    """A folder of the Hub's cache, as `hf download` makes it."""
    repo = cache / f"{kind}--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("c" * 40)
    return repo / "snapshots" / ("c" * 40)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_model_in_the_cache_is_shown_with_its_revision(cache):
    model_in(in_cache(cache, "models", "org/model"), megabytes=3)
    facts, findings = results(examine_model, case(model="org/model"))
    assert facts["model"] == "org/model, 3 MiB (revision cccccccc)" and findings == []


def test_a_model_that_lacks_a_file_is_incomplete(cache):
    folder = model_in(in_cache(cache, "models", "org/model"))
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (folder / models.INDEX).write_text(json.dumps(index))
    _, (finding,) = results(examine_model, case(model="org/model"))
    assert "1 file(s) missing, as model-00002.safetensors" in finding.what
    assert finding.severity == "warning" and "`hf download org/model`" in finding.cure
    assert results(examine_model, case({"HF_HUB_OFFLINE": "1"}, model="org/model"))[1][0].severity == "error"


@pytest.mark.parametrize(("examination", "words"), [(examine_model, "model"), (examine_dataset, "dataset")])
def test_what_is_not_in_the_cache_is_an_error_only_offline(cache, examination, words):
    given = {"model": "org/x"} if words == "model" else {"values": {"dataset_name": "org/x"}}
    facts, (finding,) = results(examination, case(**given))
    assert facts[words] == "org/x: not here" and finding.severity == "warning"
    assert "hf download" in finding.cure and "org/x" in finding.cure
    _, (finding,) = results(examination, case({"HF_HUB_OFFLINE": "1"}, **given))
    assert finding.severity == "error" and "HF_HUB_OFFLINE" in finding.what


def test_a_dataset_is_found_in_a_folder_and_in_both_caches(cache, tmp_path, monkeypatch):
    from datasets import config

    local = tmp_path / "rows.jsonl"
    local.write_text("{}\n")
    assert results(examine_dataset, case(values={"dataset_name": str(local)})) == ({"dataset": f"{local} (local)"}, [])
    in_cache(cache, "datasets", "org/data").mkdir(parents=True)
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    (tmp_path / "prepared" / "org___other").mkdir(parents=True)
    for name in ("org/data", "org/other"):
        facts, findings = results(examine_dataset, case(values={"dataset_name": name}))
        assert facts["dataset"] == f"{name}, in the cache" and findings == []
    assert results(examine_dataset, case(values={"dataset_name": "org/none"}))[1]


def test_a_push_without_a_token_is_an_error_and_no_token_is_shown(monkeypatch):
    monkeypatch.setattr(models, "get_token", lambda: None)
    _, (finding,) = results(examine_hub, case(values={"push_to_hub": True}))
    assert finding.severity == "error" and "HF_TOKEN" in finding.cure
    monkeypatch.setattr(models, "get_token", lambda: "hf_" + "a" * 30)
    facts, findings = results(examine_hub, case(values={"push_to_hub": True}))
    assert facts == {"Hub": "a token is set"} and findings == []


# ---- all together


def test_an_examination_that_fails_is_a_warning_and_the_others_go_on():
    def examine_nothing(_):
        yield Fact("first", "1")
        raise PermissionError("no look")

    def examine_more(_):
        yield Finding("warning", "x", "w", "c")
        yield Finding("error", "x", "e", "c")

    report = examine(case(gpus=0, ranks=1), (examine_nothing, examine_more))
    assert [fact.name for fact in report.facts] == ["first"]
    assert [one.severity for one in report.findings] == ["error", "warning", "warning"]  # errors first
    assert "PermissionError: no look" in report.findings[1].what


def test_a_report_leaves_its_node_without_the_secrets_of_the_node():
    def examine_secrets(_):
        yield Fact("x", "it is correct-horse")
        yield Finding("error", "x", "pid 7 (`train.py correct-horse`) is here", "c")

    report = examine(case({"MY_TOKEN": "correct-horse"}, gpus=0, ranks=1), (examine_secrets,))
    assert report.facts[0].value == "it is (hidden)" and "correct-horse" not in report.findings[0].what


def test_all_examinations_work_on_this_machine():
    report = examine(case(gpus=0, ranks=1), EXAMINATIONS)
    assert not any("could not be examined" in finding.what for finding in report.findings), report.findings
    assert {"GPUs", "cores", "/dev/shm", "NIC", "versions", "model"} <= {fact.name for fact in report.facts}
    assert report.nic == "lo" and report.host == socket.gethostname()
