"""ZeRO++ under real DeepSpeed on forked gloo ranks, two nodes of two: engines get what the optimizer wrote, in packed
pieces. DeepSpeed's quantizer is a CUDA kernel; `Quantizer` replaces it, everything else is real."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import partition_parameters
from deepspeed.utils import groups
from forks import even_nodes, on_gloo_ranks
from served import Keeper, digest, serving
from torch import nn

from multinode_kit import sources
from multinode_kit.models import tiny_qwen2
from trl_multinode.deepspeed_values import check_zero_groups
from trl_multinode.errors import ConfigurationError
from trl_multinode.weights.finite import unchecked
from trl_multinode.weights.gathering import ShardGather
from trl_multinode.weights.source import ModuleSource
from trl_multinode.weights.sync import WeightSync
from trl_multinode.wire.messages import WeightVersion

# e2e/test_sources.py has a secondary shard under launches, test_shards.py the shards that are refused
pytestmark = [pytest.mark.zero3, pytest.mark.nightly]
WORLD, PER_NODE = 4, 2
CPU = torch.device("cpu")
HEAD = "lm_head.weight"


class Quantizer:
    """Eight bits with one scale a tensor, as `CUDAQuantizer` is called."""

    def quantize(
        self, tensor: torch.Tensor, groups: None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale = tensor.abs().max().float().clamp(min=1e-8).reshape(1) / 127
        return (tensor / scale).round().to(torch.int8), scale

    def dequantize(
        self, tensor: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        whole = (tensor.reshape(len(scales), -1).float() * scales[:, None]).view(tensor.shape)
        return whole if dtype is None else whole.to(dtype)


class Run:
    """One rank's trainer and, on a local main process, its node's engine, which keeps the bits that arrive."""

    def __init__(self, kind: str, rank: int, folder: Path, frozen: str | None = None):
        torch.manual_seed(0)
        self.model, self._rank, self._folder, self._update = tiny_qwen2(tied=False), rank, folder, 0
        self.parameters = dict(self.model.named_parameters())
        if frozen is not None:
            self.parameters[frozen].requires_grad_(False)
        self._source = ModuleSource(
            self.model, torch.bfloat16, ShardGather(CPU, even_nodes(PER_NODE))
        )
        self._forward, self._step = sources.prepare(kind, self.model)
        self.counted = count_collectives()

    @torch.no_grad()
    def look(self) -> None:
        """A forward pass: DeepSpeed makes the secondary shards in it."""
        self._forward(input_ids=torch.tensor([[1, 2, 3]]))

    def step(self) -> None:
        self._step(
            torch.randint(2, 300, (1, 16), generator=torch.Generator().manual_seed(self._rank))
        )

    @property
    def secondaries(self) -> int:
        return sum(
            parameter.ds_secondary_tensor is not None for parameter in self.parameters.values()
        )

    def optimizers(self) -> dict[str, torch.Tensor]:
        """The trained weights as the optimizer has them, gathered from its own fp32 partitions."""
        trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        return {
            name: deepspeed.utils.safe_get_full_fp32_param(p).bfloat16()
            for name, p in trained.items()
        }

    def sync(self) -> tuple[dict[str, torch.Tensor], list[int]]:
        """The weights in the engine after a sync, and how many collectives too many or too few this rank saw."""
        if self._rank % PER_NODE:
            return {}, self._collectives_but_one_a_bucket(None)
        keeper = Keeper()
        with serving(keeper, folder=self._folder / f"{self._rank}.{self._update}") as engines:
            surplus = self._collectives_but_one_a_bucket(engines)
        return keeper.tensors, surplus

    def _collectives_but_one_a_bucket(self, engines) -> list[int]:
        self._update += 1
        before = list(self.counted)
        sync = WeightSync(self._source, engines, 40_000)
        timings = sync.run(WeightVersion(self._update, self._update))
        assert len(sync.buckets) > 5
        found = [
            after - start - len(sync.buckets)
            for start, after in zip(before, self.counted, strict=True)
        ]
        assert found[0] == timings.collectives[0] - len(sync.buckets)  # the log says what happened
        return found


def store_quantized(parameter: nn.Parameter) -> None:
    """As DeepSpeed's `quantize_nontrainable_params` does, which refuses float32 and leaves small parameters out."""
    before = parameter.ds_tensor
    parameter.ds_tensor, scale = Quantizer().quantize(before)
    parameter.ds_tensor.ds_quant_scale = scale
    for name in ("ds_numel", "status", "final_location"):
        setattr(parameter.ds_tensor, name, getattr(before, name))


def tiny_whole(name: str) -> torch.Tensor:
    torch.manual_seed(0)
    return tiny_qwen2(tied=False).get_parameter(name).detach()


def count_collectives() -> list[int]:
    """Count the calls to all-gather (ours and DeepSpeed's) and to send and receive from here on, in this process."""
    counted = [0, 0]

    def count(module, name: str, index: int) -> None:
        real = getattr(module, name)

        def call(*args, **kwargs):
            counted[index] += 1
            return real(*args, **kwargs)

        setattr(module, name, call)

    count(dist, "all_gather_into_tensor", 0)
    count(dist, "batch_isend_irecv", 1)
    for name in ("all_gather_into_tensor", "all_gather"):
        count(deepspeed.comm, name, 0)
    return counted


def on_ranks(body: Callable[[int], object], folder: Path) -> list:
    def joined(rank: int):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % PER_NODE), WORLD_SIZE=str(WORLD))
        deepspeed.init_distributed("gloo")
        return body(rank)

    return on_gloo_ranks(joined, WORLD, folder)


def test_with_hpz_engines_get_the_optimizers_weights_with_one_collective_a_bucket(tmp_path):
    """Before the first step, after a step (DeepSpeed has dropped all secondary shards), and after a forward pass."""

    def body(rank: int) -> list:
        run = Run("zero3_hpz", rank, tmp_path)
        return [[*situation, *found(run)] for situation in situations(run)]

    def situations(run: Run) -> Iterator[list[int]]:
        run.look()
        yield [run.secondaries]
        for _ in range(2):
            run.step()
            yield [run.secondaries]
            run.look()
            yield [run.secondaries]
        for parameter in run.parameters.values():
            if parameter.ds_secondary_tensor is not None:
                parameter.ds_secondary_tensor.fill_(float("nan"))  # nothing reads it
        yield [run.secondaries]

    def found(run: Run) -> list:
        expected = run.optimizers()
        tensors, surplus = run.sync()
        assert unchecked(run.model) is None  # each rank knows its part, so a NaN is found
        return [surplus, not tensors or digest(tensors) == digest(expected)]

    right = [[0, 0], True]
    expected = [[27, *right], [0, *right], [27, *right], [0, *right], [27, *right], [27, *right]]
    assert on_ranks(body, tmp_path) == [expected] * WORLD


def test_weights_are_sent_as_they_are_stored_however_a_forward_gathers_them(tmp_path, monkeypatch):
    """Quantized gathers leave trained weights exact. A frozen one in eight bits takes two: of values and of scales."""
    monkeypatch.setattr(partition_parameters, "CUDAQuantizer", Quantizer)
    hpz = sources.DEEPSPEED["zero3_hpz"]
    monkeypatch.setitem(sources.DEEPSPEED, "quantized", hpz | {"zero_quantized_weights": True})
    head = tiny_whole(HEAD)

    def body(rank: int) -> list:
        run = Run("quantized", rank, tmp_path, frozen=HEAD)
        store_quantized(run.parameters[HEAD])
        run.look()
        run.step()
        run.look()
        expected = run.optimizers()
        tensors, surplus = run.sync()
        error = (tensors.pop(HEAD).float() - head).abs().max().item() if tensors else 0.0
        return [
            surplus,
            not tensors or digest(tensors) == digest(expected),
            error < head.abs().max().item() / 100,
        ]

    # the head is a tensor of two buckets: both are gathered with those two collectives, and none within a node
    assert on_ranks(body, tmp_path) == [[[0, -2], True, True]] * WORLD


GPUS = 8  # that each rank sees
NODES = [(7, 8, 8, 8), (7, 7, 7, 7), (8, 8, 8, 8), (7, 7), (6, 6), (4, 4), (4, 6), (8,), (7,)]


@pytest.mark.parametrize("ranks", NODES, ids=str)
@pytest.mark.parametrize("size", [2, 3, 4, 6, 7, 8, 14, 0], ids="{} a group".format)
def test_groups_are_refused_exactly_where_deepspeeds_own_do_not_lie_within_nodes(
    monkeypatch, ranks, size
):
    """DeepSpeed forms its groups, without their communicators. The size 0 is for quantized gradients."""
    world, made = sum(ranks), []
    for name, value in {"is_initialized": True, "get_world_size": world, "get_rank": 0}.items():
        monkeypatch.setattr(groups.dist, name, lambda value=value: value)
    monkeypatch.setattr(
        groups.dist, "new_group", lambda ranks: made.append(list(ranks)) or made[-1]
    )
    monkeypatch.setattr(
        groups, "get_accelerator", lambda: SimpleNamespace(device_count=lambda: GPUS)
    )
    monkeypatch.setattr(groups, "_ALL_TO_ALL_GROUP", {})
    monkeypatch.setattr(groups, "_ZERO_PARAM_INTRA_PARALLEL_GROUP", None)
    with suppress(AssertionError):  # it forms no groups of such ranks at all, or not of all
        if size:
            groups._create_zero_param_parallel_group(size)
        else:
            found = groups._get_local_all_to_all_group()
            made = [group for name, group in found.items() if name.startswith("local_")]
    node_of = [node for node, own in enumerate(ranks) for _ in range(own)]
    within = all(len({node_of[rank] for rank in group}) == 1 for group in made)
    fits = within and sorted(sum(made, [])) == list(range(world))

    zero = {"stage": 3, "zero_hpz_partition_size": size, "zero_quantized_gradients": not size}
    refused = False
    for node, own in enumerate(ranks):
        topology = SimpleNamespace(
            local_world_size=own, world_size=world, node=node, num_nodes=len(ranks)
        )
        try:
            check_zero_groups({"zero_optimization": zero}, topology, GPUS)
        except ConfigurationError:
            refused = True
    assert refused == (not fits)
