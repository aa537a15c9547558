"""Meeting of all ranks on the run's store, before they wait for each other inside a collective.

NCCL and gloo end a collective after `ddp_timeout` (1800 s by default), whether a rank has failed or is only slow. So
the ranks first meet here, where a wait has no limit: it ends when the last rank arrives, or with the run.

A rank may bring a request, and all ranks leave the meeting with the requests of all.

Costs, at 64 nodes of 7 ranks: a meeting takes 5 requests per rank (37 ms measured with 448 clients on 4 cores, of
which the store takes 27). The store wakes a rank that waits; no rank polls. The judges of the heartbeats report whom
the others wait for (`run/heartbeats/judges.py`).
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
    """Meeting of all ranks, as one of them takes part in it. A single process meets nobody.

    ```python
    meeting = Meeting(topology, store)
    meeting.wait()  # every rank calls it equally often
    ```

    Args:
        topology (`Topology`):
            Topology of this rank.
        store (`torch.distributed.Store`, *optional*):
            Client that only the thread which calls `wait` uses; `None` for a single process.
    """

    def __init__(self, topology: Topology, store: Store | None):
        self._topology = topology
        self._store = store
        self._number = 0  # of this rank's meetings so far
        self._waits_since: float | None = None

    def wait(self, request: str = "") -> list[str]:
        """Wait until every rank has called this as often as the calling rank. If a rank fails, the run ends.

        Args:
            request (`str`, *optional*):
                Words that this rank brings, for example the engines that need weights.

        Returns:
            `list[str]`: the different words of all ranks, the same on every rank.
        """
        if self._store is None:
            return sorted(set(request.split()))
        self._number += 1
        self._waits_since = time.monotonic()
        try:
            return sorted(set(self._arrive(self._store, request).split()))
        except RuntimeError:
            # the store is gone; the watch thread ends this process
            time.sleep(STORE_TIMEOUT_S + 2 * GRACE_S)
            raise
        finally:
            self._waits_since = None

    def _arrive(self, store: Store, request: str) -> str:
        store.set(f"at/{self._topology.rank}", str(self._number))
        asked, met = f"asked/{self._number}", f"met/{self._number}"
        if request:  # before the arrival, so that the last rank finds it
            store.append(asked, f"{request} ")
        # more: repeated after a reset
        if store.add(f"arrived/{self._number}", 1) >= self._topology.world_size:
            requests = store.get(asked).decode() if store.check([asked]) else ""
            store.set(met, requests)  # wakes the others
            for key in ("arrived", "met", "asked"):
                store.delete_key(f"{key}/{self._number - 2}")  # all have left that meeting
            return requests
        while not store.check([met]):
            with suppress(DistStoreError):  # `LONGEST_WAIT` is over
                store.wait([met], LONGEST_WAIT)
        return store.get(met).decode()

    @property
    def arrivals(self) -> int:
        return self._number

    @property
    def waits_since(self) -> float | None:
        """Time at which the wait began that goes on. Any thread may ask."""
        return self._waits_since
