"""Tensors above the limit of a bucket are sent in ranges: bit for bit, and never half a tensor."""

import random

import pytest
import torch
from forks import even_nodes, on_gloo_ranks
from memory import MIB
from received import received
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from trl_multinode.errors import WeightSyncError
from trl_multinode.transports.pieces import GrowingTensor
from trl_multinode.weights.buckets import WeightMeta, cut_into_ranges, plan_buckets, slot_layout
from trl_multinode.weights.gathering import ShardGather
from trl_multinode.weights.source import ModuleSource
from trl_multinode.wire.messages import TensorSpec

CPU = torch.device("cpu")


def ranges_of(
    shape: tuple[int, ...], limit: int, world: int, dtype=torch.float32
) -> list[WeightMeta]:
    return cut_into_ranges(WeightMeta("w", dtype, shape, divisible=True), limit, world)


def test_ranges_hold_every_element_once_and_are_below_the_limit():
    choose = random.Random(0)
    for _ in range(300):
        world, numel = choose.randint(1, 9), choose.randint(1, 3000)
        limit = choose.randint(4 * world, 5000)
        metas = ranges_of((numel,), limit, world)
        if metas[0].range is None:
            assert 4 * numel <= limit and len(metas) == 1
            continue
        found = [
            i
            for meta in metas
            for first, end in meta.range.intervals(numel)
            for i in range(first, end)
        ]
        assert sorted(found) == list(range(numel))
        assert (
            all(0 < meta.num_bytes <= limit for meta in metas[:-1]) and metas[-1].num_bytes <= limit
        )
        assert sum(meta.num_bytes for meta in metas) == 4 * numel
        assert [meta.range.is_first for meta in metas] == [True] + [False] * (len(metas) - 1)
        assert [meta.range.is_last for meta in metas] == [False] * (len(metas) - 1) + [True]


def test_the_ranges_of_a_large_tensor_are_about_equal_and_aligned():
    # Qwen3's embedding on 64 nodes of 7 ranks
    metas = ranges_of((151936, 4096), 512 * MIB, 448, torch.bfloat16)
    assert len(metas) == 3 and min(meta.num_bytes for meta in metas) > 0.98 * max(
        meta.num_bytes for meta in metas
    )
    assert all(meta.range.first % 32 == 0 for meta in metas)


def test_only_a_divisible_tensor_is_cut_and_small_neighbours_still_share_a_bucket():
    metadata = [
        WeightMeta("large", torch.float32, (1000,)),
        WeightMeta("layers.0.w", torch.float32, (3,)),
    ]
    assert [len(bucket) for bucket in plan_buckets(metadata, 400, world=2)] == [1, 1]
    metadata[0] = WeightMeta("large", torch.float32, (1000,), divisible=True)
    buckets = plan_buckets(metadata, 400, world=2)
    assert len(buckets) == 11 and {meta.name for bucket in buckets[:-1] for meta in bucket} == {
        "large"
    }
    assert slot_layout(buckets[0])[0].shape_in_slot == (buckets[0][0].num_bytes // 4,)


# ---- gathered from every kind of model


class Model(nn.Module):
    def __init__(self, rows: int):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.Parameter(torch.randn(rows, 61))
        self.norm = nn.Parameter(torch.randn(5))
        self.register_buffer("table", torch.arange(700))


def joined(source: ModuleSource, limit: int) -> dict[str, torch.Tensor]:
    assert sum(meta.range is not None for bucket in source.buckets(limit) for meta in bucket) > 1
    found = received(source, limit, source.gather.is_local_main)
    assert not source._held
    return found


def equal(found: dict[str, torch.Tensor], model: nn.Module) -> bool:
    expected = {
        name: t.detach().bfloat16() if t.is_floating_point() else t
        for name, t in model.state_dict().items()
    }
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in found
    )


@pytest.mark.parametrize("limit", [100, 5000])
def test_fsdp2_whose_rows_do_not_divide_and_plain_modules_send_the_same_bits(limit, tmp_path):
    def body(rank: int) -> list[bool]:
        gather, mesh = ShardGather(CPU, even_nodes(2)), init_device_mesh("cpu", (6,))
        right = [
            rank % 2 == 1
            or equal(joined(ModuleSource(Model(60), torch.bfloat16, gather), limit), Model(60))
        ]
        for rows in (1, 4, 5, 6, 7, 60) if limit < 5000 else (60,):
            model = Model(rows)
            source = ModuleSource(model, torch.bfloat16, gather)
            fully_shard(model, mesh=mesh)
            found = joined(source, min(limit, rows * 30))
            right.append(rank % 2 == 1 or equal(found, Model(rows)))
        return right

    assert all(all(found) for found in on_gloo_ranks(body, 6, tmp_path))


@pytest.mark.nightly  # FSDP2 over two dimensions
def test_a_tensor_that_its_own_library_gathers_is_gathered_once_for_all_ranges(tmp_path):
    def body(rank: int) -> list:
        model, gathers = Model(40), []
        source = ModuleSource(model, torch.bfloat16, ShardGather(CPU, even_nodes(2)))
        fully_shard(
            model, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
        )
        real = DTensor.full_tensor
        DTensor.full_tensor = lambda tensor: gathers.append(tensor.shape) or real(tensor)
        left, counts, release = [], [], source.release
        source.release = lambda: (
            left.extend(source._held),
            counts.append(source.gather.across),
            release(),
        )
        found = joined(source, 700)
        DTensor.full_tensor = real
        return [len(gathers), sum(counts), rank == 1 or equal(found, Model(40)), left]

    # a rank without engines that kept the tensors until the end of the sync would hold those of all layers
    assert on_gloo_ranks(body, 2, tmp_path) == [[2, 2, True, []]] * 2


def test_a_model_that_was_resized_is_refused_before_a_collective_hangs():
    model = Model(40)
    source = ModuleSource(model, torch.bfloat16)
    buckets = plan_buckets(source.metadata(), 700)
    model.experts = nn.Parameter(torch.randn(41, 61))
    with pytest.raises(WeightSyncError, match=r"experts .*\(41, 61\).*\(40, 61\)"):
        source.gathering(buckets[0]).__enter__()


# ---- joined in a worker


def test_half_a_tensor_of_a_failed_update_does_not_survive_and_gaps_are_errors():
    first, second, third = slot_layout(tuple(ranges_of((90,), 128, 1)))
    whole, growing = torch.arange(90.0), GrowingTensor(CPU)

    def add(spec: TensorSpec, data: torch.Tensor) -> torch.Tensor | None:
        (interval,) = spec.range.intervals(90)
        return growing.add(spec, spec.range, data[slice(*interval)])

    assert add(first, -whole) is None and add(second, -whole) is None
    assert add(first, whole) is None  # the next update
    with pytest.raises(RuntimeError, match="of w .* 64 .* of w .* 32"):
        add(third, whole)
    assert add(second, whole) is None
    assert add(third, whole).tolist() == whole.tolist()
    with pytest.raises(RuntimeError, match="of w .* 32 "):
        add(second, whole)


def test_buckets_on_a_gpu_leave_room_for_the_copy_that_pytorch_makes_on_the_way_to_host_memory(
    tmp_path,
):
    def body(rank: int) -> list[float]:
        devices = [torch.device(device) for device in ("cpu", "cuda")]
        return [
            ShardGather(device, nodes).buckets_at_peak
            for nodes in ([2, 2], [1] * 4, [1, 3])
            for device in devices
        ]

    assert on_gloo_ranks(body, 4, tmp_path) == [[4.5, 5.5, 5.5, 6.5, 5.5, 6.5]] * 4
