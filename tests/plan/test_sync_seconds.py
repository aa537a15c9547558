"""The formula of a sync's seconds: units, limits, and that more hardware or fewer bytes never take longer."""

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from trl_multinode.tools.plan.sync_seconds import (
    BUCKET,
    TRANSPORTS,
    Rates,
    Sync,
    load_seconds,
    pause_seconds,
    pipelined,
    projected,
    stage_seconds,
)

# test_plan_command.py compares the numbers of docs/operate/sizing.md, which change with each formula
pytestmark = pytest.mark.nightly
GB = 1e9
RATES = Rates(nic=50 * GB, locked=40 * GB, pageable=10 * GB, nvlink=300 * GB, device=1250 * GB, pack=200 * GB,
              hop_s=0.0, call_s=0.0)  # fmt: skip
SYNC = Sync(80 * GB, nodes=4)


def test_a_stage_takes_bytes_divided_by_bytes_per_second():
    stages = stage_seconds(SYNC, RATES)
    # three quarters of the model are elsewhere
    assert stages["across"] == pytest.approx(0.75 * 80 / (50 * 0.92))
    # one of seven ranks has its own part
    assert stages["within"] == pytest.approx(6 / 7 * 80 / 300)
    assert stages["copy"] == pytest.approx(80 / 40)
    assert stages["load"] == pytest.approx(80 / 40 + 80 / 1250)
    assert stages["commit"] == pytest.approx(80 / 200)


def test_each_transport_has_its_own_way_into_the_engines():
    ipc = stage_seconds(replace(SYNC, transport="ipc", workers=4, tensor_parallel=4), RATES)
    assert ipc["copy"] == pytest.approx(80 / 1250)
    # four workers read from one GPU
    assert ipc["load"] == pytest.approx(4 * 80 / 300 + 80 / 4 / 1250)
    assert ipc["commit"] == pytest.approx(80 / 4 / 200)
    nccl = stage_seconds(replace(SYNC, transport="nccl", workers=4, tensor_parallel=4), RATES)
    assert nccl["copy"] == pytest.approx(80 / 1250 + 80 / 300)
    # one broadcast reaches all
    assert nccl["load"] == pytest.approx(80 / 300 + 80 / 1250 + 80 / 4 / 1250)


def test_the_slowest_stage_counts_in_full_and_the_others_with_one_bucket():
    assert pipelined((3.0, 8.0, 1.0), buckets=4) == 8.0 + 4.0 / 4
    assert pipelined((3.0, 8.0, 1.0), buckets=1) == 12.0  # nothing overlaps
    stages = stage_seconds(SYNC, RATES)
    commit = stages.pop("commit")
    slowest, rest = max(stages.values()), sum(stages.values()) - max(stages.values())
    assert projected(SYNC, RATES) == pytest.approx(slowest + rest / (80 * GB / BUCKET) + commit)


def test_with_a_slot_for_each_bucket_training_waits_for_seven_copies_at_a_time_and_for_no_load():
    ranks, across = SYNC.ranks, 0.75 * 80 / (7 * 50 * 0.92)
    within, copy = 6 / 7 * 80 / 300 / ranks, 80 / 40 / ranks
    sync = replace(SYNC, rails=7)
    fast = replace(RATES, host_memory=inf)
    one_bucket = ranks / sync.buckets
    assert pause_seconds(sync, fast) == pytest.approx(copy + (across + within) * one_bucket)
    slow = replace(RATES, host_memory=100 * GB)
    assert pause_seconds(sync, slow) == pytest.approx(80 / 100 + (across + within) * one_bucket)
    # one NIC is slower than seven links to host memory
    across *= 7
    assert pause_seconds(SYNC, fast) == pytest.approx(across + (copy + within) * one_bucket)
    stages = stage_seconds(SYNC, RATES)
    assert load_seconds(SYNC, RATES) == stages["load"] + stages["commit"]


def test_a_model_of_one_bucket_has_one_copy_at_a_time():
    sync, rates = Sync(BUCKET, nodes=1), replace(RATES, host_memory=inf)
    stages = stage_seconds(sync, rates)
    assert pause_seconds(sync, rates) == pytest.approx(stages["within"] + stages["copy"])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_with_an_infinite_nic_the_number_of_nodes_does_not_matter(transport):
    rates, sync = replace(RATES, nic=inf), replace(SYNC, transport=transport)
    assert stage_seconds(sync, rates)["across"] == 0.0
    assert projected(sync, rates) == projected(replace(sync, nodes=128), rates)
    assert projected(sync, rates) == projected(replace(sync, nodes=1), rates)


def test_a_side_without_page_locks_bounds_the_copies_through_host_memory():
    slow = [
        projected(replace(SYNC, sender_locked=a, worker_locked=b))
        for a, b in ((True, False), (False, True))
    ]
    assert min(slow) > 80 / 10 > projected(SYNC)
    # the sides overlap
    assert projected(replace(SYNC, sender_locked=False, worker_locked=False)) < 80 / 10 * 1.2
    other = replace(SYNC, transport="nccl")
    assert projected(other) == projected(replace(other, sender_locked=False, worker_locked=False))


def test_a_measured_cell_waits_for_its_largest_bucket(monkeypatch):
    """By hand: a link of 0.5 x 100 MB / 50 MB/s = 1 s and a copy of 0.5 s hide behind a load of 2 s, except for the
    largest bucket, a quarter of the bytes; the commit takes 0.1 s."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    from projection import Cell, seconds

    assert seconds(Cell(100e6, 2, 25e6, 50e6, (5e-9, 20e-9), 1e-9)) == pytest.approx(
        2 + 1.5 / 4 + 0.1
    )


def test_what_does_not_depend_on_bytes_counts_per_bucket_hop_and_call():
    rates, sync = replace(RATES, hop_s=1e-3, call_s=1e-4), Sync(4 * BUCKET, nodes=11, calls=3000)
    base, more = stage_seconds(sync, RATES), stage_seconds(sync, rates)
    assert more["across"] - base["across"] == pytest.approx(4 * 10 * 1e-3)
    assert more["load"] - base["load"] == pytest.approx(0.3)
