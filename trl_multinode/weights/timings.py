"""Timings of a weight sync, and its metrics in the log."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..run.topology import Topology
from ..wire.messages import WeightVersion

STAGES = ("total_s", "stream_s", "gather_s", "copy_s", "load_s", "commit_s", "frozen_s")


@dataclass
class SyncTimings:
    """Timings of one sync on one rank, in seconds. The stages overlap, so they do not add up to `total_s`."""

    num_bytes: int = 0  # bytes sent to each engine, after the cast to its dtype
    num_buckets: int = 0
    # from the first message to the committed version, or to the last bucket in its slot if each has one
    total_s: float = 0.0
    stream_s: float = 0.0  # part of `total_s`: from the first gather to the last bucket loaded
    gather_s: float = 0.0  # collectives, on every rank; on a GPU by its own clock, like `copy_s`
    copy_s: float = 0.0  # copies into the slots, local main process only
    load_s: float = 0.0  # the slowest engine's own time for all buckets, local main process only
    commit_s: float = 0.0  # the engines' packing of the weights, local main process only
    # the slowest engine's seconds with frozen completions, local main process only
    frozen_s: float = 0.0
    collectives: tuple[int, int] = (0, 0)  # across nodes, within a node
    version: WeightVersion = field(default_factory=WeightVersion)
    # stage, and the events on a GPU's stream at its begin and end
    _events: list[tuple[str, Any, Any]] = field(default_factory=list, repr=False, compare=False)

    @contextmanager
    def stage(self, name: str, device: torch.device) -> Iterator[None]:
        """Add the seconds of a stage that this thread starts inside.

        On a GPU they lie between two events of the thread's stream: the calls only queue work, so the host's clock
        would count the collectives as copies, which wait for them. `settle` reads the events.
        """
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            begin = stream.record_event(torch.cuda.Event(enable_timing=True))
            yield
            end = stream.record_event(torch.cuda.Event(enable_timing=True))
            self._events.append((name, begin, end))
        else:
            start = time.perf_counter()
            yield
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)

    def add(self, seconds: dict[str, float]) -> None:
        """Set the engines' seconds by stage: of this update, or of the one before if they load beside training."""
        vars(self).update(seconds)

    def settle(self) -> None:
        """Add the seconds between the events, after the last stage; wait for it if necessary."""
        while self._events:
            name, begin, end = self._events.pop()
            end.synchronize()
            setattr(self, name, getattr(self, name) + begin.elapsed_time(end) / 1000)

    def stages(self) -> list[float]:
        """Return the seconds of `STAGES`, in their order."""
        return [getattr(self, name) for name in STAGES]


def sync_metrics(
    sync: SyncTimings, per_rank: list[list[float]], topology: Topology
) -> dict[str, float]:
    """Return the metrics of the last weight sync, for `Trainer.log`.

    Args:
        sync (`SyncTimings`):
            Timings of this rank, for the fields that are equal on all ranks.
        per_rank (`list[list[float]]` of shape `(world_size, len(STAGES))`):
            Seconds of every rank; each stage is logged with the slowest rank's.
        topology (`Topology`):
            Topology of this rank.
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
        "sync/slowest_node": float(topology.node_of(totals.index(max(totals)))),
    }
