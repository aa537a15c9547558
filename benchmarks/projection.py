"""How long a sync would take for 7B to 70B models on 2 to 64 nodes. A projection: arithmetic, not a measurement.

    python benchmarks/projection.py

    T = max(link, node) + commit + fill         seconds
    link = (N-1)/N x B / r                      B bytes of model into a node at r bytes a second
    node = B x k                                everything inside a node: gathers between its ranks, copy, load
    fill = min(link, node) / buckets            one bucket of the stage that is hidden behind the other
    commit = B x c                              the engine's packing of the weights

The arithmetic has to predict the measured cells of `sync.json` first: k and c come from the 40 M cells on free links
alone (one k per number of nodes, because on this machine more nodes share the same two cores), the limited links' rate
is their setting less 4 % for headers. Cells of the 150 M model and of limited links are then predictions. For the
extrapolation k is of one node's own hardware, which is an assumption and printed as such.
"""

import json
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
GBIT = 1e9 / 8
HEADERS = 0.96
MODELS = {"7B": 7.6e9 * 2, "32B": 32.8e9 * 2, "70B": 70.6e9 * 2}  # parameters in bfloat16
NODES = (2, 4, 8, 16, 32, 64)
LINKS = {"100 Gbit/s": 100 * GBIT, "400 Gbit/s": 400 * GBIT}
BUCKET = 512 * 2**20
# Assumed, not measured: page-locked copies over PCIe 5 x16 at 40 of 64 GB/s, once out of one GPU and once into the
# engine's (in parallel, so one of them counts); the gather inside the node is faster. Packing at 200 GB/s.
NODE_S_PER_BYTE, COMMIT_S_PER_BYTE = 1 / 40e9, 1 / 200e9


@dataclass(frozen=True)
class Cell:
    """What a projection is made of."""

    num_bytes: float
    nodes: int
    buckets: float
    rate: float  # bytes a second into a node; infinite on a link that is no bound
    node_s_per_byte: float
    commit_s_per_byte: float


def seconds(cell: Cell) -> float:
    link = (cell.nodes - 1) / cell.nodes * cell.num_bytes / cell.rate
    node = cell.num_bytes * cell.node_s_per_byte
    return max(link, node) + min(link, node) / cell.buckets + cell.num_bytes * cell.commit_s_per_byte


def check(cells: list[dict]) -> list[dict]:
    """Predicted and measured seconds of every cell."""
    free = {c["nodes"]: c for c in cells if c["model"] == "40M" and c["link"] == "free"}
    rows = []
    for cell in cells:
        known = free[cell["nodes"]]
        known_bytes, num_bytes = known["model_mb"] * 1e6, cell["model_mb"] * 1e6
        commit = known["commit_s"]["median"] / known_bytes
        node = known["wall_s"]["ours"]["median"] / known_bytes - commit
        rate = float("inf") if cell["link"] == "free" else GBIT * HEADERS
        predicted = seconds(Cell(num_bytes, cell["nodes"], cell["buckets"], rate, node, commit))
        measured = cell["wall_s"]["ours"]["median"]
        rows.append(
            {
                "model": cell["model"],
                "nodes": cell["nodes"],
                "link": cell["link"],
                "fitted": cell is known,
                "measured_s": measured,
                "predicted_s": round(predicted, 3),
                "error": round(predicted / measured - 1, 3),
            }
        )
    return rows


def extrapolate() -> list[dict]:
    return [
        {"model": model, "nodes": nodes}
        | {
            link: round(seconds(Cell(size, nodes, size / BUCKET, rate, NODE_S_PER_BYTE, COMMIT_S_PER_BYTE)), 2)
            for link, rate in LINKS.items()
        }
        for model, size in MODELS.items()
        for nodes in NODES
    ]


def main() -> None:
    cells = json.loads((RESULTS / "sync.json").read_text())["cells"]
    rows = check(cells)
    worst = max(abs(row["error"]) for row in rows)
    found = {"worst_error": worst, "limit": 0.15, "cells": rows, "projected": extrapolate()}
    (RESULTS / "projection.json").write_text(json.dumps(found, indent=1) + "\n")
    for row in rows:
        print(row)
    print("worst error", worst)


if __name__ == "__main__":
    main()
