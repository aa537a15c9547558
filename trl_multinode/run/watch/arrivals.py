"""Ranks that have imported this library: each registers, and those that are missing are named and end the run."""

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..reporter import report
from ..topology import Topology

if TYPE_CHECKING:
    from torch.distributed import Store

    from ..store import RunStore

START_TIMEOUT_S = 900.0  # `engine_start_timeout`'s default, until a trainer has its settings
MISSING_EVERY_S = 30.0
LOOK_EVERY_S = 5.0
NAMED_RANKS = 8


class Arrivals:
    """Chore of the watch thread until all ranks have imported this library.

    Args:
        topology (`Topology`):
            Topology of this rank.
        watch_rank (`Callable[[int, int], None]`):
            Function that is called with the number and the pid of each other rank of this node.
    """

    def __init__(self, topology: Topology, watch_rank: Callable[[int, int], None]):
        self._topology = topology
        self._watch_rank = watch_rank
        self.timeout_s = START_TIMEOUT_S
        self._neighbours = {rank for rank in topology.local_ranks if rank != topology.rank}  # not seen yet
        self._since = time.monotonic()
        self._next_look, self._next_line = 0.0, self._since + MISSING_EVERY_S
        self._registered = self._complete = False
        self._is_reporter: bool | None = None

    def look(self, store: "RunStore") -> str:
        """Register this rank, then look for the others; return the reason if the run must end without them."""
        late: list[str] = []
        store.lend(lambda client: late.append(self._look(client)))
        return late[0] if late else ""

    def _look(self, store: "Store") -> str:
        if not self._registered:
            store.set(f"pid/{self._topology.rank}", str(os.getpid()))
            store.add("here", 1)
            self._registered = True
        for rank in [rank for rank in self._neighbours if store.check([f"pid/{rank}"])]:
            self._neighbours.remove(rank)
            self._watch_rank(rank, int(store.get(f"pid/{rank}")))
        now = time.monotonic()
        if self._complete or now < self._next_look:
            return ""
        self._next_look = now + min(LOOK_EVERY_S, MISSING_EVERY_S)
        self._complete = store.add("here", 0) >= self._topology.world_size
        return "" if self._complete else self._name_missing(store, now)

    def _name_missing(self, store: "Store", now: float) -> str:
        """Report the missing ranks now and then; return why the run ends if they have been missing for too long.

        One rank of node 0 and one of the other nodes do this, because it takes a request per rank.
        """
        seconds = now - self._since
        if now < self._next_line and seconds < self.timeout_s:
            return ""
        self._next_line = now + MISSING_EVERY_S
        if self._is_reporter is None:
            self._is_reporter = store.add(f"reporter/{min(self._topology.node, 1)}/import", 1) == 1
        if not self._is_reporter:
            return ""
        missing = [rank for rank in range(self._topology.world_size) if not store.check([f"pid/{rank}"])]
        if not missing:
            return ""
        names = ", ".join(f"rank {rank} (node {self._topology.node_of(rank)})" for rank in missing[:NAMED_RANKS])
        if len(missing) > NAMED_RANKS:
            names += f" and {len(missing) - NAMED_RANKS} more"
        if seconds < self.timeout_s:
            report(f"{self._topology}: waiting {seconds:.0f} s for {names} to import trl_multinode")
            return ""
        return (
            f"PeerFailureError: {names} did not import trl_multinode within {self.timeout_s:.0f} s. Read the output "
            "of these ranks; `engine_start_timeout` is the limit, once a trainer has its settings."
        )
