"""Balance over 1 to 128 nodes, simulated: the real planner on made-up lengths, without a model or a network.

    python benchmarks/balance.py --nodes    # half a minute on one core; writes results/balance_nodes.json

Lengths are log-normal (median 1200 tokens, longest 8192, half of the spread common to a group of 8), the model has a
hidden size of 4096, and a micro-batch holds four of the longest rows. `node` keeps rows on their node, `world` deals
them to pools of at most 1024 rows and 64 ranks (the default), `one_pool` plans all rows at once, up to 4096 rows.
Figures are means of three draws. Milliseconds are CPU time of one rank's thread, the lowest of three: for the plan
with its sort, and for the rest of the rank's own work in one exchange, with a process group that sends nothing.
"""

import json
import os
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import table
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from trl_multinode.batches.batching import POOL_RANKS, POOL_ROWS, Plan, cost, plan_micro_steps
from trl_multinode.batches.row_exchange import RowExchange
from trl_multinode.run.topology import Topology

RANKS, GENERATIONS = 7, 8  # training ranks of a node, rows of a group
MEDIAN, SIGMA, LONGEST = 1200, 0.6, 8192  # tokens
LINEAR, CAP = 6 * 4096, 4 * LONGEST
ROW_BYTES = 25  # of a token in the exchange for training: its id and up to five numbers (batches/layouts.py)
NODES, ROWS = (1, 2, 4, 8, 16, 32, 64, 128), (8, 32, 128)  # of the run; of a rank
ONE_POOL_ROWS = 4096  # 3584 rows of 112 ranks take 0.14 s
SEEDS = 3


def lengths(ranks: int, rows: int, seed: int) -> np.ndarray:
    """Draw the lengths of all rows, shuffled within each rank, as TRL does: shape `(ranks, rows)`."""
    random, count = np.random.default_rng(seed), ranks * rows
    group = np.repeat(random.normal(size=-(-count // GENERATIONS)), GENERATIONS)[:count]
    tokens = np.clip(
        MEDIAN * np.exp(SIGMA * (group + random.normal(size=count))), 4, LONGEST
    ).astype(np.int64)
    return random.permuted(tokens.reshape(ranks, rows), axis=1)


def simulate(nodes: int, rows: int, across: str, **limits: int) -> dict[str, float]:
    """Plan the rows of some steps and return the means of the figures; milliseconds are the lowest."""
    found = []
    for seed in range(SEEDS):
        drawn = lengths(nodes * RANKS, rows, seed)
        reach = [nodes * RANKS] if across == "world" else [RANKS] * nodes
        start = time.thread_time()
        plan = plan_micro_steps(drawn, reach, CAP, LINEAR, **limits)
        planning = time.thread_time() - start
        times = {
            "planning_ms": planning * 1e3,
            "exchange_ms": exchange_seconds(plan, nodes, across) * 1e3,
        }
        found.append(figures(plan, nodes) | times)
    tracemalloc.start()
    plan_micro_steps(drawn, reach, CAP, LINEAR, **limits)
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    means = {
        name: float((min if name.endswith("_ms") else np.mean)([one[name] for one in found]))
        for name in found[0]
    }
    return means | {"planning_peak_mb": peak}


def exchange_seconds(plan: Plan, nodes: int, across: str) -> float:
    """Return the CPU seconds of one rank's own work for the exchange and the log, with records of the real sizes."""
    with group_that_sends_nothing(plan.ranks):
        exchange = RowExchange(
            Topology(1, plan.ranks, 1, RANKS, 0, nodes, False), across, torch.device("cpu")
        )
        sizes = plan.lengths * ROW_BYTES // 4
        own = range(
            exchange.rank * len(sizes) // plan.ranks, (exchange.rank + 1) * len(sizes) // plan.ranks
        )
        records = {row: torch.zeros(int(sizes[row]), dtype=torch.int32) for row in own}
        start = time.thread_time()
        exchange.move(records, sizes, plan.owners, plan.targets)
        plan.bins(exchange.rank), plan.costs(), plan.slots()
        return time.thread_time() - start


@contextmanager
def group_that_sends_nothing(ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=1, world_size=ranks, store=FakeStore())
    try:
        # the fake group refuses to receive where it sends nothing
        with mock.patch.object(dist, "all_to_all_single"):
            yield
    finally:
        dist.destroy_process_group()


def figures(plan: Plan, nodes: int) -> dict[str, float]:
    """Return what a plan is worth and what it moves."""
    costs, crossing = plan.costs(), plan.targets // RANKS != plan.owners // RANKS
    slowest = costs.max(axis=0).sum()
    return {
        "lock_step_efficiency": costs.sum() / (plan.ranks * slowest),
        "useful_share": cost(1, plan.lengths, LINEAR).sum() / (plan.ranks * slowest),
        "micro_steps": plan.micro_steps,
        "pools": plan.pools,
        "sent_mb_per_node": plan.lengths[crossing].sum() * ROW_BYTES / nodes / 1e6,
        "lengths_mb": len(plan.lengths) * 8 / 1e6,
    }


def run(output: Path) -> None:
    """Simulate all cells, print the table and write the results."""
    torch.set_num_threads(1)
    simulate(2, 32, "world")  # the first plan and exchange of a process are slower
    cells = []
    for rows in ROWS:
        for nodes in NODES:
            arms = {across: simulate(nodes, rows, across) for across in ("node", "world")}
            if (total := nodes * RANKS * rows) <= ONE_POOL_ROWS:
                arms["one_pool"] = simulate(nodes, rows, "world", pool_rows=total, pool_ranks=total)
            cells.append({"nodes": nodes, "ranks": RANKS, "rows": rows, "arms": arms})
    found = {
        "lengths": {"median": MEDIAN, "sigma": SIGMA, "longest": LONGEST, "generations": GENERATIONS, "cap": CAP},
        "pool_rows": POOL_ROWS, "pool_ranks": POOL_RANKS, "seeds": SEEDS, "row_bytes": ROW_BYTES, "cells": cells,
        "machine": {"cores": os.cpu_count(), "load": os.getloadavg()[0]},
    }  # fmt: skip
    output.write_text(json.dumps(found, indent=1) + "\n")
    print(table.balance_nodes(found))
