"""Script of `test_sync_memory.py`: peaks of memory during a weight sync, in a process whose allocators are fresh.

Argument: a folder. It prints JSON, and only its forks measure. `MALLOC_MMAP_THRESHOLD_` has blocks of 1 MiB or more
go back to the system when they are freed; a process that ran other tests has free blocks that it would use instead.
"""

import json
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from forks import even_nodes, on_gloo_ranks
from memory import MIB, peak_bytes
from peft import LoraConfig, get_peft_model
from served import Keeper, serving
from torch import nn

from trl_multinode.transports.base import OpenedSlots
from trl_multinode.weights.buckets import WeightMeta, cut_into_ranges, slot_layout
from trl_multinode.weights.gathering import Buffers, ShardGather
from trl_multinode.weights.peft_source import PeftSource
from trl_multinode.weights.source import ModuleSource
from trl_multinode.weights.sync import WeightSync
from trl_multinode.wire.messages import WeightVersion

CPU = torch.device("cpu")


class Large(nn.Module):
    """A large tensor under ZeRO-3, of rows of 1 MiB, and a small one."""

    def __init__(self, rank: int, world: int, rows: int):
        super().__init__()
        self.embed = nn.Parameter(torch.empty(0))
        piece = torch.full((rows * MIB // 4 // world,), float(rank))
        piece.ds_numel, piece.final_location = piece.numel(), None
        self.embed.ds_tensor, self.embed.ds_numel = piece, rows * MIB // 4
        self.embed.ds_shape = (rows, MIB // 4)
        self.norm = nn.Parameter(torch.zeros(16))


class Merged(nn.Module):
    """Layers under ZeRO-3, 1 MiB of float32 each, with adapters."""

    def __init__(self, rank: int, world: int):
        super().__init__()
        torch.manual_seed(0)
        linears = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(40)])
        self.layers = get_peft_model(
            linears, LoraConfig(r=2, target_modules=r"\d+")
        ).get_base_model()
        for layer in self.layers:
            weight = layer.base_layer.weight.detach()
            piece = weight.flatten().chunk(world)[rank].clone()
            piece.ds_numel, piece.final_location = piece.numel(), None
            sharded = layer.base_layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)
            sharded.ds_tensor, sharded.ds_numel, sharded.ds_shape = (
                piece,
                weight.numel(),
                weight.shape,
            )


class Reader(Keeper):
    """Reads no slot, so all memory is the sender's."""

    async def open_slots(self, request) -> None:
        await super().open_slots(request)
        self.opened.take = lambda slot, specs: []


def second_sync(source: ModuleSource, folder: Path | None, bucket: int) -> tuple[float, float]:
    """Return the sizes of our buffers and the peak of resident memory of a second sync, in buckets."""
    with serving(Reader(), folder=folder) if folder else nullcontext() as engines:
        sync = WeightSync(source, engines, bucket)
        sync.run(WeightVersion(1, 1))  # the slots' pages
        taken, real = {}, Buffers.take

        def take(buffers: Buffers, name: str, num_bytes: int) -> torch.Tensor:
            tensor = real(buffers, name, num_bytes)
            taken[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        Buffers.take = take
        resident = peak_bytes(partial(sync.run, WeightVersion(2, 2)))
        Buffers.take = real
        return sum(taken.values()) / bucket, resident / bucket


def large(nodes: int, per_node: int, folder: Path) -> list:
    """Measure the sender with a tensor of 6 buckets, then with one of 24."""

    def body(rank: int) -> list[tuple[float, float]]:
        gather, found = ShardGather(CPU, even_nodes(per_node)), []
        for rows in (24, 96):
            source = ModuleSource(Large(rank, nodes * per_node, rows), torch.float32, gather)
            node = None if rank % per_node else folder / f"{rank}.{rows}"
            found.append(second_sync(source, node, 4 * MIB))
        return found

    return on_gloo_ranks(body, nodes * per_node, folder)


def of_the_engines_dtype(kind: str, folder: Path) -> list:
    """Measure a trainer in float32 whose engine has bfloat16, as in TRL by default."""

    def body(rank: int) -> tuple[float, float]:
        gather = ShardGather(CPU, even_nodes(2))
        if kind == "merged":
            source: ModuleSource = PeftSource(Merged(rank, 2), torch.bfloat16, gather)
        else:
            source = ModuleSource(nn.Embedding(384, MIB // 4), torch.bfloat16, gather)
        return second_sync(source, None if rank else folder / "node", 8 * MIB)

    return on_gloo_ranks(body, 2, folder)


def worker(folder: Path) -> list:
    """Measure a worker that joins the ranges of a tensor of 24 buckets."""
    bucket, rows = 4 * MIB, 96

    def body(rank: int) -> float:
        meta = WeightMeta("w", torch.float32, (rows, MIB // 4), divisible=True)
        layouts = [slot_layout((part,)) for part in cut_into_ranges(meta, bucket, 4)]
        slots = OpenedSlots([torch.ones(bucket, dtype=torch.uint8) for _ in range(2)], CPU)

        def load() -> None:
            for index, layout in enumerate(layouts):
                tensors = slots.take(index % 2, layout)
                assert bool(tensors) == (index == len(layouts) - 1)

        return peak_bytes(load) / bucket

    return on_gloo_ranks(body, 1, folder)


MEASUREMENTS = {
    "large 2 x 2": partial(large, 2, 2),
    "large 3 x 1": partial(large, 3, 1),
    "large 1 x 4": partial(large, 1, 4),
    "tensor": partial(of_the_engines_dtype, "tensor"),
    "merged": partial(of_the_engines_dtype, "merged"),
    "worker": worker,
}

if __name__ == "__main__":
    found = {}
    for number, (name, measure) in enumerate(MEASUREMENTS.items()):
        folder = Path(sys.argv[1], str(number))
        folder.mkdir()
        found[name] = measure(folder)
    print(json.dumps(found))
