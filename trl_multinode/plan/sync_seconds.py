"""Arithmetic of a weight sync's seconds. `benchmarks/projection.py` compares it with measured syncs.

T = max(link, node) + commit + fill         seconds
link = (N-1)/N x B / r                      B bytes of model into a node at r bytes a second
node = B x k                                everything inside a node: gathers between its ranks, copy, load
fill = min(link, node) / buckets            one bucket of the stage that is hidden behind the other
commit = B x c                              the engine's packing of the weights
"""

from dataclasses import dataclass

BUCKET = 512 * 2**20  # bytes; the default of `sync_bucket_mb`
# Assumed, not measured: page-locked copies over PCIe 5 x16 at 40 of 64 GB/s, once out of one GPU and once into the
# engine's (in parallel, so one of them counts); the gather inside the node is faster. Packing at 200 GB/s.
NODE_S_PER_BYTE, COMMIT_S_PER_BYTE = 1 / 40e9, 1 / 200e9


@dataclass(frozen=True)
class Cell:
    """Quantities that determine the seconds of a sync."""

    num_bytes: float
    nodes: int
    buckets: float
    rate: float  # bytes a second into a node; infinite on a link that is no bound
    node_s_per_byte: float
    commit_s_per_byte: float


def seconds(cell: Cell) -> float:
    """Return the seconds of a sync."""
    link = (cell.nodes - 1) / cell.nodes * cell.num_bytes / cell.rate
    node = cell.num_bytes * cell.node_s_per_byte
    return max(link, node) + min(link, node) / cell.buckets + cell.num_bytes * cell.commit_s_per_byte


def projected(num_bytes: float, nodes: int, rate: float) -> float:
    """Return the seconds of a sync on GPUs, with the assumed rates inside of a node."""
    return seconds(Cell(num_bytes, nodes, num_bytes / BUCKET, rate, NODE_S_PER_BYTE, COMMIT_S_PER_BYTE))
