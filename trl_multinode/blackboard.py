"""What the ranks of a run tell each other, apart from tensors: keys in the launcher's own rendezvous store.

| key | written by | says |
|---|---|---|
| `fatal` | the first rank that fails | the line that every rank prints |
| `readers` | every rank that read it | how many |
| `done` | every rank that is through | how many |
| `pid/<rank>` | every rank | its pid, for the ranks of its node |
| `folder/<node>` | local main processes | where the node's engines listen |
"""

import os
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

from .topology import Topology

GRACE_S = 6.0  # for all ranks to read the line; after it they leave unread
STORE_TIMEOUT_S = 20.0  # a store that answers nothing for so long is gone
PROGRESS_EVERY_S = 30.0


def connect_store(topology: Topology, run: int, environ=os.environ) -> Store | None:
    """A new client of the run's own rendezvous store; `None` for a single process.

    Every thread needs a client of its own: one that waits for a key blocks all other calls on it.

    Args:
        topology (`Topology`):
            Of this rank.
        run (`int`):
            Number of the trainer in this process; keeps the keys of several trainers apart.
    """
    if topology.world_size == 1:
        return None
    client = TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=STORE_TIMEOUT_S),
        wait_for_workers=False,
    )
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"trl_multinode/{attempt}/{run}", client)


def when_written(store: Store, key: str, news: str) -> str:
    """What `key` says once somebody wrote it; `news` every 30 s. No limit of its own: the watch ends it."""
    said = time.monotonic()
    while not store.check([key]):
        time.sleep(0.1)
        if time.monotonic() - said > PROGRESS_EVERY_S:
            said = time.monotonic()
            print(f"[trl_multinode] {news}", flush=True)
    return store.get(key).decode()


class Blackboard:
    """A rank's view of the keys about the end of the run. With a single process there is nobody to tell.

    Every method that reads answers `store_gone()` when the store does not answer: that too ends the run.

    Args:
        topology (`Topology`), run (`int`):
            See [`connect_store`].
    """

    def __init__(self, topology: Topology, run: int):
        self._topology = topology
        self._store = connect_store(topology, run)

    @property
    def alone(self) -> bool:
        return self._store is None

    def give_up(self) -> None:
        """The store is silent: do not ask it again."""
        self._store = None

    def tell(self, line: str) -> str:
        """Write the fatal line unless another is there already; returns the one that counts."""
        if self._store is None:
            return line
        try:
            return self._store.compare_set("fatal", "", line).decode()
        except RuntimeError:
            return store_gone()

    def fatal_line(self) -> str | None:
        """The fatal line, if any rank wrote one."""
        if self._store is None:
            return None
        try:
            return self._store.get("fatal").decode() if self._store.check(["fatal"]) else None
        except RuntimeError:
            return store_gone()

    def all_through(self) -> bool:
        """Whether every rank came to its normal end: a neighbour that saw it first may be gone before us."""
        try:
            return self._store is not None and self._store.add("done", 0) >= self._topology.world_size
        except RuntimeError:
            return False

    def wait_for_readers(self) -> None:
        """The store dies with its host, so nobody leaves before all have read the line or the grace is over."""
        if self._store is None:
            return
        deadline = time.monotonic() + GRACE_S
        try:
            self._store.add("readers", 1)
            while time.monotonic() < deadline and self._store.add("readers", 0) < self._topology.world_size:
                time.sleep(0.1)
            time.sleep(0.3)  # so that the last reader's own look at the count still finds the store
        except RuntimeError:
            pass

    def wait_for_all(self, linger_s: float) -> None:
        """Wait until every rank of the run is through. No limit of its own: the watch ends it when a rank fails.

        Args:
            linger_s (`float`):
                How long ranks of node 0 stay afterwards: the store ends with them, and the others must see the count.
        """
        if self._store is None:
            return
        said = time.monotonic()
        try:
            self._store.add("done", 1)
            while (done := self._store.add("done", 0)) < self._topology.world_size:
                time.sleep(0.2)
                if time.monotonic() - said > PROGRESS_EVERY_S:
                    said = time.monotonic()
                    print(f"[trl_multinode] {self._topology}: {done} of {self._topology.world_size} ranks are through")
            if self._topology.node == 0:
                time.sleep(linger_s)
        except RuntimeError:
            time.sleep(STORE_TIMEOUT_S)  # the store is gone too early, and the watch ends this process


def store_gone() -> str:
    """The same words on every rank: nobody can be asked any more."""
    return (
        "node 0, phase unknown: PeerFailureError: the launcher of node 0, which hosts the rendezvous store, ended "
        f"or cannot be reached ({os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}); see node 0's log"
    )
