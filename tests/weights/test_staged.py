"""A slot for each bucket: training does not wait for the engines' loads, and a new engine loads from there."""

import os
import threading
import time
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from forks import even_nodes, on_gloo_ranks
from peft import LoraConfig, get_peft_model
from served import Keeper, digest, serving
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from waiting import HANG_S, until

from multinode_kit.models import tiny_qwen2
from trl_multinode.engine.client import EngineClient
from trl_multinode.engine.group import EngineGroup
from trl_multinode.errors import EngineError, WeightSyncError
from trl_multinode.run import memory
from trl_multinode.run.memory import memory_left
from trl_multinode.transports.host_memory import HostSlots
from trl_multinode.weights.building import SyncPlan, reserve_slots, stages
from trl_multinode.weights.gathering import ShardGather
from trl_multinode.weights.peft_source import AdapterSource, PeftSource
from trl_multinode.weights.source import ModuleSource, WeightSource
from trl_multinode.weights.sync import WeightSync
from trl_multinode.weights.transport import Transport
from trl_multinode.wire.messages import WeightVersion

LIMIT = 40_000  # bytes of a bucket; a layer is split over two


def sent(source: WeightSource) -> dict[str, torch.Tensor]:
    """Return what a sync of everything would send now."""
    metadata = tuple(source.metadata())
    with source.gathering(metadata) as finish:
        found = zip(metadata, finish(), strict=True)
        return {meta.name: pieces.copy().to(meta.dtype).clone() for meta, pieces in found}


def take_part(source: WeightSource) -> None:
    """Let the local main processes gather what a sync would send."""
    with source.gathering(tuple(source.metadata())) as finish:
        finish()


@torch.no_grad()
def train(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter) * 0.2)


def staged_sync(source: WeightSource, engines, folder) -> WeightSync:
    return WeightSync(source, engines, LIMIT, Transport(folder=folder, staged=True))


@pytest.mark.parametrize(
    ("source_class", "dtype"), [(ModuleSource, torch.bfloat16), (PeftSource, torch.float32)]
)
def test_the_slots_have_the_last_sent_weights_whole(source_class, dtype, tmp_path):
    model = tiny_qwen2()
    if source_class is PeftSource:
        model = get_peft_model(
            model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
        ).get_base_model()
    source, running, again = source_class(model, dtype), Keeper(), Keeper()
    with serving(running, again, folder=tmp_path) as engines:
        sync = staged_sync(source, EngineGroup([engines[0]]), tmp_path)
        for update in (1, 2, 3):
            train(model)
            timings = sync.run(WeightVersion(update, update))
        expected = digest(sent(source))
        sizes = sync.slots.sizes
        assert len(sizes) == len(sync.buckets) and sum(sizes) < 1.01 * timings.num_bytes
        train(model)  # the slots do not change with the model
        timings = sync.load_again(WeightVersion(3, 3), EngineGroup([engines[1]]))
        assert digest(again.tensors) == digest(running.tensors) == expected
        assert timings.num_buckets == len(sync.buckets)
        sync.run(WeightVersion(4, 4))
        sync.settle()
        assert digest(running.tensors) == digest(sent(source))
        sync.close()


def test_an_engine_loads_beside_training_and_the_next_update_waits_for_it(tmp_path):
    go, started = threading.Event(), threading.Event()

    def held(update: int, bucket: int) -> None:
        if update == 2 and bucket == 1:
            started.set()
            assert go.wait(HANG_S)

    settling, settle = threading.Event(), WeightSync.settle

    def seen(sync: WeightSync) -> dict[str, float]:
        settling.set()
        return settle(sync)

    model, engine = tiny_qwen2(), Keeper(held)
    source = ModuleSource(model, torch.float32)
    with serving(engine, folder=tmp_path) as engines:
        sync = staged_sync(source, engines, tmp_path)
        sync.run(WeightVersion(1, 1))
        second = sent(source)
        sync.run(WeightVersion(2, 2))  # returns, although the engine hangs
        assert started.wait(HANG_S)
        assert max(update for update, _ in engine.loaded) == 2
        train(model)
        writes = mock.Mock(side_effect=HostSlots.write)
        with (
            mock.patch.object(WeightSync, "settle", seen),
            mock.patch.object(HostSlots, "write", lambda *args: writes(*args)),
        ):
            third = threading.Thread(target=sync.run, args=(WeightVersion(3, 3),))
            third.start()
            assert settling.wait(HANG_S)
            # it would overwrite what the engine still reads
            assert not writes.called and engine.loaded[-1] == (2, 0)
            go.set()
            third.join(HANG_S)
            assert writes.called
        sync.settle()
        assert digest(engine.tensors) == digest(sent(source)) != digest(second)
        sync.close()


def test_engines_get_the_request_after_the_last_bucket_is_in_its_slot(tmp_path):
    order: list[str] = []
    write, post = HostSlots.write, EngineClient.post

    def recorded_write(slots, slot, *rest):
        order.append(f"write {slot}")
        return write(slots, slot, *rest)

    def recorded_post(client, message):
        order.append(type(message).__name__)
        return post(client, message)

    with serving(Keeper(), folder=tmp_path) as engines:
        sync = staged_sync(ModuleSource(tiny_qwen2(), torch.float32), engines, tmp_path)
        with (
            mock.patch.object(HostSlots, "write", recorded_write),
            mock.patch.object(EngineClient, "post", recorded_post),
        ):
            sync.run(WeightVersion(1, 1))
        slots = [f"write {index}" for index in range(len(sync.buckets))]
        assert len(slots) > 2 and order == ["OpenSlots", *slots, "UpdateWeights"]
        sync.settle()
        sync.close()


def test_an_error_of_a_load_beside_training_names_its_update_in_the_next_one(tmp_path):
    def failing(update: int, bucket: int) -> None:
        if (update, bucket) == (2, 3):
            raise RuntimeError("a worker has no room")

    with serving(Keeper(failing), folder=tmp_path) as engines:
        sync = staged_sync(ModuleSource(tiny_qwen2(), torch.float32), engines, tmp_path)
        sync.run(WeightVersion(1, 1))
        sync.run(WeightVersion(2, 2))
        with pytest.raises(EngineError, match="no room") as error:
            sync.run(WeightVersion(3, 3))
        assert "update 2 (step 2)" in error.value.__notes__[0]
        sync.close()


def test_slots_of_another_version_are_not_loaded(tmp_path):
    with serving(Keeper(), folder=tmp_path) as engines:
        sync = staged_sync(ModuleSource(tiny_qwen2(), torch.float32), engines, tmp_path)
        # the first update sends everything
        assert sync.load_again(WeightVersion(), engines).num_buckets == 0
        sync.run(WeightVersion(1, 0))
        with pytest.raises(WeightSyncError, match=r"update 1 \(step 0\).* update 2 \(step 1\)"):
            sync.load_again(WeightVersion(2, 1), engines)
        sync.close()


@pytest.mark.parametrize(("sharded", "turns"), [(True, True), (False, True), (False, False)])
def test_ranks_of_a_node_copy_by_turns_and_only_after_its_engines_have_loaded(
    sharded, turns, tmp_path
):
    nodes, ranks_per_node, updates = 2 if sharded else 1, 2, 3

    def body(rank: int) -> tuple[list[int], list[bool]]:
        gather = ShardGather(torch.device("cpu"), even_nodes(ranks_per_node))
        main, others = gather.is_local_main, tmp_path / "others"
        model = tiny_qwen2()
        source = ModuleSource(model, torch.float32, gather)
        if sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (nodes * ranks_per_node,)))

        def slow(update: int, bucket: int) -> None:
            if update == 2 and bucket == 0:
                until(others.exists, "the other rank is in update 3")

        times, slots, write, settle = [], [], HostSlots.write, WeightSync.settle

        def recorded_write(memory, slot, *rest):
            slots.append(slot)
            times.append(("write", time.monotonic()))
            if not main and slot + ranks_per_node >= len(memory.sizes):
                # the last one of this rank: an engine that does not wait for it has other bytes
                time.sleep(0.1)
            return write(memory, slot, *rest)

        def recorded_settle(sync):
            found = settle(sync)
            times.append(("settled", time.monotonic()))
            return found

        equal = []
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(HostSlots, "write", recorded_write))
            stack.enter_context(mock.patch.object(WeightSync, "settle", recorded_settle))
            engine, folder = Keeper(slow), tmp_path / f"rank{rank}"
            engines = stack.enter_context(serving(engine, folder=folder)) if main else None
            sync = staged_sync(source, engines, folder)
            if main:
                sync._transport.reserve(sync.layouts)
            place = gather.meet(*sync._transport.reserved_at)
            assert main or sync.join(place)
            sync.takes_turns = turns
            for update in range(1, updates + 1):
                torch.manual_seed(update + (rank if sharded else 0))
                train(model)
                expected = sent(source) if main or not sharded else take_part(source)
                source.release()
                times.clear()
                slots.clear()
                if update == updates and not main:
                    others.touch()
                sync.run(WeightVersion(update, update))
                if update != updates - 1:
                    sync.settle()
                    equal.append(not main or digest(engine.tensors) == digest(expected))
            sync.close()
        first = next((at for what, at in times if what == "write"), float("inf"))
        settled = next(at for what, at in times if what == "settled")
        return slots, equal, first, settled, len(sync.buckets)

    found = on_gloo_ranks(body, nodes * ranks_per_node, tmp_path)
    for rank, (slots, equal, first, _, buckets) in enumerate(found):
        local, main = rank % ranks_per_node, rank - rank % ranks_per_node
        mine = range(local, buckets, ranks_per_node) if turns else range(buckets * (local == 0))
        assert slots == list(mine) and buckets > ranks_per_node
        assert equal == [True] * (updates - 1)
        # of its own node's engines, and all ranks of a machine have one clock
        assert first > found[main][3]


def test_a_rank_opens_no_other_file_and_leaves_the_copies_to_the_local_main_process(tmp_path):
    """In a container of its own the number of a process is that of another one, or of none."""
    lines, path = [], tmp_path / "another file"
    path.write_bytes(b"not ours")
    sync = WeightSync(
        ModuleSource(tiny_qwen2(), torch.float32),
        None,
        LIMIT,
        Transport(staged=True, report=lines.append),
    )
    with path.open("r+b") as file:
        found = os.fstat(file.fileno())
        assert not sync.join((os.getpid(), file.fileno(), found.st_dev, found.st_ino + 1))
    assert not sync.join((2**30, 3, found.st_dev, found.st_ino))
    assert path.read_bytes() == b"not ours" and len(lines) == 2


# ---- which runs have it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "ahead", "agents", "plan", "expected"),
    [
        ("host", True, False, SyncPlan(ModuleSource), True),
        ("host", True, False, SyncPlan(PeftSource), True),
        ("host", False, False, SyncPlan(ModuleSource), False),
        ("nccl", True, False, SyncPlan(ModuleSource), False),
        ("host", True, False, SyncPlan(AdapterSource, lora_rank=4), False),
        # agents pull from the slots
        ("host", False, True, SyncPlan(AdapterSource, lora_rank=4), True),
    ],
)
def test_runs_that_generate_ahead_have_a_slot_for_each_bucket(kind, ahead, agents, plan, expected):
    assert stages(plan, Transport(kind), ahead, agents) is expected


@pytest.mark.parametrize(("left", "staged"), [(1 << 40, True), (1 << 10, False)])
def test_without_memory_for_all_buckets_two_slots_are_reserved_and_the_reason_is_returned(
    left, staged, monkeypatch
):
    monkeypatch.setattr(memory, "memory_left", lambda: left)
    transport = Transport(staged=True)
    source = ModuleSource(tiny_qwen2(), torch.float32)
    buckets = WeightSync(source, None, LIMIT).buckets
    monkeypatch.setattr(ModuleSource, "buckets", lambda self, limit: buckets)
    reason = reserve_slots(source, LIMIT, transport)
    assert transport.staged is staged and (reason is None) == staged
    assert len(transport._reserved.sizes) == (len(buckets) if staged else 2)
    transport.close()


def test_the_limit_of_a_container_counts_without_what_the_kernel_may_drop(tmp_path):
    machine = memory_left(tmp_path)
    for name, text in {
        "memory.max": f"{3 << 20}\n",
        "memory.current": f"{2 << 20}\n",
        "memory.stat": f"anon 5\ninactive_file {1 << 19}\nslab 7\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert memory_left(tmp_path) == 3 << 19
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_left(tmp_path) > machine / 2
