"""Keys in the launcher's rendezvous store, through which the ranks of a run exchange everything but tensors.

Keys of the process, which every rank's watch thread uses:

| key | written by | value |
|---|---|---|
| `fatal` | the first rank that fails | the exit code and the line that every rank prints |
| `readers` | every rank that has read `fatal`, a neighbour for one that is dead | the number of these ranks |
| `pid/<rank>`, `here` | every rank that has imported this library | its pid; the number of these ranks |
| `alive/<rank>` | every rank until it has a trainer | a time, then `has a trainer` |
| `alive/judge` | ranks with a trainer | their number; the first one reads `alive/<rank>` |
| `address/<node>` | local main processes | the node's addresses; a line names the node beside one of them |
| `left/<rank>` | every rank that has closed its trainers, or whose script has ended well | `closed`, `ended` |
| `opened/<n>` | every rank that has built its trainer number n | the number of these ranks |
| `gone/<n>` | a rank whose script ended well after n trainers | the rank |

Keys of a trainer, below its number:

| key | written by | value |
|---|---|---|
| `done` | every rank that has finished | the number of these ranks |
| `pid/<rank>` | every rank | its pid, for the other ranks of its node |
| `folder/<node>` | local main processes | the folder with the sockets of the node's engines |
| `arrived/<number>` | every rank | the number of ranks that have come; see [`Meeting`](meeting.py) |
| `trl_multinode_<use>/<node>` | local main processes | pid and descriptor of the node's [memory](node_memory.py) |
| `beat/<node>` | one rank of the node, every second | the states of its ranks; see [`Beats`](beats.py) |
| `came/<number>` | every rank that comes to a meeting | the ranks with their requests |
| `leaves/<n>` | every rank that ends its script inside the trainer with a good code | the number of these ranks |
| `met/<number>` | the last rank of a meeting | all requests; the key wakes the ranks that wait for it |
| `save/<training>/<step>`, `preempt/...` | the first rank that decides | see [`StepDecision`](decision.py) |
| `warned/<node>/<digest>` | every rank of the node with a library's warning | their number; the first one shows it |
"""

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar, cast

from torch.distributed import DistNetworkError, HashStore, Store

from ..errors import PeerFailureError
from .endings.fatal import Fatal, store_gone
from .limits import file_limit_cure
from .reconnecting import ReconnectingStore, StoreConnection, prefixed
from .reporter import report
from .topology import Topology

# time for all ranks to read `fatal`; after it a rank exits even if others have not read it
GRACE_S = 6.0
STORE_TIMEOUT_S = 20.0  # a store that does not respond for so long counts as gone
PROGRESS_EVERY_S = 15.0
MISSED_EVERY_S = 2.0
# The ranks of node 0 stay so long: the store ends with them, and the others must read the full count first
LINGER_S = 1.0
T = TypeVar("T")


def connect_store(topology: Topology, run: int | None) -> Store:
    """Connect a new client to the run's rendezvous store; a single process has one in its memory.

    Every thread needs its own client, because a client that waits for a key blocks all other calls on it.

    Args:
        topology (`Topology`):
            Topology of this rank.
        run (`int`, *optional*):
            Number of the trainer in this process; it separates the keys of several trainers. `None`: the process's.

    Raises:
        `PeerFailureError`: if it cannot be reached; the message has the cure for a lack of file descriptors.
    """
    if topology.world_size == 1:
        return HashStore()
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"trl_multinode/{attempt}" + ("" if run is None else f"/{run}")
    try:
        connection = StoreConnection(address, topology, STORE_TIMEOUT_S)
    except DistNetworkError as error:
        raise PeerFailureError(
            f"{topology} cannot connect to the run's store at {address[0]}:{address[1]}: "
            f"{str(error).splitlines()[0]}. {file_limit_cure(topology.world_size)}."
        ) from error
    return cast(Store, ReconnectingStore(connection, prefix))


def when_written(store: Store, key: str, waiting: str) -> str:
    """Wait for `key` and return its value; report `waiting` every 15 s. Only the watch thread ends the wait early."""
    reported = time.monotonic()
    while not store.check([key]):
        time.sleep(0.1)
        if time.monotonic() - reported > PROGRESS_EVERY_S:
            reported = time.monotonic()
            report(waiting)
    return store.get(key).decode()


class RunStore:
    """A rank's access to the keys of its process or of a trainer.

    `publish` and `fatal` return `store_gone()` when the store does not respond; that too ends the run.

    Args:
        topology (`Topology`):
            Topology of this rank.
        store (`torch.distributed.Store`):
            Client of these keys, from [`connect_store`].
    """

    def __init__(self, topology: Topology, store: Store):
        self.topology = topology
        self.alone = topology.world_size == 1  # a single process waits for no other rank
        self._store = store
        self._is_given_up = False

    def of_trainer(self, run: int) -> "RunStore":
        """Return the keys of a trainer, through the client of this object."""
        return RunStore(self.topology, prefixed(str(run), self._store))

    def lend(self, use: Callable[[Store], T]) -> T | None:
        """Call `use` with this thread's client, and return what it returns.

        Returns:
            `None` if the store is gone, which `fatal` finds.
        """
        if not self._is_given_up:
            with suppress(RuntimeError):
                return use(self._store)
        return None

    def give_up(self) -> None:
        """Stop using the store, because it does not respond. Calls that have begun go on."""
        self._is_given_up = True

    # ---- keys of the process ----------------------------------------------------------------------------------------

    def publish(self, fatal: Fatal) -> Fatal:
        """Write the failure unless the store has one already; return the one that every rank prints."""
        if self._is_given_up:
            return fatal
        try:
            return Fatal.decode(self._store.compare_set("fatal", "", fatal.encode()).decode())
        except RuntimeError:
            return store_gone()

    def fatal(self) -> Fatal | None:
        """Return the failure, or `None` if no rank has written one."""
        if self._is_given_up:
            return None
        try:
            if not self._store.check(["fatal"]):
                return None
            return Fatal.decode(self._store.get("fatal").decode())
        except RuntimeError:
            return store_gone()

    def wait_for_readers(self) -> None:
        """Wait until all ranks have read the line, `GRACE_S` at most, because the store ends with its host."""
        deadline, world_size = time.monotonic() + GRACE_S, self.topology.world_size

        def wait(store: Store) -> None:
            store.add("readers", 1)
            while time.monotonic() < deadline and store.add("readers", 0) < world_size:
                time.sleep(0.1)
            time.sleep(0.3)  # keep the store alive until the last reader has seen the full count

        if not self.alone:
            self.lend(wait)

    def count_as_reader(self, rank: int) -> None:
        """Count a rank that is dead as a reader, so that no rank waits for it. The neighbours of its node call it."""

        def count(store: Store) -> None:
            if store.add(f"dead/{rank}", 1) == 1:
                store.add("readers", 1)

        self.lend(count)

    def open_trainer(self, number: int) -> str | None:
        """Note that this rank has a trainer; return a rank whose script has ended without one of this number."""
        store = self._store
        store.delete_key(f"left/{self.topology.rank}")
        store.add(f"opened/{number}", 1)
        for gone in [f"gone/{n}" for n in range(number + 1)]:
            if store.check([gone]):
                return store.get(gone).decode()
        return None

    def leave(self, how: str) -> None:
        """Note that this rank has no open trainer (`closed`), or that its script has ended well (`ended`)."""
        key = f"left/{self.topology.rank}"

        def leave(store: Store) -> None:
            store.set(key, how)
            # `set` has no reply: a neighbour that sees this process end would look too early
            store.check([key])

        self.lend(leave)

    def leave_after(self, number: int) -> bool:
        """Note that this script ends well after `number` trainers; return whether another rank has built one more."""

        def leave(store: Store) -> int:
            store.set(f"gone/{number}", str(self.topology.rank))
            return store.add(f"opened/{number}", 0)

        return bool(self.lend(leave))

    def have_left(self, ranks: Iterable[int]) -> bool:
        """Return whether all these ranks have ended well, or have closed their trainers."""
        return bool(self.lend(lambda store: store.check([f"left/{rank}" for rank in ranks])))

    # ---- keys of a trainer ------------------------------------------------------------------------------------------

    def is_first(self, key: str) -> bool:
        """Return whether no other rank of this node has called this with `key`, also if the store does not respond."""
        count = self.lend(lambda store: store.add(f"warned/{self.topology.node}/{key}", 1))
        return count is None or count == 1

    def count(self, counter: str) -> None:
        """Add 1 to a counter of ranks."""
        self.lend(lambda store: store.add(counter, 1))

    def all_have(self, counter: str) -> bool:
        """Return whether every rank has added 1 to a counter."""
        count = self.lend(lambda store: store.add(counter, 0)) or 0
        return count >= self.topology.world_size

    def wait_for_all(self, stopped: threading.Event, look: Callable[[], None]) -> None:
        """Wait until every rank of the run has finished. If a rank fails, the watch thread ends the wait.

        Args:
            stopped (`threading.Event`):
                Event that is set if this rank may end although the store is gone.
            look (`Callable[[], None]`):
                Function that is called now and then, and ends the run if another rank still needs this one.
        """
        if self.alone:
            return
        reported = looked = time.monotonic()
        store = self._store
        try:
            store.add("done", 1)
            while (done := store.add("done", 0)) < self.topology.world_size:
                time.sleep(0.2)
                if time.monotonic() - looked > MISSED_EVERY_S:
                    looked = time.monotonic()
                    look()
                if time.monotonic() - reported > PROGRESS_EVERY_S:
                    reported = time.monotonic()
                    report(
                        f"{self.topology}: {done} of {self.topology.world_size} ranks have finished"
                    )
            if self.topology.node == 0:
                time.sleep(LINGER_S)
        except RuntimeError:
            # the store ended too early; else the watch thread ends this process
            stopped.wait(STORE_TIMEOUT_S)
