"""Meeting of all ranks on the run's store, before they wait for each other inside a collective.

NCCL and gloo end a collective after `ddp_timeout` (1800 s by default), whether a rank has failed or is only slow. So
the ranks first meet here, where a wait has no limit: it ends when the last rank arrives, or with the run.

A rank may bring a request, and all ranks leave the meeting with the requests of all.

The ranks of a node meet in its memory. The local main process then arrives at the store for all, in 4 requests, and
the store wakes it. At 56 nodes of 8 ranks a meeting costs the store 3.7 ms of CPU time; with a client per rank it
was 36. The first two meetings, and those of a node whose ranks cannot open its memory, have a client per rank. The
judges of the heartbeats report whom the others wait for (`run/heartbeats/judges.py`).
"""

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistStoreError, Store

from .node_memory import NodeMemory
from .store import GRACE_S, STORE_TIMEOUT_S
from .topology import Topology

# of one request to the store, which is repeated; torch logs every one that runs out
LONGEST_WAIT = timedelta(days=1)
# Between two looks into the node's memory: first; after a wait of a second, which costs 0.3 % of a core
POLL_S, LONGEST_POLL_S = 0.0002, 0.01
# a byte of the memory has the number of a meeting, which is at most one ahead, and a flag
NUMBERS = 128


class Meeting:
    """Meeting of all ranks, as one of them takes part in it. A single process meets itself.

    ```python
    meeting = Meeting(topology, store)
    meeting.wait()  # every rank calls it equally often
    ```

    Args:
        topology (`Topology`):
            Topology of this rank.
        store (`torch.distributed.Store`):
            Client that only the thread which calls `wait` uses.
    """

    def __init__(self, topology: Topology, store: Store):
        self._topology = topology
        self._store = store
        self.arrivals = 0  # of this rank so far
        self.waits_since: float | None = None  # the begin of the wait that goes on
        # a byte per rank: its last meeting; then a byte of the last meeting that is over, and whether it has words
        self._node = NodeMemory(topology, "trl_multinode_meeting", topology.local_world_size + 1)
        self._by_node = False

    def wait(self, request: str = "") -> list[str]:
        """Wait until every rank has called this as often as the calling rank. If a rank fails, the run ends.

        Args:
            request (`str`, *optional*):
                Words that this rank brings, for example the engines that need weights.

        Returns:
            `list[str]`: the different words of all ranks, the same on every rank.
        """
        self.arrivals += 1
        self.waits_since = time.monotonic()
        try:
            return sorted(set(self._arrive(request).split()))
        except RuntimeError:
            # the store is gone; the watch thread ends this process
            time.sleep(STORE_TIMEOUT_S + 2 * GRACE_S)
            raise
        finally:
            self.waits_since = None

    def _arrive(self, request: str) -> str:
        store = self._store
        if request:  # before the arrival, so that the last rank finds it
            asked = f"asked/{self.arrivals}"
            store.append(asked, f"{request} ")
            store.check([asked])  # `append` has no reply, and another rank may arrive for this one
        if self._by_node:
            return self._arrive_at_node()
        apart = f"apart/{self._topology.node}"
        # the local main process makes the memory before the first meeting, the others open it before the second
        if self.arrivals == (1 if self._topology.is_local_main else 2):
            try:
                self._node.open(store)
            except OSError:  # /proc with `hidepid`, or ranks in containers of their own
                store.set(apart, "")
        requests = self._meet(1)
        self._by_node = self.arrivals == 2 and not store.check([apart])
        return requests

    def _arrive_at_node(self) -> str:
        """Arrive in the memory of the node, whose local main process arrives at the store for all its ranks."""
        memory, number = self._node.memory, self.arrivals % NUMBERS
        memory[self._topology.local_rank] = number
        if not self._topology.is_local_main:
            _look_until(lambda: memory[-1] % NUMBERS == number)
            met = f"met/{self.arrivals}"
            return self._store.get(met).decode() if memory[-1] >= NUMBERS else ""
        _look_until(lambda: {*memory[:-1]} == {number})
        requests = self._meet(self._topology.local_world_size)
        memory[-1] = number + (NUMBERS if requests else 0)
        return requests

    def _meet(self, num_ranks: int) -> str:
        """Arrive at the store for some ranks, and wait for the others."""
        store = self._store
        asked, met = f"asked/{self.arrivals}", f"met/{self.arrivals}"
        # more: repeated after a reset
        if store.add(f"arrived/{self.arrivals}", num_ranks) >= self._topology.world_size:
            requests = store.get(asked).decode() if store.check([asked]) else ""
            store.set(met, requests)  # wakes the others
            for key in ("arrived", "met", "asked"):
                store.delete_key(f"{key}/{self.arrivals - 2}")  # all have left that meeting
            return requests
        while not store.check([met]):
            with suppress(DistStoreError):  # `LONGEST_WAIT` is over
                store.wait([met], LONGEST_WAIT)
        return store.get(met).decode()

    def is_missed(self, store: Store) -> bool:
        """Return whether another rank waits for this one in a meeting to which it has not come."""
        number = self.arrivals + 1
        here = self._node.memory[:-1] if self._by_node else b""
        return number % NUMBERS in here or store.check([f"arrived/{number}"])


def _look_until(is_over: Callable[[], bool]) -> None:
    """Wait until `is_over`, and a hundredth longer at most."""
    start = time.monotonic()
    while not is_over():
        waited = time.monotonic() - start
        time.sleep(min(POLL_S + waited / 100, LONGEST_POLL_S))
