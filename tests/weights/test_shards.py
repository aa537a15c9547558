"""Shards of ZeRO-3 and FSDP2 become the same tensors, bit for bit, with one collective across nodes a bucket."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from forks import even_nodes, on_gloo_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard as Sharded
from torch.distributed.tensor import distribute_tensor

from trl_multinode.weights import even_pieces
from trl_multinode.weights.even_pieces import all_of, evened
from trl_multinode.weights.gathering import Gathering, ShardGather
from trl_multinode.weights.shards import Shard, shard_of
from trl_multinode.weights.source import ModuleSource
from trl_multinode.wire.messages import TensorRange

CPU = torch.device("cpu")
SHAPES = [(7, 3), (5,), (1,), (64, 2), (2, 3, 4)]  # most do not divide by the number of ranks


def full_tensors(dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype) for shape in SHAPES
    ]


def zero3_piece(tensor: torch.Tensor, rank: int, world: int) -> Shard:
    """As DeepSpeed cuts: equal pieces of the flattened tensor, the last padded with whatever is there."""
    elements = -(-tensor.numel() // world)
    padded = torch.full((world * elements,), float("nan"), dtype=tensor.dtype)
    padded[: tensor.numel()] = tensor.flatten()
    piece = padded[rank * elements : (rank + 1) * elements]
    return Shard(piece, tuple(tensor.shape), all_of(world, elements))


@pytest.mark.parametrize("nodes", [[1], [3], [1, 1], [2, 2], [2, 2, 2]], ids=str)
@pytest.mark.parametrize("travels_as", [torch.float32, torch.bfloat16])
def test_pieces_of_all_ranks_are_the_tensor_on_every_local_main_process(
    nodes, travels_as, tmp_path
):
    world, ranks_per_node = sum(nodes), nodes[0]

    def body(rank: int) -> list[bool] | None:
        counted = count_collectives()
        gather = ShardGather(torch.device("cpu"), nodes)
        shards = [zero3_piece(tensor, rank, world) for tensor in full_tensors()]
        pieces = Gathering(gather, shards, [travels_as] * len(shards)).wait()
        expected = [int(len(nodes) > 1), int(ranks_per_node > 1)]
        assert counted == expected == [gather.across, gather.within]
        if rank % ranks_per_node:
            assert all(piece.data.numel() == 0 for piece in pieces)
            return None
        return [
            torch.equal(p.copy(), t.to(travels_as))
            for p, t in zip(pieces, full_tensors(), strict=True)
        ]

    for rank, equal in enumerate(on_gloo_ranks(body, world, tmp_path)):
        assert equal == (None if rank % ranks_per_node else [True] * len(SHAPES))


@pytest.mark.parametrize("nodes", [[2, 1], [1, 2], [1, 3], [3, 2], [2, 3, 5], [1, 2, 2]], ids=str)
def test_pieces_of_uneven_nodes_come_to_each_holder_in_the_order_of_the_ranks(nodes, tmp_path):
    """Two buckets are in flight, as in a sync, and each rank of a node holds one of them in turn."""
    world = sum(nodes)

    def body(rank: int) -> list[int]:
        counted = count_collectives()
        gather = ShardGather(CPU, nodes)
        tensors = [tensor + index for index in range(6) for tensor in full_tensors()]
        parts = [zero3_piece(tensor, rank, world) for tensor in tensors]
        buckets = [parts[i : i + len(SHAPES)] for i in range(0, len(parts), len(SHAPES))]
        begun, held = [], []
        for index, shards in enumerate(buckets):
            holder = index % gather.ranks
            begun.append((holder, Gathering(gather, shards, [torch.float32] * len(shards), holder)))
            if len(begun) < 2 and index + 1 < len(buckets):
                continue
            held.append(found(gather, *begun.pop(0)))
        held += [found(gather, *one) for one in begun]
        # one gather of all ranks for each bucket
        assert counted == [gather.across, gather.within] == [6, 0]
        for index, bucket in enumerate(held):
            expected = tensors[index * len(SHAPES) : (index + 1) * len(SHAPES)]
            assert not bucket or all(map(torch.equal, bucket, expected))
        return [len(bucket) for bucket in held]

    def found(gather: ShardGather, holder: int, gathering: Gathering) -> list[torch.Tensor]:
        pieces = gathering.wait()
        whole = [piece.copy() for piece in pieces] if gather.local_rank == holder else []
        assert whole or all(piece.data.numel() == 0 for piece in pieces)
        gathering.close()
        return whole

    counts = on_gloo_ranks(body, world, tmp_path)
    places = [(local, count) for count in nodes for local in range(count)]
    for (local, count), held in zip(places, counts, strict=True):
        assert held == [len(SHAPES) * (index % count == local) for index in range(6)]


def count_collectives() -> list[int]:
    """Counts what torch.distributed is asked for from here on: across nodes, within a node."""
    counted = [0, 0]

    def counting(index: int, real):
        def call(*args, **kwargs):
            counted[index] += 1
            return real(*args, **kwargs)

        return call

    for index, name in [
        (0, "all_gather_into_tensor"),
        (0, "all_to_all_single"),
        (1, "batch_isend_irecv"),
    ]:
        setattr(dist, name, counting(index, getattr(dist, name)))  # in a forked process of its own
    return counted


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 5)  # 5 rows on 2 or 4 ranks
        self.outer = nn.Linear(5, 1)  # fewer rows than ranks


@pytest.mark.parametrize("world", [2, 4])
def test_fsdp2_shards_are_gathered_with_one_collective_and_as_full_tensor_would(world, tmp_path):
    def body(rank: int) -> list[bool]:
        model = Small()
        source = ModuleSource(
            model, torch.float32, ShardGather(torch.device("cpu"), even_nodes(world))
        )
        # replaces the parameters that the source saw
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        bucket = tuple(source.metadata())
        expected = [tensor.full_tensor() for tensor in source.tensors(bucket)]
        counted = count_collectives()
        with source.gathering(bucket) as finish:
            pieces = finish()
            assert counted == [source.gather.across, source.gather.within] == [0, 1]
            return (
                [torch.equal(p.copy(), t) for p, t in zip(pieces, expected, strict=True)]
                if rank == 0
                else [True]
            )

    assert on_gloo_ranks(body, world, tmp_path)[0] == [True] * 4


class Experts(nn.Module):
    def __init__(self, experts: int, elements: int):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.Parameter(torch.randn(experts, elements))
        self.norm = nn.Parameter(torch.randn(5))


def test_tensors_of_few_rows_are_spread_evenly_before_they_are_gathered(tmp_path, monkeypatch):
    """On 3 nodes of 2 ranks: 1 and 4 rows leave ranks without any, and so do 7, of which 3 ranks hold two."""
    monkeypatch.setattr(even_pieces, "MIN_PADDING_BYTES", 200)

    def body(rank: int) -> list:
        gather, mesh, counted = (
            ShardGather(CPU, even_nodes(2)),
            init_device_mesh("cpu", (6,)),
            count_collectives(),
        )
        return [gathered(rank, gather, mesh, counted, experts) for experts in (1, 4, 5, 6, 7)]

    def gathered(rank: int, gather: ShardGather, mesh, counted: list[int], experts: int) -> list:
        model = Experts(experts, 61)
        expected = [tensor.detach().bfloat16() for tensor in model.parameters()]
        source = ModuleSource(model, torch.bfloat16, gather)
        fully_shard(model, mesh=mesh)
        bucket = tuple(source.metadata())
        counted[:] = [0, 0]
        source.release()
        with source.gathering(bucket) as finish:
            pieces = finish()
            assert counted == [gather.across, gather.within]
            padding = pieces[0].data.numel() - experts * 61
            if rank % 2:
                return list(counted)
            return [
                *counted,
                *(torch.equal(p.copy(), t) for p, t in zip(pieces, expected, strict=True)),
                padding,
            ]

    spread, as_it_lies = [2, 1], [1, 1]
    # one row of padding is below the limit
    expected = [
        spread,
        spread,
        as_it_lies,
        as_it_lies,
        spread,
    ]
    padding = [5, 2, 61, 0, 5]
    for rank, found in enumerate(on_gloo_ranks(body, 6, tmp_path)):
        right = [[True, True, left] if rank % 2 == 0 else [] for left in padding]
        assert found == [counts + rest for counts, rest in zip(expected, right, strict=True)]


@pytest.mark.parametrize(("across", "apart"), [(1, 2), (2, 2)])
def test_experts_on_a_mesh_of_their_own_are_read_whole_beside_fsdp2_shards(across, apart, tmp_path):
    """As transformers 5.24 lays them out with `DistributedConfig(fsdp_size=across * apart, ep_size=apart)`."""
    world = across * apart

    def body(rank: int) -> list:
        model = nn.Module()
        model.dense, model.moe = Small(), Experts(4, 6)
        expected = [tensor.detach().clone() for tensor in model.parameters()]
        experts = init_device_mesh("cpu", (across, apart), mesh_dim_names=("efsdp", "ep"))
        whole = model.moe.experts.detach()
        model.moe.experts = nn.Parameter(distribute_tensor(whole, experts["ep"], [Sharded(0)]))
        fully_shard(model.moe, mesh=experts["efsdp"], ignored_params={model.moe.norm})
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        sharded = model.moe.experts
        source = ModuleSource(model, torch.float32, ShardGather(CPU, even_nodes(world)))
        bucket = tuple(source.metadata())
        # neither is a piece of this library's
        laid_out = [type(one).__name__ for one in sharded.placements], shard_of(sharded) is None
        with source.gathering(bucket) as finish:
            pairs = list(zip(finish(), expected, strict=True)) if rank == 0 else finish()[:0]
            right = [torch.equal(pieces.copy(), tensor) for pieces, tensor in pairs]
        return [*laid_out, sharded.to_local().shape[0], right]

    for rank, found in enumerate(on_gloo_ranks(body, world, tmp_path)):
        placements, is_left, held, right = found
        assert (placements, is_left) == (["_StridedShard", "Shard"], True)
        assert held == 4 // world and right == ([] if rank else [True] * 6)


def shared(numel: int, cut: TensorRange, other: TensorRange) -> list[list[int]]:
    """Return how many elements of each rank's piece are in each rank's piece of the other cut."""
    pieces, others = (each.intervals(numel) for each in (cut, other))
    return [[end - start for start, end in even_pieces.overlaps(piece, others)] for piece in pieces]


@pytest.mark.nightly  # the arithmetic of the test above
def test_two_cuts_of_a_tensor_share_each_element_once():
    for numel, elements, world in [
        (1, 1, 1),
        (10, 10, 4),
        (128 * 3, 3, 448),
        (61 * 7, 122, 6),
        (9, 4, 3),
    ]:
        old, new = all_of(world, elements), all_of(world, -(-numel // world))
        table = shared(numel, old, new)
        assert table == [list(row) for row in zip(*shared(numel, new, old), strict=True)]
        assert [sum(row) for row in table] == [end - first for first, end in old.intervals(numel)]


def test_only_much_padding_is_worth_a_collective():
    """At 448 ranks: 128 experts of 24 MiB in bfloat16, a matrix of 2048 rows, and a small one of 128."""
    numel = 128 * 12 << 20
    experts = evened(all_of(448, 12 << 20), numel, itemsize=2)
    assert experts == all_of(448, -(-numel // 448)) and 448 * experts.elements - numel < 448
    matrix = all_of(448, 5 * 8192)
    assert evened(matrix, 2048 * 8192, itemsize=2) == matrix  # 9 % of padding
    small = all_of(448, 1024)
    assert evened(small, 128 * 1024, itemsize=2) == small  # 0.6 MiB of padding


def test_a_sharding_that_is_not_one_piece_a_rank_is_left_to_its_own_library(tmp_path):
    def body(rank: int) -> list[bool]:
        piece = torch.zeros(8)
        piece.ds_numel, piece.final_location = 8, None
        good = SimpleNamespace(
            ds_tensor=piece, ds_numel=15, ds_shape=(15,), ds_secondary_tensor=None
        )
        shared = SimpleNamespace(**{**vars(good), "ds_numel": 8})  # MiCS: every group has all of it
        small = torch.zeros(8, dtype=torch.int8)
        small.ds_numel, small.final_location, small.ds_quant_scale = 8, None, torch.ones(1)
        quantized = SimpleNamespace(**{**vars(good), "ds_tensor": small})  # ZeRO++, frozen weights
        found = [
            shard_of(tensor) is not None for tensor in (good, shared, quantized, torch.zeros(3))
        ]
        piece.final_location = SimpleNamespace(name="nvme")
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
        hybrid = Small()
        fully_shard(hybrid, mesh=mesh)
        return [*found, shard_of(good) is not None, shard_of(hybrid.inner.weight) is not None]

    assert on_gloo_ranks(body, 2, tmp_path) == [[True, False, False, False, False, False]] * 2


def test_an_empty_sharded_tensor_alone_in_its_bucket_is_gathered(tmp_path):
    def body(rank: int) -> bool:
        gather = ShardGather(torch.device("cpu"), even_nodes(2))
        empty = Shard(torch.empty(0), (0, 5), all_of(gather.world, 0))
        (pieces,) = Gathering(gather, [empty], [torch.bfloat16]).wait()
        return rank > 0 or pieces.copy().shape == (0, 5)

    assert on_gloo_ranks(body, 4, tmp_path) == [True] * 4


def test_what_differs_between_ranks_is_seen_by_all(tmp_path):
    def body(rank: int) -> list:
        gather = ShardGather(torch.device("cpu"))
        return [gather.extremes(7), gather.extremes(2**32 - 1 if rank else 3)]

    assert on_gloo_ranks(body, 2, tmp_path) == [[[7, 7], [3, 2**32 - 1]]] * 2
