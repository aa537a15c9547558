"""Offset of a node's wall clock from that of node 0, so that the phases of all nodes fit on one time axis.

The local main process of each node asks rank 0 for its time through the run's store and halves the round trip, as NTP
does. At 64 nodes that takes 63 x 3 exchanges of about half a millisecond on rank 0, once per run.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch.distributed import Store

from .topology import Topology

EXCHANGES = 3  # the one with the shortest round trip counts
LONGEST_WAIT = timedelta(seconds=5)  # for a rank that has just left the same meeting


def clock_offset(
    topology: Topology, store: Store, now: Callable[[], float] = time.time
) -> float | None:
    """Return the seconds by which this node's clock is ahead of node 0's. Every rank calls it, right after a meeting.

    Args:
        topology (`Topology`):
            Topology of the calling rank.
        store (`torch.distributed.Store`):
            Client of this thread.
        now (`Callable[[], float]`, *optional*):
            Clock of this node.

    Returns:
        `float` or `None`: `None` if a rank did not respond within 5 s; a run does not end for that.
    """
    with suppress(RuntimeError):  # the store's errors; if it is gone, the watchdog ends the run
        if topology.rank == 0:
            _serve(topology, store, now)
        if topology.node == 0:
            return 0.0
        if topology.is_local_main:
            store.set(f"clock/{topology.node}", repr(_ask(topology.node, store, now)))
        return round(float(_read(store, f"clock/{topology.node}")), 6)
    return None


def _serve(topology: Topology, store: Store, now: Callable[[], float]) -> None:
    for node in range(1, topology.num_nodes):
        for number in range(EXCHANGES):
            _read(store, f"clock/{node}/{number}/question")
            store.set(f"clock/{node}/{number}/answer", repr(now()))


def _ask(node: int, store: Store, now: Callable[[], float]) -> float:
    """Return the offset by the exchange with the shortest round trip."""
    found = []
    for number in range(EXCHANGES):
        start = now()
        store.set(f"clock/{node}/{number}/question", "")
        answer = float(_read(store, f"clock/{node}/{number}/answer"))
        end = now()
        found.append((end - start, (start + end) / 2 - answer))
    return min(found)[1]


def _read(store: Store, key: str) -> bytes:
    store.wait([key], LONGEST_WAIT)
    return store.get(key)
