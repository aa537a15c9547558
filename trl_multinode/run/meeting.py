"""Meeting of all ranks on the run's store, before they wait for each other inside a collective.

NCCL and gloo end a collective after `ddp_timeout` (1800 s by default), whether a rank has failed or is only slow. So
the ranks first meet here, where a wait has no limit: it ends when the last rank arrives, or with the run.

A rank may bring a request, and all ranks leave the meeting with the requests of all.

The last rank to come wakes the others; at 56 nodes of 8 ranks that costs the store about 30 ms of CPU time. The judges
of the heartbeats report whom the others wait for (`run/heartbeats/judges.py`).
"""

import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistStoreError, Store

from .store import GRACE_S, STORE_TIMEOUT_S
from .topology import Topology

# of one request to the store, which is repeated; torch logs every one that runs out
LONGEST_WAIT = timedelta(days=1)


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
        store, number = self._store, self.arrivals
        came, met = f"came/{number}", f"met/{number}"
        # before the arrival counts, so that the last rank finds it
        store.append(came, f"{self._topology.rank} {request}\n")
        if store.add(f"arrived/{number}", 1) >= self._topology.world_size:
            # both calls are repeated after a reset, so that a rank may count twice
            lines = store.get(came).decode().splitlines()
            found = dict(line.split(" ", 1) for line in lines)
            if len(found) == self._topology.world_size:
                requests = " ".join(found.values())
                store.set(met, requests)  # wakes the others
                for key in ("arrived", "met", "came"):
                    store.delete_key(f"{key}/{number - 2}")  # all have left that meeting
                return requests
        while not store.check([met]):
            with suppress(DistStoreError):  # `LONGEST_WAIT` is over
                store.wait([met], LONGEST_WAIT)
        return store.get(met).decode()

    def is_missed(self, store: Store) -> bool:
        """Return whether another rank waits for this one in a meeting to which it has not come."""
        return store.check([f"arrived/{self.arrivals + 1}"])
