"""Gathering of a tensor of few rows that FSDP2 shards, such as fused experts: as it lies, and spread evenly before.

    python benchmarks/few_rows.py            # half a minute on 2 cores

16 forked ranks (gloo, 4 nodes of 4), a tensor of 64 MiB in bfloat16 under `fully_shard`, whatever its number of rows.
Arms take turns:

    as it lies     equal parts of all ranks, padded: 16 / rows times the tensor
    even           what a sync does (`weights/even_pieces.py`)
    16 rows        control: a row per rank, so nothing is padded and nothing is passed on

`received_mib` and `sent_mib` are counted at the calls of torch.distributed, across nodes, for the node with the most.
`within_mib` is what a local main process receives of its own node. `peak_mib` is what the resident memory of the local
main process rises by at its highest (VmHWM). All processes share this machine's cores, so seconds are ratios at best.
"""

import json
import multiprocessing
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from trl_multinode.weights import even_pieces
from trl_multinode.weights.gathering import ShardGather
from trl_multinode.weights.source import ModuleSource

RANKS, PER_NODE, MIB, REPEATS = 16, 4, 1 << 20, 7
ELEMENTS = 32 * MIB
ARMS = [(rows, arm) for rows in (4, 5, 9) for arm in ("as it lies", "even")] + [
    (16, "as it lies"),
    (16, "even"),
]
counted: dict[str, int] = defaultdict(int)


def count(rank: int) -> None:
    """Count this rank's bytes by the calls that move them."""
    gather, spread, exchange = (
        dist.all_gather_into_tensor,
        dist.all_to_all_single,
        dist.batch_isend_irecv,
    )
    elsewhere = [peer for peer in range(RANKS) if peer // PER_NODE != rank // PER_NODE]

    def all_gather_into_tensor(output, part, *args, **kwargs):
        counted["received"] += output.nbytes - part.nbytes
        counted["sent"] += part.nbytes * (RANKS // PER_NODE - 1)
        return gather(output, part, *args, **kwargs)

    def all_to_all_single(output, part, received, sent, *args, **kwargs):
        counted["received"] += sum(received[peer] for peer in elsewhere)
        counted["sent"] += sum(sent[peer] for peer in elsewhere)
        return spread(output, part, received, sent, *args, **kwargs)

    def batch_isend_irecv(operations):
        counted["within"] += sum(
            operation.tensor.nbytes for operation in operations if rank % PER_NODE == 0
        )
        return exchange(operations)

    dist.all_gather_into_tensor, dist.all_to_all_single = all_gather_into_tensor, all_to_all_single
    dist.batch_isend_irecv = batch_isend_irecv


def memory_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def source_of(rows: int, shard_gather: ShardGather, mesh) -> ModuleSource:
    """Return the source of a sharded model with one tensor, which is nowhere whole."""
    model = nn.Module()
    model.experts = nn.Parameter(
        torch.empty(rows, ELEMENTS // rows, dtype=torch.bfloat16, device="meta")
    )
    source = ModuleSource(model, torch.bfloat16, shard_gather)
    fully_shard(model, mesh=mesh).to_empty(device="cpu")
    return source


def gather(source: ModuleSource) -> dict[str, float]:
    """Gather the tensor once, and return what it took."""
    dist.barrier()
    counted.clear()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before, start = memory_mib("VmRSS"), time.perf_counter()
    with source.gathering(tuple(source.metadata())) as finish:
        finish()
    seconds, peak = time.perf_counter() - start, memory_mib("VmHWM") - before
    source.release()
    return {
        "seconds": seconds,
        "peak": peak,
        **{key: counted[key] / MIB for key in ("received", "sent", "within")},
    }


def run(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS
    )
    count(rank)
    shard_gather, mesh = (
        ShardGather(torch.device("cpu"), [PER_NODE] * (RANKS // PER_NODE)),
        init_device_mesh("cpu", (RANKS,)),
    )
    sources = {
        rows: source_of(rows, shard_gather, mesh) for rows in sorted({rows for rows, _ in ARMS})
    }
    found = defaultdict(list)
    least = even_pieces.MIN_PADDING_BYTES
    for repeat in range(REPEATS + 1):
        for rows, arm in ARMS:
            even_pieces.MIN_PADDING_BYTES = least if arm == "even" else 1 << 60
            if repeat:  # the first time connects the ranks
                found[f"{rows} {arm}"].append(gather(sources[rows]))
            else:
                gather(sources[rows])
    (folder / f"{rank}.json").write_text(json.dumps(found))


def spread(values: list[float]) -> dict[str, float]:
    return {"median": median(values), "low": min(values), "high": max(values)}


def summary(ranks: list[dict]) -> dict:
    """Per arm: seconds and memory of local main processes, bytes of the node with the most."""
    found = {}
    for arm in ranks[0]:
        nodes = [ranks[first : first + PER_NODE] for first in range(0, RANKS, PER_NODE)]
        most = {
            key: max(sum(rank[arm][-1][key] for rank in node) for node in nodes)
            for key in ("received", "sent")
        }
        mains = [ranks[first][arm] for first in range(0, RANKS, PER_NODE)]
        found[arm] = {
            "seconds": spread([max(main[i]["seconds"] for main in mains) for i in range(REPEATS)]),
            "peak_mib": max(median(turn["peak"] for turn in main) for main in mains),
            "within_mib": max(main[-1]["within"] for main in mains),
            **{f"{key}_mib": value for key, value in most.items()},
        }
    return found


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fork = multiprocessing.get_context("fork")
        processes = [fork.Process(target=run, args=(rank, folder)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    found = {
        "ranks": RANKS,
        "nodes": RANKS // PER_NODE,
        "tensor_mib": ELEMENTS * 2 // MIB,
        "arms": summary(ranks),
    }
    path = Path(__file__).parent / "results" / "few_rows.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
