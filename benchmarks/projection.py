"""How long a sync would take for 7B to 70B models on 2 to 64 nodes. A projection: arithmetic, not a measurement.

    python benchmarks/projection.py

The formula is that of `trl_multinode/plan/sync_seconds.py`, which `trl-multinode plan` uses too.

The arithmetic has to predict the measured cells of `sync.json` first: k and c come from the 40 M cells on free links
alone (one k per number of nodes, because on this machine more nodes share the same two cores), the limited links' rate
is their setting less 4 % for headers. Cells of the 150 M model and of limited links are then predictions. For the
extrapolation k is of one node's own hardware, which is an assumption and printed as such.
"""

import json
from pathlib import Path

from trl_multinode.plan.sync_seconds import Cell, projected, seconds

RESULTS = Path(__file__).parent / "results"
GBIT = 1e9 / 8
HEADERS = 0.96
MODELS = {"7B": 7.6e9 * 2, "32B": 32.8e9 * 2, "70B": 70.6e9 * 2}  # parameters in bfloat16
NODES = (2, 4, 8, 16, 32, 64)
LINKS = {"100 Gbit/s": 100 * GBIT, "400 Gbit/s": 400 * GBIT}


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
        | {link: round(projected(size, nodes, rate), 2) for link, rate in LINKS.items()}
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
