"""How fast do weights reach the engines? Full fine-tuning under ZeRO-3, several nodes with links of their own.

    python benchmarks/sync.py [--quick] [--repeats 11]

Every cell is one launch: N nodes in network namespaces, two ranks and one engine each, on free links and then
on links of 1 Gbit/s. Arms take turns in the same ranks (`benchmarks/sync_rank.py`):

    ours      what a run does
    control   the same again
    trl       TRL's `VLLMGeneration.sync_weights` in server mode: a gather per parameter. Replaced in it:
              `vllm_client`, by one that copies every tensor into our slots and has the engine load our buckets,
              without HTTP, and `is_main_process`, which is true on every local main process: TRL has one sender and
              one server, here every node's engine is fed, so that all arms do the same work. Both favour TRL.
    world     ours, but one all-gather of the world per bucket instead of node first
    ahead     ours with a slot for each bucket, as a run that generates ahead has it: the seconds are the pause of
              training, and the engines load after it

Then the pause alone, with slots opened once, all ranks on one core and all engines on the other, because on a
machine with GPUs they do not share cores either. A figure of a repeat is the median of `PAUSES` syncs of each arm:

    loading   ahead, into the engines
    alone     the same without engines, so that nothing is loaded
    again     alone, once more: the control

The engines of the two-node cells are vLLM's CPU build, those of four nodes the fake engine of the test kit (its load
is a copy too), because four vLLMs do not fit on two cores.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from multinode_kit.engines import FAKE, REAL
from multinode_kit.launch_files import ZERO3
from multinode_kit.nodes import Nodes

FOLDER = Path(__file__).parent
LINKS = {"free": None, "1 Gbit/s": 1000}
ARMS = ("ours", "trl", "world", "control", "ahead")
PAUSE_ARMS = ("loading", "alone", "again")
PAUSES = 5
DEEPSPEED = ZERO3 | {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.0,
}
RANKS_PER_NODE = 2
CORES = os.sched_getaffinity(0)  # all ranks and engines share them
# 150 M on 4 nodes: 8 ranks and 4 engines do not fit into 24 GB
CELLS = (
    ("40M", 2),
    ("40M", 4),
    ("150M", 2),
)


def cell(model: str, num_nodes: int, engine: str, repeats: int) -> list[dict]:
    """One launch; a result per link."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Nodes(
            num_nodes, RANKS_PER_NODE, folder=folder, namespaces=True, deepspeed=DEEPSPEED
        ) as nodes:
            nodes.launch(
                FOLDER / "sync_rank.py",
                *(str(folder), model, engine, str(repeats), str(PAUSES)),
                *(",".join(ARMS), ",".join(PAUSE_ARMS)),
            )
            for index, rate in enumerate(LINKS.values()):
                for rank in range(nodes.spec.num_ranks):
                    nodes.wait_for(rank, f"READY {index}", timeout_s=900)
                nodes.limit_links(rate)
                (folder / f"go{index}").touch()
            codes = nodes.wait(timeout_s=900)
            if any(codes):
                raise RuntimeError(f"launchers ended with {codes}:\n{nodes.rank_log(0)[-3000:]}")
        ranks = [
            json.loads((folder / f"rank{rank}.json").read_text())
            for rank in range(nodes.spec.num_ranks)
        ]
    return [
        {
            "model": model,
            "nodes": num_nodes,
            "link": link,
            "engine": "vllm" if engine == REAL else "fake",
        }
        | summarize([rank["links"][index] for rank in ranks], ranks[0], num_nodes)
        for index, link in enumerate(LINKS)
    ]


def spread(values: list[float]) -> dict:
    return {
        "median": round(median(values), 4),
        "low": round(min(values), 4),
        "high": round(max(values), 4),
    }


def ratios(above: list[float], below: list[float]) -> dict:
    return spread([a / b for a, b in zip(above, below, strict=True)])


def summarize(ranks: list[dict], common: dict, num_nodes: int) -> dict:
    """`ranks[rank][arm]` is a list of syncs."""
    mains = ranks[::RANKS_PER_NODE]
    repeats = range(len(ranks[0]["ours"]))
    wall = {arm: [max(rank[arm][i]["wall_s"] for rank in ranks) for i in repeats] for arm in ARMS}
    pause = {
        arm: [
            median(
                max(rank[arm][PAUSES * i + j]["wall_s"] for rank in ranks) for j in range(PAUSES)
            )
            for i in repeats
        ]
        for arm in PAUSE_ARMS
    }
    inbound = {
        arm: [
            max(main[arm][i]["inbound_bytes"] for main in mains) / common["model_bytes"]
            for i in repeats
        ]
        for arm in ARMS
    }
    stages = [
        {
            stage: max(main["ours"][i][stage] for main in mains)
            for stage in ("gather_s", "copy_s", "load_s")
        }
        for i in repeats
    ]
    stream = [max(main["ours"][i]["stream_s"] for main in mains) for i in repeats]
    bound = [
        max(s.values()) + (sum(s.values()) - max(s.values())) / common["buckets"] for s in stages
    ]
    world = num_nodes * RANKS_PER_NODE
    beside = [max(main["ahead"][i]["beside_s"] for main in mains) for i in repeats]
    cpu = {arm: [sum(rank[arm][i]["cpu_s"] for rank in ranks) for i in repeats] for arm in ARMS}
    check = [sum(rank["ours"][i]["check_cpu_s"] for rank in ranks) for i in repeats]
    return {
        "model_mb": round(common["model_bytes"] / 1e6, 1),
        "buckets": common["buckets"],
        "tensors": common["tensors"],
        "world_collectives": ranks[0]["ours"][0]["across"],
        "world_collectives_trl": ranks[0]["trl"][0]["across"],
        "inbound_ratio": spread(inbound["ours"]),
        "inbound_ratio_trl": spread(inbound["trl"]),
        "inbound_ratio_world": spread(inbound["world"]),
        "inbound_limit": round(1.05 * (world - 1) / world, 3),
        "wall_s": {arm: spread(wall[arm]) for arm in ARMS},
        "stage_s": {stage: spread([s[stage] for s in stages]) for stage in stages[0]},
        "commit_s": spread([max(main["ours"][i]["commit_s"] for main in mains) for i in repeats]),
        "wall_vs_stages": ratios(stream, bound),
        "speedup_over_trl": ratios(wall["trl"], wall["ours"]),
        "speedup_over_world": ratios(wall["world"], wall["ours"]),
        "control_ratio": ratios(wall["control"], wall["ours"]),
        "pause_s": {arm: spread(pause[arm]) for arm in PAUSE_ARMS},
        "trainer_pause_ratio": ratios(pause["loading"], pause["alone"]),
        "pause_control_ratio": ratios(pause["again"], pause["alone"]),
        # an engine that has rows in flight is frozen for that long, and without these slots for the whole sync
        "load_beside_s": spread(beside),
        "frozen_ratio": ratios(beside, wall["ours"]),
        "cpu_speedup_over_trl": ratios(cpu["trl"], cpu["ours"]),
        "cpu_control_ratio": ratios(cpu["control"], cpu["ours"]),
        "gb_per_s": spread([common["model_bytes"] / 1e9 / s for s in wall["ours"]]),
        "cpu_s": spread(cpu["ours"]),  # of all ranks and engines
        "cpu_s_of": {arm: spread(cpu[arm]) for arm in ARMS},
        "cpu_share": spread(
            [a / (len(CORES) * b) for a, b in zip(cpu["ours"], wall["ours"], strict=True)]
        ),
        "check_share": spread([a / b for a, b in zip(check, cpu["ours"], strict=True)]),
        "extra_memory_buckets": round(max(r["memory"]["ours"] for r in ranks) / common["limit"], 2),
        "extra_memory_buckets_trl": round(
            max(r["memory"]["trl"] for r in ranks) / common["limit"], 2
        ),
        "largest_bucket_mb": round(common["largest_bucket"] / 1e6, 1),
        "worst_logprob_difference": max(d for main in mains for d in main["fresh"]),
        "stale_logprob_difference": min(d for main in mains for d in main["stale"]),
        "repeats": len(repeats),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="the small model, two nodes, fake engines, no file"
    )
    parser.add_argument("--out", type=Path, default=FOLDER / "results" / "sync.json")
    parser.add_argument(
        "--repeats", type=int, default=11, help="syncs of each arm and link (default: 11)"
    )
    arguments = parser.parse_args()
    start = time.monotonic()
    if arguments.quick:
        print(json.dumps(cell("40M", 2, FAKE, 2), indent=1))
        return
    cells = []
    for model, num_nodes in CELLS:
        cells += cell(model, num_nodes, REAL if num_nodes == 2 else FAKE, arguments.repeats)
        print(f"{time.monotonic() - start:.0f} s: {model}, {num_nodes} nodes done", flush=True)
        arguments.out.write_text(
            json.dumps({"ranks_per_node": RANKS_PER_NODE, "cells": cells}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
