"""Every kind of source sends its weights to an engine, five times. Usage: sources.py FOLDER ENGINE."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from common import RANK, WORLD, write_result

from multinode_kit.engines import running_engines
from multinode_kit.models import tiny_qwen2
from multinode_kit.sources import KINDS, prepare
from trl_multinode.weights.gathering import ShardGather
from trl_multinode.weights.probe import probe_tokens
from trl_multinode.weights.source import ModuleSource
from trl_multinode.weights.sync import WeightSync
from trl_multinode.wire.messages import WeightVersion

folder, engine_module = sys.argv[1:3]
RANKS_PER_NODE = int(os.environ["LOCAL_WORLD_SIZE"])
TOKENS = probe_tokens(300)
version = WeightVersion()


@torch.no_grad()
def difference(forward, engines) -> float:
    """Largest |engine - trainer| log-prob of the probe; the forward is for all ranks."""
    ids = torch.tensor([TOKENS])
    expected = (
        forward(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    )
    if engines is None or version.update == 0:
        return 9.0
    return (
        (torch.from_numpy(engines[0].score(TOKENS).logprobs.copy()) - expected).abs().max().item()
    )


def check(kind: str, engines, tied: bool) -> dict:
    global version
    torch.manual_seed(0)
    model = tiny_qwen2(tied=tied)
    nodes = [RANKS_PER_NODE] * (dist.get_world_size() // RANKS_PER_NODE)
    source = ModuleSource(model, torch.float32, ShardGather(torch.device("cpu"), nodes))
    forward, step = prepare(kind, model)
    sync = WeightSync(source, engines, 40_000)
    found: dict = {"stale": [], "fresh": [], "buckets": len(sync.buckets)}
    for _ in range(5):
        step(
            torch.randint(
                2,
                300,
                (1, 32),
                generator=torch.Generator().manual_seed(version.update * WORLD + RANK),
            )
        )
        found["stale"].append(difference(forward, engines))
        version = WeightVersion(version.update + 1, version.update + 1)
        dist.barrier()
        timings = sync.run(version)
        found["fresh"].append(difference(forward, engines))
    return found | {"collectives": timings.collectives}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Path(folder, f"engine{RANK}").mkdir()
    host = running_engines(tiny_qwen2(tied=False), Path(folder, f"engine{RANK}"), engine_module)
    with host if RANK % RANKS_PER_NODE == 0 else nullcontext() as engines:
        write_result(folder, **{kind: check(kind, engines, tied=False) for kind in KINDS})
        dist.barrier()


main()
