"""Timings of a weight sync, and its metrics in the log."""

from dataclasses import dataclass, field

from ..wire.messages import WeightVersion

STAGES = ("total_s", "stream_s", "gather_s", "copy_s", "load_s", "commit_s", "frozen_s")


@dataclass
class SyncTimings:
    """Timings of one sync on one rank, in seconds. The stages overlap, so they do not add up to `total_s`."""

    total_s: float = 0.0  # from the first message to the committed version
    stream_s: float = 0.0  # part of `total_s`: from the first gather to the last bucket loaded
    gather_s: float = 0.0  # collectives, on every rank
    copy_s: float = 0.0  # copies into the slots, local main process only
    load_s: float = 0.0  # the slowest engine's own time for all buckets, local main process only
    commit_s: float = 0.0  # the engines' packing of the weights, local main process only
    frozen_s: float = (
        0.0  # the slowest engine's seconds with frozen completions, local main process only
    )
    num_bytes: int = 0  # bytes sent to each engine, after the cast to its dtype
    num_buckets: int = 0
    collectives: tuple[int, int] = (0, 0)  # across nodes, within a node
    version: WeightVersion = field(default_factory=WeightVersion)

    def stages(self) -> list[float]:
        """Return the seconds of `STAGES`, in their order."""
        return [getattr(self, name) for name in STAGES]


def sync_metrics(
    sync: SyncTimings, per_rank: list[list[float]], ranks_per_node: int
) -> dict[str, float]:
    """Return the metrics of the last weight sync, for `Trainer.log`.

    Args:
        sync (`SyncTimings`):
            Timings of this rank, for the fields that are equal on all ranks.
        per_rank (`list[list[float]]` of shape `(world_size, len(STAGES))`):
            Seconds of every rank; each stage is logged with the slowest rank's.
        ranks_per_node (`int`):
            Number of training ranks of every node.
    """
    slowest = {
        f"sync/{name}": max(rank[index] for rank in per_rank) for index, name in enumerate(STAGES)
    }
    totals = [rank[0] for rank in per_rank]
    return slowest | {
        "sync/mib": sync.num_bytes / 2**20,
        "sync/gb_per_s": sync.num_bytes / max(totals) / 1e9 if max(totals) else 0.0,
        "sync/buckets": sync.num_buckets,
        "sync/collectives": 1
        + sync.collectives[0],  # across nodes, including the barrier before them
        "sync/node_collectives": sync.collectives[1],
        "sync/version": sync.version.update,
        "sync/slowest_node": float(totals.index(max(totals)) // ranks_per_node),
    }
