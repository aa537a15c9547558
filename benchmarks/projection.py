"""Seconds of a weight sync for 7B to 405B models on 2 to 128 nodes. A projection: arithmetic, not a measurement.

    python benchmarks/projection.py                                prints the tables, writes results/projection.json
    python benchmarks/projection.py --nic 200 --gpu-host 20        other hardware: prints only
    python benchmarks/projection.py --unlocked worker --rails 1    other settings: prints only
    python benchmarks/projection.py --png docs/operate/projection.png      the picture

`trl_multinode/tools/plan/sync_seconds.py` has the formula, which `trl-multinode plan` uses too. docs/operate/sizing.md
explains the tables.

The arithmetic has to predict the measured cells of `sync_whole_tensors.json` first: those of a run before large
tensors were sent in ranges, whose controls are 0.97 to 1.06; in the later `sync.json` they are 0.75 to 1.21. The
seconds per byte of each stage and of the commit come from the 40 M cells on free links alone: one set per number of
nodes, because on this machine more nodes share the same two cores, and scaled so that they add up to that cell's
measured seconds, because its stages share the cores too. The limited links' rate is their setting less 4 % for
headers. Cells of the 150 M model and of limited links are then predictions. For GPUs no seconds per byte were
measured, so `RATES` stand in for them.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from published import OTHERS, PUBLISHED, Published
from rich import box
from rich.console import Console
from rich.table import Table

from trl_multinode.tools.plan.sync_seconds import (
    NIC_SHARE,
    TRANSPORTS,
    Rates,
    Sync,
    load_seconds,
    pause_seconds,
    pipelined,
    projected,
    stage_seconds,
)

RESULTS = Path(__file__).parent / "results"
MEASURED = "sync_whole_tensors.json"
GBIT = 1e9 / 8
HEADERS = 0.96
WIDTH = 132  # of a line that is no terminal's
LIMIT = 0.15  # of the error on a measured cell
GPUS = 8  # of a node
RATES = Rates()
NODES = (2, 4, 8, 16, 32, 64, 128)
LOCKS = {
    "both": (True, True),
    "sender only": (True, False),
    "worker only": (False, True),
    "neither": (False, False),
}
NVBANDWIDTH = "https://github.com/NVIDIA/nvbandwidth/issues/24"
NVLINK = "https://github.com/NVIDIA/nccl/issues/1264"
SOURCES = {
    "nic": ("one NIC, 400 Gbit/s", f"line rate; NCCL's payload gets {NIC_SHARE:.0%}",
            "https://github.com/NVIDIA/nccl-tests/issues/290"),
    "locked": ("PCIe 5 x16, page-locked", "chosen: others measured 53 from an H100, and 35 to 57 to it", NVBANDWIDTH),
    "pageable": ("PCIe 5 x16, not page-locked", "assumed: one core copies into the driver's buffers", None),
    "host_memory": ("all GPUs of a node into its memory", "assumed, low", None),
    "nvlink": ("NVLink 4, between two GPUs", "four fifths of 380, which others measured between two H100", NVLINK),
    "device": ("copy within a GPU", "half of 2570 of reading and writing, measured by others", NVLINK),
    "pack": ("packing in the engine", "assumed", None),
    "hop_s": ("between two nodes of a ring", "NCCL's own model, `hwLat` of src/graph/tuning.cc",
              "https://github.com/NVIDIA/nccl/blob/5067397c2676d5aed50042fc39e5c8ee96eb0027/src/graph/tuning.cc#L171"),
    "call_s": ("vLLM's loaders, per call", "rounded from benchmarks/loader_calls.py, on a CPU", None),
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A model in bfloat16 and the split of a node that holds it."""

    parameters: float
    calls: int  # of vLLM's loaders
    reserved: int = 1  # GPUs of a node's engine, over which its weights are spread

    @property
    def num_bytes(self) -> float:
        """Bytes of the weights in bfloat16."""
        return 2 * self.parameters

    @property
    def ranks(self) -> int:
        """Training ranks of a node."""
        return GPUS - self.reserved

    def sync(self, nodes: int, rails: int | None = None, **more) -> Sync:
        """Return a sync of this model; `None`: one rail per training rank."""
        used, engine = min(rails or self.ranks, self.ranks), self.reserved
        return Sync(self.num_bytes, nodes, self.ranks, used, engine, engine, self.calls, **more)


# Qwen2.5-7B, Qwen3-32B, Llama 3 70B, Qwen3-235B-A22B, Llama 3.1 405B
MODELS = {
    "7B": Model(7.616e9, 339),
    "32B": Model(32.762e9, 707),
    "70B": Model(70.554e9, 723, 2),
    "235B": Model(235.094e9, 1131, 4),
    "405B": Model(405.853e9, 1137, 4),
}


@dataclass(frozen=True)
class Cell:
    """Quantities that determine the seconds of a measured sync."""

    num_bytes: float
    nodes: int
    largest: float  # bytes of the largest bucket, which a stage that waits for the others waits for
    rate: float  # bytes a second into a node; infinite on a link that is no bound
    stage_s_per_byte: tuple[float, ...]  # inside of a node: gathers between its ranks, copy, load
    commit_s_per_byte: float


def seconds(cell: Cell) -> float:
    """Return the seconds of a measured sync."""
    link = (cell.nodes - 1) / cell.nodes * cell.num_bytes / cell.rate
    stages = (link, *(cell.num_bytes * each for each in cell.stage_s_per_byte))
    return (
        pipelined(stages, cell.num_bytes / cell.largest) + cell.num_bytes * cell.commit_s_per_byte
    )


def check(cells: list[dict]) -> list[dict]:
    """Return the predicted and the measured seconds of every cell."""
    free = {c["nodes"]: c for c in cells if c["model"] == "40M" and c["link"] == "free"}
    rows = []
    for cell in cells:
        known = fitted(free[cell["nodes"]])
        rate = float("inf") if cell["link"] == "free" else GBIT * HEADERS
        sizes = {"num_bytes": cell["model_mb"] * 1e6, "largest": cell["largest_bucket_mb"] * 1e6}
        predicted = seconds(replace(known, rate=rate, **sizes))
        measured = cell["wall_s"]["ours"]["median"]
        rows.append(
            {
                "model": cell["model"],
                "nodes": cell["nodes"],
                "link": cell["link"],
                "fitted": cell is free[cell["nodes"]],
                "measured_s": measured,
                "predicted_s": round(predicted, 3),
                "error": round(predicted / measured - 1, 3),
            }
        )
    return rows


def fitted(cell: dict) -> Cell:
    """Return a measured cell whose seconds per byte reproduce its own seconds."""
    num_bytes, largest = cell["model_mb"] * 1e6, cell["largest_bucket_mb"] * 1e6
    stages = [stage["median"] / num_bytes for stage in cell["stage_s"].values()]
    commit = cell["commit_s"]["median"] / num_bytes
    raw = Cell(num_bytes, cell["nodes"], largest, float("inf"), tuple(stages), commit)
    scale = cell["wall_s"]["ours"]["median"] / seconds(raw)
    return replace(
        raw,
        stage_s_per_byte=tuple(scale * each for each in stages),
        commit_s_per_byte=scale * commit,
    )


def extrapolate(rates: Rates, rails: int | None, **locks: bool) -> list[dict]:
    """Return one row per model and transport, with the seconds and the slowest stage for each number of nodes."""
    rows = []
    for name, model in MODELS.items():
        for transport in TRANSPORTS:
            syncs = {
                nodes: model.sync(nodes, rails, transport=transport, **locks) for nodes in NODES
            }
            rows.append(
                {
                    "model": name,
                    "split": f"{model.ranks}+{model.reserved}",
                    "gb": round(model.num_bytes / 1e9, 1),
                    "gb_per_gpu": round(model.num_bytes / model.reserved / 1e9, 1),
                    "transport": transport,
                    "rails": syncs[2].rails,
                    "seconds": {
                        nodes: round(projected(sync, rates), 2) for nodes, sync in syncs.items()
                    },
                    "slowest": {nodes: slowest(sync, rates) for nodes, sync in syncs.items()},
                }
            )
    return rows


def pauses(rates: Rates, rails: int | None, **locks: bool) -> list[dict]:
    """Return one row per model, with the seconds for which training waits if every bucket has a slot of its own."""
    rows = []
    for name, model in MODELS.items():
        syncs = {nodes: model.sync(nodes, rails, **locks) for nodes in NODES}
        rows.append(
            {
                "model": name,
                "split": f"{model.ranks}+{model.reserved}",
                "seconds": {
                    nodes: round(pause_seconds(sync, rates), 2) for nodes, sync in syncs.items()
                },
                "load_s": round(load_seconds(syncs[2], rates), 2),
            }
        )
    return rows


def slowest(sync: Sync, rates: Rates) -> str:
    """Return the name of the stage behind which the others hide."""
    stages = stage_seconds(sync, rates)
    del stages["commit"]
    return max(stages, key=lambda name: stages[name])


def page_locks(rates: Rates, nodes: int = 64) -> list[dict]:
    """Return the seconds through host memory with each side page-locked or not, on one rail per training rank."""
    return [
        {"locked": words}
        | {
            name: round(
                projected(model.sync(nodes, sender_locked=sender, worker_locked=worker), rates), 2
            )
            for name, model in MODELS.items()
        }
        for words, (sender, worker) in LOCKS.items()
    ]


def beside(other: Published, rates: Rates) -> dict:
    """Return a published sync, with ours of this model in bfloat16 through each transport on all rails."""
    reserved = 1 if other.parameters < 50 else 4
    model = Model(other.parameters * 1e9, other.calls, reserved)
    ours = {
        kind: round(projected(model.sync(other.nodes, transport=kind), rates), 2)
        for kind in TRANSPORTS
    }
    names = ("who", "model", "gb", "gpus", "low_s", "high_s", "way", "source", "nodes")
    link = other.gb * 1e9 / (rates.nic * NIC_SHARE)
    return {name: getattr(other, name) for name in names} | {
        "one_nic_s": round(link, 2),
        "ours": ours,
    }


# ---- tables: a title, the heads of the columns, the rows

LEFT = {"what", "how it was got", "model", "split", "transport", "slowest stage", "page-locked"}
LEFT |= {"who", "training + engines"}


def grid(rows: list[dict], words: str) -> tuple[str, list[str], list[list[str]]]:
    """Return the table of seconds of one network."""
    heads = ["model", "split", "GB", "per GPU", "transport", *map(str, NODES), "slowest stage"]
    lines = []
    for row in rows:
        first = row["transport"] == TRANSPORTS[0]
        about = (
            [row["model"], row["split"], f"{row['gb']:.0f}", f"{row['gb_per_gpu']:.0f}"]
            if first
            else [""] * 4
        )
        stages = list(dict.fromkeys(row["slowest"].values()))
        took = (
            f"{value:.2f}" if value < 10 else f"{value:.1f}" for value in row["seconds"].values()
        )
        lines.append([*about, row["transport"], *took, ", then ".join(stages)])
    return f"Seconds of a sync on 2 to 128 nodes, {words}", heads, lines


def tables(found: dict) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield the tables of a projection, without the measured cells."""
    inputs = found["inputs"].values()
    yield (
        "Rates that go in; none was measured on a GPU by us",
        ["what", "rate", "how it was got"],
        [[each["what"], each["text"], each["how"]] for each in inputs],
    )
    for words, rows in found["projected"].items():
        yield grid(rows, words)
    for words, rows in found["pauses"].items():
        yield (
            f"Seconds for which training waits with a slot for each bucket, {words}",
            ["model", "split", *map(str, NODES), "load and commit, beside it"],
            [
                [row["model"], row["split"], *(f"{s:.2f}" for s in row["seconds"].values()), f"{row['load_s']:.1f}"]
                for row in rows
            ],
        )  # fmt: skip
    yield (
        "Seconds through host memory on 64 nodes, page-locked or not, one NIC per training rank",
        ["page-locked", *MODELS],
        [[row["locked"], *(f"{row[name]:.1f}" for name in MODELS)] for row in found["page_locks"]],
    )
    heads = ["who", "model", "GB", "training + engines", "one NIC", "theirs", *TRANSPORTS, "nodes"]
    rows = []
    for row in found["published"]:
        took = (
            f"{row['low_s']:g}"
            if row["low_s"] == row["high_s"]
            else f"{row['low_s']:g} to {row['high_s']:g}"
        )
        ours = [f"{row['ours'][kind]:.1f}" for kind in TRANSPORTS]
        rows.append(
            [row["who"], row["model"], f"{row['gb']:.0f}", row["gpus"], f"{row['one_nic_s']:.1f}", took, *ours,
             str(row["nodes"])]
        )  # fmt: skip
    yield (
        "Seconds that others measured, and our arithmetic in bfloat16 with one NIC per training rank",
        heads,
        rows,
    )


def show(found: dict, console: Console) -> None:
    """Print the tables."""
    for title, heads, rows in tables(found):
        table = Table(
            title=title,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        for head in heads:
            table.add_column(head, justify="left" if head in LEFT else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console.print(table)


# ---- the command


def inputs(rates: Rates) -> dict:
    """Return each rate with its words and its source."""
    found = {}
    for name, (what, how, source) in SOURCES.items():
        value = getattr(rates, name)
        text = f"{value * 1e6:.0f} us" if name.endswith("_s") else f"{value / 1e9:g} GB/s"
        how = how if value == getattr(RATES, name) else "from the command line"
        found[name] = {"value": value, "what": what, "text": text, "how": how, "source": source}
    return found


def project(
    rates: Rates = RATES, rails: int | None = None, sender: bool = True, worker: bool = True
) -> dict:
    """Return everything but the measured cells; without `rails`, on one NIC and on one per training rank."""
    locks = {"sender_locked": sender, "worker_locked": worker}
    both = {"one NIC per node": 1, "one NIC per training rank (seven rails with 7+1)": None}
    networks = {f"{rails} NICs per node": rails} if rails else both
    return {
        "inputs": inputs(rates),
        "projected": {
            words: extrapolate(rates, number, **locks) for words, number in networks.items()
        },
        "pauses": {words: pauses(rates, number, **locks) for words, number in networks.items()},
        "page_locks": page_locks(rates),
        "published": [beside(other, rates) for other in PUBLISHED],
        "others": OTHERS,
    }


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nic", type=float, default=400, help="Gbit/s of one NIC (default: 400)")
    parser.add_argument(
        "--gpu-host", type=float, default=40, help="GB/s between GPU and page-locked memory (40)"
    )
    parser.add_argument(
        "--host-memory", type=float, default=100, help="GB/s of all GPUs of a node into it (100)"
    )
    parser.add_argument(
        "--nvlink", type=float, default=300, help="GB/s between two GPUs of a node (default: 300)"
    )
    parser.add_argument(
        "--rails", type=int, choices=range(1, GPUS), help="NICs of a node (default: one, and all)"
    )
    parser.add_argument(
        "--unlocked", choices=("sender", "worker", "both"), help="sides without page-locked memory"
    )
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="draw the picture, with matplotlib"
    )
    return parser


def main() -> None:
    """Check the formula against the measured cells, then print and record the projection."""
    options = arguments().parse_args()
    rates = replace(
        RATES,
        nic=options.nic * GBIT,
        locked=options.gpu_host * 1e9,
        host_memory=options.host_memory * 1e9,
        nvlink=options.nvlink * 1e9,
    )
    locked = {side: options.unlocked not in (side, "both") for side in ("sender", "worker")}
    found = project(rates, options.rails, **locked)
    rows = check(json.loads((RESULTS / MEASURED).read_text())["cells"])
    worst = max(abs(row["error"]) for row in rows)
    show(found, Console(width=None if Console().is_terminal else WIDTH, highlight=False))
    print(
        f"Measured cells of {MEASURED}: the formula is at most {worst:.0%} off, the limit is {LIMIT:.0%}."
    )
    if found == project():
        recorded = {"worst_error": worst, "limit": LIMIT, "cells": rows} | found
        (RESULTS / "projection.json").write_text(json.dumps(recorded, indent=1) + "\n")
    if options.png:
        from projection_picture import draw

        draw(found, options.png)
    if worst > LIMIT:
        raise SystemExit(
            "The formula does not describe the measured syncs: see the column `error` in RESULTS.md."
        )


if __name__ == "__main__":
    main()
