"""A whole weight sync: gathered on forked ranks, through slots, into engines; what happens when one of them fails."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from checkpoint_source import CheckpointSource
from forks import even_nodes, on_gloo_ranks
from places import topology_on
from served import Keeper, digest, serving
from torch import nn
from waiting import HANG_S

from trl_multinode.errors import EngineDiedError, EngineError, EngineStalledError, WeightSyncError
from trl_multinode.transports.pieces import Pieces
from trl_multinode.weights.buckets import WeightMeta
from trl_multinode.weights.gathering import ShardGather
from trl_multinode.weights.source import ModuleSource, WeightSource
from trl_multinode.weights.sync import WeightSync
from trl_multinode.weights.timings import STAGES, SyncTimings, sync_metrics
from trl_multinode.weights.transport import Transport
from trl_multinode.wire.messages import Await, UpdateWeights, WeightVersion

CPU = torch.device("cpu")
# Name, shape, dtype in the trainer: odd sizes, sizes below the number of ranks, one that divides
SHARDED = [
    ("embed", (37, 5), torch.float32),
    ("one", (1,), torch.bfloat16),
    ("scalar", (), torch.float32),
    ("three", (3,), torch.float16),
    ("even", (16, 4), torch.bfloat16),
    ("cube", (2, 3, 7), torch.float32),
    ("large", (129, 31), torch.float32),
]
# bytes: from ranges of a few elements to everything in one bucket
LIMITS = [
    100,
    700,
    5000,
    1 << 20,
]


def full_tensors(update: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(update)
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape, dtype in SHARDED
    }
    # not contiguous, on every rank as it is
    tensors["whole"] = torch.randn(6, 9, generator=generator).t()
    tensors["nothing"] = torch.empty(0, 5)
    tensors["bias"] = torch.randn(5, generator=generator, dtype=torch.float64)
    tensors["steps"] = torch.tensor(update)
    return tensors


class Sharded(nn.Module):
    """As ZeRO-3 leaves a model: empty parameters with this rank's piece beside them, the end padded with rubbish."""

    def __init__(self, rank: int, world: int):
        super().__init__()
        self._place, tensors = (rank, world), full_tensors(0)
        for name, shape, dtype in SHARDED:
            elements = -(-tensors[name].numel() // world)
            piece = torch.full((elements,), float("nan"), dtype=dtype)
            piece.ds_numel, piece.final_location = elements, None
            parameter = nn.Parameter(torch.empty(0, dtype=dtype))
            parameter.ds_tensor, parameter.ds_numel, parameter.ds_shape = (
                piece,
                tensors[name].numel(),
                shape,
            )
            self.register_parameter(name, parameter)
        self.whole = nn.Parameter(tensors["whole"].clone(memory_format=torch.preserve_format))
        self.nothing = nn.Parameter(tensors["nothing"])
        self.register_buffer("bias", tensors["bias"])
        self.register_buffer("steps", tensors["steps"])

    @torch.no_grad()
    def move_to(self, update: int) -> None:
        rank, world = self._place
        tensors = full_tensors(update)
        for name, _, dtype in SHARDED:
            piece = getattr(self, name).ds_tensor
            padded = torch.full((world * piece.numel(),), float("nan"), dtype=dtype)
            padded[: tensors[name].numel()] = tensors[name].flatten()
            piece.copy_(padded[rank * piece.numel() : (rank + 1) * piece.numel()])
        for name in ("whole", "bias", "steps"):
            getattr(self, name).copy_(tensors[name])


def as_sent(update: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    tensors = full_tensors(update)
    return {name: t if name in ("bias", "steps") else t.to(dtype) for name, t in tensors.items()}


@pytest.mark.parametrize(
    ("transport", "nodes", "per_node", "dtype"),
    [
        ("host", 2, 2, torch.bfloat16),
        ("host", 3, 1, torch.float16),
        ("host", 1, 3, torch.float32),
        ("nccl", 2, 2, torch.bfloat16),
    ],
)
def test_every_bit_arrives_in_every_engine_of_every_node_whatever_the_buckets(
    transport, nodes, per_node, dtype, tmp_path
):
    """Two updates each with four sizes of buckets; the engines are slow, each at other buckets."""

    def body(rank: int) -> list[bool]:
        node, local_rank = divmod(rank, per_node)
        model = Sharded(rank, nodes * per_node)
        source = ModuleSource(model, dtype, ShardGather(CPU, even_nodes(per_node)))
        if local_rank:
            return list(equal_after_each_update(model, source, None, node, []))
        backends = [
            Keeper(lambda update, bucket, i=i: time.sleep(0.002 * ((node + i + bucket) % 3)))
            for i in (0, 1)
        ]
        with serving(*backends, folder=tmp_path / str(node)) as engines:
            return list(equal_after_each_update(model, source, engines, node, backends))

    def equal_after_each_update(
        model: Sharded, source: ModuleSource, engines, node: int, backends: list[Keeper]
    ) -> Iterator[bool]:
        update = 0
        for number, limit in enumerate(LIMITS):
            folder = tmp_path / f"store{node}.{number}"
            folder.mkdir(exist_ok=True)
            said = Transport(transport, workers=[1, 1], folder=folder, report=pytest.fail)
            sync = WeightSync(source, engines, limit, said)
            for _ in range(2):
                update += 1
                model.move_to(update)
                sent = digest(as_sent(update, dtype))
                stale = all(digest(backend.tensors) != sent for backend in backends)
                sync.run(WeightVersion(update, update))
                yield stale and all(digest(backend.tensors) == sent for backend in backends)

    assert (
        on_gloo_ranks(body, nodes * per_node, tmp_path)
        == [[True] * 2 * len(LIMITS)] * nodes * per_node
    )


# ---- failures


class Counting(WeightSource):
    """Eight buckets of one tensor; counts the contexts that are open."""

    def __init__(self):
        super().__init__()
        self.open = self.most = self.released = 0

    def metadata(self) -> list[WeightMeta]:
        return [WeightMeta(f"layers.{index}.w", torch.float32, (64,)) for index in range(8)]

    def check(self, weights, step, frozen) -> None: ...

    @contextmanager
    def gathering(self, bucket, holder=0) -> Iterator:
        self.gather.across += 1
        self.gather.within += 2
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            yield lambda: [Pieces.whole(torch.ones(64)) for _ in bucket]
        finally:
            self.open -= 1

    def release(self) -> None:
        self.released += 1


@pytest.mark.nightly  # an example of the documentation
def test_a_new_source_is_one_file(tmp_path):
    state = {
        "embed": torch.randn(37, 5),
        "layers.0.w": torch.randn(6, 9).t(),
        "layers.0.steps": torch.tensor(3),
    }
    with serving(engine := Keeper(), folder=tmp_path) as engines:
        timings = WeightSync(CheckpointSource(state), engines, limit_bytes=800).run(
            WeightVersion(1, 0)
        )
    assert timings.num_buckets == 2 and digest(engine.tensors) == digest(state)


def sender_threads() -> list[str]:
    return [
        thread.name for thread in threading.enumerate() if thread.name.startswith("weight sync")
    ]


def test_at_most_three_buckets_are_open_and_none_is_left(tmp_path):
    source = Counting()
    with serving(Keeper(lambda update, bucket: time.sleep(0.01)), folder=tmp_path) as engines:
        timings = WeightSync(source, engines, 256).run(WeightVersion(1, 0))
    assert (source.open, source.most, source.released) == (0, 3, 1) and sender_threads() == []
    assert (timings.num_buckets, timings.collectives, timings.num_bytes) == (8, (8, 16), 8 * 256)
    assert timings.load_s >= 8 * 0.01 and timings.total_s >= timings.stream_s >= timings.load_s


@pytest.mark.parametrize("bucket", [0, 3, 7])
def test_a_bucket_that_does_not_load_is_the_error_of_the_sync_and_leaves_nothing_behind(
    bucket, tmp_path
):
    def fail(update: int, number: int) -> None:
        if (update, number) == (2, bucket):
            raise RuntimeError("no kernel for this shape")

    source, healthy = Counting(), Keeper()
    with serving(healthy, Keeper(fail), folder=tmp_path) as engines:
        sync = WeightSync(source, engines, 256)
        sync.run(WeightVersion(1, 0))
        with pytest.raises(
            EngineError, match=r"Rank 0 \(node 0\): engine 1 of node 0: .*no kernel for this shape"
        ):
            sync.run(WeightVersion(2, 1))
        assert (source.open, source.released) == (0, 2) and sender_threads() == []
        with pytest.raises(
            WeightSyncError, match="engine 1 of node 0.*mixed .*no kernel for this shape"
        ):
            engines[1].score([1, 2])
    assert torch.is_grad_enabled()


def test_an_engine_that_is_gone_is_told_by_name(tmp_path):
    def leave(update: int, bucket: int) -> None:
        if bucket == 2:
            engines[0]._connection._socket.shutdown(2)  # as the engine's end of the stream would

    source = Counting()
    with serving(Keeper(leave), folder=tmp_path) as engines:
        with pytest.raises(EngineDiedError, match="engine 0 of node 0"):
            WeightSync(source, engines, 256).run(WeightVersion(1, 0))
        assert source.open == 0 and sender_threads() == []


def test_an_engine_that_does_not_answer_is_waited_for_no_longer_than_its_deadline(tmp_path):
    go = threading.Event()
    with serving(
        Keeper(lambda update, bucket: go.wait(HANG_S)), folder=tmp_path, stall_timeout_s=0.5
    ) as engines:
        with pytest.raises(EngineStalledError, match="engine 0 of node 0"):
            WeightSync(Counting(), engines, 256).run(WeightVersion(1, 0))
        assert not go.is_set() and sender_threads() == []
        go.set()


# ---- what the log says


def test_the_log_has_the_slowest_rank_of_every_stage_and_its_node():
    sync = SyncTimings(
        num_bytes=4 * 10**9, num_buckets=7, collectives=(7, 5), version=WeightVersion(3, 2)
    )
    per_rank = [[float(10 * stage + rank) for stage in range(len(STAGES))] for rank in (1, 4, 2, 3)]
    metrics = sync_metrics(sync, per_rank, topology_on([2, 2]))
    assert [metrics[f"sync/{name}"] for name in STAGES] == [4.0, 14.0, 24.0, 34.0, 44.0, 54.0, 64.0]
    assert (
        metrics["sync/slowest_node"] == 0
        and sync_metrics(sync, per_rank[::-1], topology_on([2, 2]))["sync/slowest_node"] == 1
    )
    assert sync_metrics(sync, per_rank, topology_on([1, 3]))["sync/slowest_node"] == 1
    assert metrics["sync/gb_per_s"] == 1.0 and metrics["sync/mib"] == pytest.approx(4e9 / 2**20)
    assert (
        metrics["sync/collectives"],
        metrics["sync/node_collectives"],
        metrics["sync/version"],
    ) == (8, 5, 3)
    # a run without a sync
    assert (
        sync_metrics(SyncTimings(), [[0.0] * len(STAGES)] * 2, topology_on([1, 1]))["sync/gb_per_s"]
        == 0.0
    )


def test_a_refused_beginning_is_heard_by_the_ranks_that_wait_for_it(tmp_path):
    with serving(Keeper(), folder=tmp_path) as engines:
        with pytest.raises(WeightSyncError, match="before a full update"):
            engines[0].ask(UpdateWeights(version=WeightVersion(1, 0), first_bucket=1))
        engines[0].ask(Await(min_update=1))
