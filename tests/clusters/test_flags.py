"""Rank and address of a launch from the variables that each scheduler sets."""

import re

import pytest

from trl_multinode.tools.launch import node_flags

STEP = {"SLURM_NODEID": "1", "SLURM_LOCALID": "0", "SLURM_NNODES": "3", "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "gpu-[007-008]", "SLURM_JOB_NODELIST": "gpu-[006-008]"}  # fmt: skip
POD = {"PET_NODE_RANK": "3", "PET_MASTER_ADDR": "grpo-node-0-0.grpo", "PET_MASTER_PORT": "29400", "PET_NNODES": "4",
       "PET_NPROC_PER_NODE": "auto", "JOB_COMPLETION_INDEX": "3"}  # fmt: skip
SKY = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.9",
    "SKYPILOT_NUM_NODES": "2",
}


@pytest.mark.parametrize(
    ("environment", "rank", "address"),
    [
        (STEP, 1, "gpu-007"),
        ({"SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "big"}, 0, "big"),
        (POD, 3, "grpo-node-0-0.grpo"),
        (SKY, 1, "10.0.0.4"),
        (STEP | SKY, 1, "10.0.0.4"),
        (POD | STEP, 3, "grpo-node-0-0.grpo"),
    ],
)
def test_a_scheduler_names_this_node_and_node_0(environment, rank, address):
    assert node_flags.node_flags(environment) == (rank, address)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "scheduler"),
        (STEP | {"SLURM_LOCALID": "2"}, "got SLURM_LOCALID=2"),
        (STEP | {"SLURM_STEP_NODELIST": ""}, "SLURM_NNODES=3"),
        (STEP | {"SLURM_NODEID": "2"}, "got '2', expected 0 to 1"),
        (POD | {"PET_MASTER_ADDR": ""}, "PET_MASTER_ADDR"),
        (POD | {"PET_NNODES": "1:3"}, "got '3', expected 0 to 2"),
        (SKY | {"SKYPILOT_NODE_IPS": "\n"}, "SKYPILOT_NODE_IPS"),
        ({"JOB_COMPLETION_INDEX": "x"}, "got 'x'"),
    ],
)
def test_missing_or_wrong_variables_are_named(environment, message):
    with pytest.raises(node_flags.FlagsError, match=re.escape(message)):
        node_flags.node_flags(environment)


@pytest.mark.nightly
def test_pods_of_an_indexed_job_find_pod_0_by_its_name(monkeypatch):
    name = "grpo-12.grpo.team.svc.cluster.local"
    found = node_flags._indexed_job({"JOB_COMPLETION_INDEX": "12"}, lambda: name)
    assert found == (12, "grpo-0.grpo.team.svc.cluster.local")
    for bare in ("grpo-12", "other.grpo.team"):
        with pytest.raises(node_flags.FlagsError, match="`subdomain`"):
            node_flags._indexed_job({"JOB_COMPLETION_INDEX": "12"}, lambda name=bare: name)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a,b", "a"), ("a[3]", "a3"), ("a[1-4,9],b", "a1"), ("a[09-10]", "a09"), ("r[2-3]n[04,7]", "r2n04"),
        ("a[1,3]-ib,c", "a1-ib"), ("gpu-a-[007-012,020],big1", "gpu-a-007"),
    ],
)  # fmt: skip
def test_the_first_host_of_slurms_list(nodes, first):
    assert node_flags.first_host(nodes) == first
