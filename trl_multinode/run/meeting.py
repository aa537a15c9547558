"""Meeting of all ranks on the run's store, before they wait for each other inside a collective.

NCCL and gloo end a collective after `ddp_timeout` (1800 s by default), whether a rank has failed or is only slow. So
the ranks first meet here, where a wait has no limit: it ends when the last rank arrives, or with the run.

A rank may bring a request, and all ranks leave the meeting with the requests of all.

Costs, at 64 nodes of 7 ranks: a meeting takes 5 requests per rank (37 ms measured with 448 clients on 4 cores, of
which the store takes 27). The store wakes a rank that waits; no rank polls. Each rank also writes its state every 10
s at most, and only if it has changed: 45 requests/s, beside 900 of the watchdogs. After 15 s two ranks, one of node 0
and one of the other nodes, report whom they wait for; the other ranks stay silent.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistStoreError, Store

from .reporter import report
from .store import GRACE_S, STORE_TIMEOUT_S
from .topology import Topology

PROGRESS_EVERY_S = 15.0
STATE_EVERY_S = 10.0
NAMED_RANKS = 3  # a line of progress names no more ranks
LONGEST_WAIT = timedelta(days=1)  # of one request to the store, which is repeated; torch logs every one that runs out


class Meeting:
    """Meeting of all ranks, as one of them takes part in it. A single process meets nobody.

    ```python
    meeting = Meeting(topology, store, lambda: "generating, 12 rows left")
    watch.add_chore(meeting.report_progress)  # in the watch thread, because the main thread is blocked in `wait`
    meeting.wait()                            # every rank calls it equally often
    ```

    Args:
        topology (`Topology`):
            Topology of this rank.
        store (`torch.distributed.Store`, *optional*):
            Client that only the thread which calls `wait` uses; `None` for a single process.
        state (`Callable[[], str]`):
            Function that returns what this rank does, for the ranks that wait for it. The watch thread calls it.
    """

    def __init__(self, topology: Topology, store: Store | None, state: Callable[[], str]):
        self._topology = topology
        self._store = store
        self._state = state
        self._number = 0  # of this rank's meetings so far
        self._waits_since: float | None = None
        self._next_line = 0.0
        self._reports: tuple[int, bool] = (0, False)  # number of a meeting, and whether this rank reports about it
        self._written = ("", float("-inf"))  # state, time

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
        self._next_line = time.monotonic() + PROGRESS_EVERY_S
        self._waits_since = time.monotonic()
        try:
            return sorted(set(self._arrive(self._store, request).split()))
        except RuntimeError:
            time.sleep(STORE_TIMEOUT_S + 2 * GRACE_S)  # the store is gone; the watch thread ends this process
            raise
        finally:
            self._waits_since = None

    def _arrive(self, store: Store, request: str) -> str:
        store.set(f"at/{self._topology.rank}", str(self._number))
        asked, met = f"asked/{self._number}", f"met/{self._number}"
        if request:  # before the arrival, so that the last rank finds it
            store.append(asked, f"{request} ")
        if store.add(f"arrived/{self._number}", 1) >= self._topology.world_size:  # more: repeated after a reset
            requests = store.get(asked).decode() if store.check([asked]) else ""
            store.set(met, requests)  # wakes the others
            for key in ("arrived", "met", "asked", "reporter/0", "reporter/1"):
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
    def waits(self) -> bool:
        return self._waits_since is not None

    # ---- the watch thread, with a client of its own -----------------------------------------------------------------

    def report_progress(self, store: Store) -> None:
        """Write this rank's state if it has changed, and report for whom it waits. The watch thread calls it often."""
        now = time.monotonic()
        self._write_state(store, now)
        number, since = self._number, self._waits_since
        if since is None or now < self._next_line:
            return
        self._next_line = now + PROGRESS_EVERY_S
        if self._is_reporter(store, number):
            late = [rank for rank in range(self._topology.world_size) if _at(store, rank) < number]
            if late:
                report(f"{self._topology}: waiting {now - since:.0f} s for {self._names(store, late)}")

    def _write_state(self, store: Store, now: float) -> None:
        text, written = self._written
        if now - written < STATE_EVERY_S or (state := self._state()) == text:
            return
        store.set(f"state/{self._topology.rank}", state)
        self._written = (state, now)

    def _is_reporter(self, store: Store, number: int) -> bool:
        """Return whether this rank is the first one on its side (node 0, other nodes) that has waited long."""
        if self._reports[0] != number:
            self._reports = (number, store.add(f"reporter/{min(self._topology.node, 1)}/{number}", 1) == 1)
        return self._reports[1]

    def _names(self, store: Store, late: list[int]) -> str:
        count = f"{len(late)} ranks: " if len(late) > 1 else ""
        return count + "; ".join(self._named(store, late))

    def _named(self, store: Store, late: list[int]) -> Iterator[str]:
        for rank in late[:NAMED_RANKS]:
            key = f"state/{rank}"
            state = store.get(key).decode() if store.check([key]) else "in an unknown phase"
            yield f"rank {rank} (node {rank // self._topology.ranks_per_node}), {state}"
        if len(late) > NAMED_RANKS:
            yield "..."


def _at(store: Store, rank: int) -> int:
    """Return the number of the last meeting at which `rank` has arrived."""
    key = f"at/{rank}"
    return int(store.get(key)) if store.check([key]) else 0
