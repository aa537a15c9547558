"""Examinations of one node: cores, memory, disks and network, on this machine and on invented limits."""

import os
import resource
import socket
from types import SimpleNamespace

import psutil
import pytest
from doctoring import case, model_in, results

from trl_multinode.run import memory
from trl_multinode.tools.check.launch import Engines
from trl_multinode.tools.doctor import cores, models, network, storage
from trl_multinode.tools.doctor.cores import cores_of_task, examine_cores, examine_limits
from trl_multinode.tools.doctor.facts import Fact, Finding
from trl_multinode.tools.doctor.network import (
    chosen_interfaces,
    examine_address,
    examine_names,
    examine_variables,
)
from trl_multinode.tools.doctor.node import EXAMINATIONS, examine
from trl_multinode.tools.doctor.storage import examine_disks, examine_shared_memory

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


@pytest.mark.nightly
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


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("nodes", "hard", "severity"), [(64, 1024, "error"), (32, 1024, None), (64, -1, None)]
)
def test_open_files_must_suffice_for_the_connections_of_node_0(monkeypatch, nodes, hard, severity):
    """64 nodes x 7 ranks x 3 connections."""
    monkeypatch.setattr(
        resource,
        "getrlimit",
        lambda which: (1024, hard) if which == resource.RLIMIT_NOFILE else (-1, -1),
    )
    facts, findings = results(examine_limits, case(nodes=nodes))
    assert (
        facts["ulimit -n"] == f"1024 (hard {'unlimited' if hard < 0 else hard})"
        and facts["ulimit -l"] == "unlimited"
    )
    assert [one.severity for one in findings] == ([severity] if severity else [])
    assert all("1024" in one.what and "expected 1544" in one.what for one in findings)


@pytest.mark.nightly
def test_locked_memory_must_hold_the_slots_of_a_launch_on_gpus(monkeypatch, tmp_path):
    monkeypatch.setattr(
        resource,
        "getrlimit",
        lambda which: (8 << 20, 8 << 20) if which == resource.RLIMIT_MEMLOCK else (-1, -1),
    )
    facts, (finding,) = results(examine_limits, case())
    assert facts["ulimit -l"] == "8 MiB" and finding.severity == "warning"
    assert "8 MiB" in finding.what and "1 GiB" in finding.what
    small = {"sync_bucket_mb": 4}
    assert results(examine_limits, case(values=small))[1] == []
    assert results(examine_limits, case(gpus=0))[1] == []
    model = str(model_in(tmp_path, megabytes=9))
    (finding,) = results(examine_limits, case(model=model, values=small | {"max_staleness": 1}))[1]
    assert "9 MiB" in finding.what


# ---- shared memory and disks


def free(monkeypatch, **by_folder: int) -> None:
    """Free bytes by the first word of the path; everything else has a TiB."""
    found = {f"/{name}": value for name, value in by_folder.items()}

    def size_of(path):
        return next((value for name, value in found.items() if str(path).startswith(name)), 1 << 40)

    monkeypatch.setattr(storage, "free_bytes", lambda path: (size_of(path), 1 << 40))
    monkeypatch.setattr(storage, "leftovers", lambda remove: [])


def test_shared_memory_must_hold_both_slots_and_vllms_queues(monkeypatch):
    free(monkeypatch, dev=1 << 30)
    facts, (finding,) = results(examine_shared_memory, case())
    assert facts["/dev/shm"] == "1 GiB free of 1 TiB, 1.16 GiB needed"
    assert (
        finding.severity == "error"
        and "--shm-size" in finding.cure
        and "`sync_bucket_mb`" in finding.cure
    )
    assert results(examine_shared_memory, case(values={"sync_bucket_mb": "256"}))[1] == []
    two = case(values={"sync_bucket_mb": 400}, engines=Engines(num_engines=2))
    assert len(results(examine_shared_memory, two)[1]) == 1


SMALL = {"sync_bucket_mb": 4, "max_staleness": 1}


@pytest.mark.parametrize(
    ("dev", "left", "about"),
    [
        # 40 MiB of weights with a header, 160 of vLLM's queues, and twice the weights in memory
        (201, 81, None),
        (199, 81, "/dev/shm"),
        (201, 79, "memory"),
    ],
)
def test_a_slot_for_each_bucket_that_does_not_fit_is_a_warning(
    dev, left, about, monkeypatch, tmp_path
):
    free(monkeypatch, dev=dev << 20)
    monkeypatch.setattr(memory, "memory_left", lambda: left << 20)
    model = str(model_in(tmp_path, megabytes=40))
    facts, findings = results(examine_shared_memory, case(model=model, values=SMALL))
    assert "168 MiB needed, 40 MiB for" in facts["/dev/shm"]
    assert [(one.severity, one.about) for one in findings] == (
        [("warning", about)] if about else []
    )


@pytest.mark.parametrize(
    ("changes", "megabytes"),
    [
        ({}, 40),
        ({"bf16": False, "fp16": True}, 40),
        ({"bf16": False}, 80),  # engines in float32
        ({"max_staleness": 0}, 0),
        ({"weight_transport": "nccl"}, 0),
        ({"use_peft": True}, 0),
        ({"use_peft": True, "lora_sync": "merged"}, 40),
    ],
)
def test_only_a_run_ahead_that_sends_all_weights_through_the_host_has_a_slot_for_each_bucket(
    changes, megabytes, tmp_path
):
    model = str(model_in(tmp_path, megabytes=40))
    of = case(model=model, values=SMALL | changes)
    assert models.all_slots_bytes(of) == pytest.approx(megabytes << 20, abs=1 << 10)


@pytest.mark.nightly
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
    assert chosen_interfaces("^eth0", names) == ["eth1", "ib0"] and chosen_interfaces(
        "^=eth0,ib0", names
    ) == ["eth1"]
    assert chosen_interfaces("bond0,ib", names) == ["ib0"]


def test_an_interface_that_does_not_exist_is_an_error_with_those_that_do():
    variables = {
        "NCCL_SOCKET_IFNAME": "bond7",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_DEBUG": "INFO",
        "OTHER": "1",
    }
    facts, (finding,) = results(examine_variables, case(variables))
    assert (
        facts["NCCL and gloo"] == "GLOO_SOCKET_IFNAME=lo NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=bond7"
    )
    assert "NCCL_SOCKET_IFNAME=bond7" in finding.what
    assert "lo" in finding.what and finding.severity == "error"


@pytest.mark.nightly
def test_infiniband_is_counted_by_state_and_its_absence_from_nccl_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(network, "INFINIBAND", tmp_path)
    for index, state in enumerate(["4: ACTIVE", "4: ACTIVE", "1: DOWN"]):
        port = tmp_path / f"mlx5_{index}" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    facts, findings = results(examine_variables, case())
    assert (
        facts["InfiniBand"] == "2 x 400 Gb/sec (4X NDR) ACTIVE, 1 x 400 Gb/sec (4X NDR) DOWN"
        and findings == []
    )
    _, (finding,) = results(examine_variables, case({"NCCL_IB_DISABLE": "1"}))
    assert finding.severity == "warning" and finding.cure == "unset NCCL_IB_DISABLE"


def test_the_address_of_node_0_and_the_interface_towards_it_are_shown():
    facts, findings = results(examine_address, case(address="127.0.0.1"))
    assert facts["NIC"] == "lo 127.0.0.1" and facts["network"].startswith("MTU ") and findings == []
    facts, (finding,) = results(examine_address, case(address="no-such-host.invalid"))
    assert "`main_process_ip` no-such-host.invalid" in finding.what


def test_the_address_of_node_0_belongs_to_rank_0(monkeypatch):
    monkeypatch.setattr(
        network, "nics", lambda: [network.Nic("lo", "127.0.0.1"), network.Nic("eth0", "10.0.0.5")]
    )
    monkeypatch.setattr(network, "route_to", lambda address: "10.0.0.5")
    assert results(examine_address, case(address="10.0.0.5"))[1] == []
    _, (finding,) = results(examine_address, case(address="10.0.0.5", rank=3))
    assert finding.severity == "error" and "machine_rank 3" in finding.what
    _, (finding,) = results(examine_address, case(address="10.0.0.9"))
    assert finding.severity == "warning" and "machine_rank 0" in finding.what
    assert results(examine_address, case(address="10.0.0.9", rank=3))[1] == []
    # all nodes are this machine
    assert results(examine_address, case(address="127.0.0.1", rank=3))[1] == []


@pytest.mark.nightly
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
    # as torch asks, not as `ping` does
    assert "RES_OPTIONS" in finding.cure and set(asked) == {"::ffff:127.0.0.1"}
    facts, findings = results(examine_names, case(address="127.0.0.1"))
    assert facts == {"name of this address": "quick or unknown"} and findings == []


@pytest.mark.nightly
def test_a_slow_interface_is_a_warning(monkeypatch):
    state = psutil.net_if_stats()["lo"]._replace(speed=1000)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {"lo": state})
    _, (finding,) = results(examine_address, case())
    assert finding.severity == "warning" and "lo has 1 Gbit/s (expected 10" in finding.what


def test_a_host_name_on_loopback_is_an_error_where_gloo_connects_nodes(monkeypatch):
    monkeypatch.setattr(network, "route_to", lambda address: "10.0.0.5")
    monkeypatch.setattr(
        network, "nics", lambda: [network.Nic("lo", "127.0.1.1"), network.Nic("ib0", "10.0.0.5")]
    )
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    _, (finding,) = results(examine_variables, case(gpus=0, ranks=2, address="10.0.0.1"))
    assert finding.severity == "error" and "export GLOO_SOCKET_IFNAME=ib0" in finding.cure
    assert results(examine_variables, case(address="10.0.0.1"))[1][0].severity == "warning"
    assert (
        results(examine_variables, case({"GLOO_SOCKET_IFNAME": "ib0"}, gpus=0, address="10.0.0.1"))[
            1
        ]
        == []
    )
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.5")
    assert results(examine_variables, case(gpus=0, address="10.0.0.1"))[1] == []


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
    # errors first
    assert [one.severity for one in report.findings] == [
        "error",
        "warning",
        "warning",
    ]
    assert "PermissionError: no look" in report.findings[1].what


def test_a_report_leaves_its_node_without_the_secrets_of_the_node():
    def examine_secrets(_):
        yield Fact("x", "it is correct-horse")
        yield Finding("error", "x", "pid 7 (`train.py correct-horse`) is here", "c")

    report = examine(case({"MY_TOKEN": "correct-horse"}, gpus=0, ranks=1), (examine_secrets,))
    assert (
        report.facts[0].value == "it is (hidden)" and "correct-horse" not in report.findings[0].what
    )


def test_all_examinations_work_on_this_machine():
    report = examine(case(gpus=0, ranks=1), EXAMINATIONS)
    assert not any("could not be examined" in finding.what for finding in report.findings), (
        report.findings
    )
    assert {"GPUs", "cores", "/dev/shm", "NIC", "versions", "model"} <= {
        fact.name for fact in report.facts
    }
    assert report.nic == "lo" and report.host == socket.gethostname()
