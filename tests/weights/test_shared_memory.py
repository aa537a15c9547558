"""Shared memory is reserved, not compared: a second run on the node gets an error, and never a SIGBUS."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from forks import forked

from multinode_kit.models import tiny_qwen2, tiny_tokenizer
from trl_multinode.config import MultiNodeGRPOConfig
from trl_multinode.engine.group import EngineGroup
from trl_multinode.errors import WeightSyncError
from trl_multinode.host import NodeHost
from trl_multinode.transports import host_memory
from trl_multinode.transports.base import SlotSettings
from trl_multinode.transports.host_memory import PAGE, HostSlots
from trl_multinode.weights.buckets import WeightMeta, plan_buckets, slot_layout
from trl_multinode.weights.transport import Transport

pytestmark = pytest.mark.real  # it mounts a file system
MIB = 1 << 20
# 1.5 MiB
MODEL = [
    WeightMeta("embed", torch.float32, (3 * MIB // 8,)),
    WeightMeta("norm", torch.float32, (8,)),
]
LAYOUTS = [slot_layout(bucket) for bucket in plan_buckets(MODEL, MIB)]


@pytest.fixture
def four_mib(tmp_path, monkeypatch):
    """A /dev/shm of 4 MiB."""
    folder = tmp_path / "shm"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    monkeypatch.setattr(host_memory, "SHARED_MEMORY", folder)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_two_runs_that_share_the_memory_do_not_share_its_last_bytes(tmp_path, four_mib):
    def body(rank: int) -> str:
        # both fitted when the free bytes were only compared
        first = HostSlots([3 * MIB // 2] * 2, SlotSettings())
        try:
            second = HostSlots([MIB] * 2, SlotSettings())
        except WeightSyncError as error:
            return str(error)
        for slot in (*first.memory, *second.memory):
            slot.fill_(1)
        return "both were filled"

    with forked(body, 1, tmp_path) as (rank,):
        assert rank.wait() == 0, "SIGBUS is -7"
        assert re.search(r"1 MiB free of 4 MiB.* 2 slots of 1 MiB .* 2 MiB", rank.result), (
            rank.result
        )


def test_memory_is_reserved_before_the_engines_start_and_nothing_is_left_if_they_do_not(four_mib):
    transport = Transport("host")
    transport.reserve(LAYOUTS)
    with pytest.raises(WeightSyncError, match=r" 0\.9961 MiB free"):
        HostSlots([MIB] * 2, SlotSettings())
    assert list(four_mib.iterdir()) == []  # no name, so nothing is left by a rank that is killed
    transport.close()
    HostSlots([MIB] * 2, SlotSettings()).close()


def test_slots_take_the_reserved_memory(four_mib):
    transport = Transport("host")
    transport.reserve(LAYOUTS)
    slots = transport.open_on_host(EngineGroup(), LAYOUTS)
    # the slots' marks take a page
    assert slots.sizes == (3 * MIB // 2,) * 2 and free(four_mib) == MIB - PAGE
    transport.close()  # the reservation is gone already
    assert free(four_mib) == MIB - PAGE
    slots.close()


@pytest.mark.fault("36")
def test_a_tensor_that_fills_a_slot_is_named_with_the_cures(four_mib):
    held = HostSlots([MIB] * 2, SlotSettings())
    with pytest.raises(WeightSyncError) as error:
        Transport("host").reserve(LAYOUTS)
    Transport("nccl").reserve(LAYOUTS)  # it needs none
    held.close()
    text = str(error.value)
    assert re.search(
        r"2 slots of 1\.5 MiB .* 3 MiB.* embed .* 1\.5 MiB.*`sync_bucket_mb`.*--shm-size", text
    ), text


@pytest.mark.fault("36")
def test_a_run_finds_a_full_memory_before_it_starts_an_engine(four_mib, tmp_path):
    held = HostSlots([3 * MIB // 2] * 2, SlotSettings())  # of another run
    host = NodeHost(
        MultiNodeGRPOConfig(
            str(tmp_path / "run"), use_cpu=True, bf16=False, engine_kwargs={"dtype": "float32"}
        )
    )
    with pytest.raises(WeightSyncError, match=r"1 MiB free of 4 MiB.*`sync_bucket_mb`"):
        host.start_engines(tiny_qwen2(), tiny_tokenizer(), {"max_num_seqs": 8})
    assert host.updates._fleet._processes == []
    host.close()
    held.close()


def free(folder: Path) -> int:
    return shutil.disk_usage(folder).free
