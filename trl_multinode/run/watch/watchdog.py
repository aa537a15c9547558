"""Watch of one trainer: it reports this rank's failures to all ranks, and ends with them (see `watch_thread.py`)."""

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed import Store

from ..store import when_written
from ..topology import Topology
from .early import early_watch
from .exits import is_good
from .signals import ends_well
from .watch_thread import POLL_S, WatchThread

LEAVE_S = 120.0  # in which all ranks must leave the trainer, if one does so by `sys.exit(0)`
LEAVE_CURE = (
    "Catch SystemExit where a reward function or a tool runs unknown code, and let a callback stop all ranks by "
    "`control.should_training_stop`."
)
_runs = itertools.count()  # numbers a script's trainers, which all ranks build in the same order
_current: WatchThread | None = None  # of this process, unless the thread runs since the import


def watch_of(topology: Topology) -> WatchThread:
    """Return the watch thread of this process, and start it if there is none."""
    global _current
    if (early := early_watch()) is not None:
        return early
    current = _current
    is_mine = current is not None and current.pid == os.getpid() and current.topology == topology
    if current is None or not is_mine or current.stopped.is_set():
        current = _current = WatchThread(topology)
        current.start()
    return current


class Watchdog:
    """Watch of one trainer of this rank, with functions that the watch thread calls, each at its own moment.

    ```python
    watch = Watchdog(topology)                   # every rank, as early as possible
    watch.add_process(pid, lambda: "engine 0 of node 1 was killed by SIGKILL")
    with watch.guard():                       # an exception inside ends all ranks, with this rank's line
        train()
    watch.close()                             # waits until every rank has called it
    ```

    Args:
        topology (`Topology`):
            Topology of this rank.
        phase (`Callable[[], str]`):
            Function that returns the rank's current phase.
    """

    def __init__(self, topology: Topology, phase: Callable[[], str] = lambda: "set-up"):
        self.phase = phase
        self.run = next(_runs)
        # called before a failed run exits; they must not wait long
        self.cleanups: list[Callable[[], None]] = []
        # called twice a second, also while the store does not respond
        self.ticks: list[Callable[[], None]] = []
        # called twice a second with the watch thread's client of the store
        self.chores: list[Callable[[Store], None]] = []
        # called when this trainer is closed, or when the run fails
        self.closings: list[Callable[[], None]] = []
        # returns `False` for a signal that ends the run at once
        self.on_stop: Callable[[signal.Signals], bool] = lambda stop: False
        # names a full disk
        self.explain: Callable[[BaseException], BaseException] = lambda error: error
        # returns whether another rank waits for this one in a meeting to which it has not come
        self.missed: Callable[[Store], bool] = lambda store: False
        # whether this rank is in `close`, and waits for the others or has waited
        self.closes = False
        # watch of this process, which its trainers share
        self.of_process = watch_of(topology)
        self.topology = self.of_process.topology
        self.report, self.ending = self.of_process.report, self.of_process.ending
        self.store = self.of_process.store.of_trainer(self.run)
        self._closed = threading.Event()
        self._exits = itertools.count()  # of this rank from the trainer's methods with a good code
        self._leaving: SystemExit | None = None
        if (gone := self.of_process.attach(self)) is not None:
            self.of_process.fail(f"the script of rank {gone} has ended without this trainer")

    # ---- watched processes and failures -----------------------------------------------------------------------------

    def add_process(self, pid: int, cause: Callable[[], str | None]) -> None:
        """Treat the end of process `pid` as a failure of an engine; `cause` then returns the message, or `None` if
        the run goes on without it."""
        self.of_process.processes.add(pid, lambda: self.of_process.process_ended(cause), self)

    def forget_processes(self) -> None:
        """Stop watching this trainer's processes, before this rank shuts its engines down cleanly."""
        self.of_process.processes.forget(self)

    def end_with(self, close: Callable[[], None]) -> None:
        """Make the watch thread call `close`, which closes this object too, and end. It takes no lock."""
        self.of_process.ends.append(close)
        self.of_process.signals.wake()

    @contextmanager
    def noting(self, note: str) -> Iterator[None]:
        """Add `note` to the failures that this rank reports, until the context has ended well.

        An engine that ends is reported by this thread; only the main thread knows what the engine was doing.
        """
        self.of_process.note = note
        yield
        self.of_process.note = ""

    @contextmanager
    def guard(self, close: Callable[[], None] = lambda: None) -> Iterator[None]:
        """End all ranks on an exception inside the context; a run of one process raises it as usual.

        Args:
            close (`Callable[[], None]`, *optional*):
                Function that closes what is built so far, for a context in which a trainer is built. It is called
                before a run of one process raises, because that process may live on (in a notebook) without a trainer.
        """
        try:
            yield
        except BaseException as error:
            ends_all = isinstance(error, Exception | SystemExit) and not ends_well(error)
            if self.topology.world_size == 1:
                close()
            elif ends_all and not self._closed.is_set():
                self.of_process.fail_with(error)
            elif isinstance(error, SystemExit) and is_good(error.code):
                self._leave_with_all(error)
            raise

    def _leave_with_all(self, error: SystemExit) -> None:
        """Wait until all ranks leave the trainer by `sys.exit(0)`, as this one does; if another stays, end the run.

        Code that a model has written calls `sys.exit(0)`, and `exec` runs it in a reward function of one rank.
        """
        if self._leaving is error or self._closed.is_set():
            return
        self._leaving = error
        counter, deadline = f"leaves/{next(self._exits)}", time.monotonic() + LEAVE_S
        self.store.count(counter)
        while not self.store.all_have(counter):
            if self.store.lend(self.missed) or time.monotonic() > deadline:
                how = f"SystemExit: this rank left the trainer with exit code {error.code or 0}, and others did not."
                self.of_process.fail(f"{how} {LEAVE_CURE}")
            time.sleep(POLL_S)

    def _fail_if_missed(self) -> None:
        if self.store.lend(self.missed):
            self.of_process.fail(
                "this rank has closed its trainer or ended its script, and others wait for it in the trainer. All "
                f"ranks must call the trainer's methods equally often. {LEAVE_CURE}",
            )

    def close(self) -> None:
        """Wait until every rank of the run has called this, then stop watching.

        No rank leaves early: engines must serve their node until its last rank has finished, and a launcher whose
        ranks have finished waits in torchrun's exit barrier for 300 s if another node fails. The wait has no limit of
        its own (a rank may push to the Hub for an hour); if a rank fails, the watch thread still ends the process.
        """
        if self._closed.is_set():
            return
        error = sys.exc_info()[1]
        # the script leaves, and closes in a `finally`
        if isinstance(error, SystemExit) and not ends_well(error):
            self.of_process.fail_at_exit(error.code)
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        self.closes = True
        self.store.wait_for_all(self.of_process.stopped, self._fail_if_missed)
        self._closed.set()
        for call in self.closings:
            call()
        self.of_process.detach(self, error)

    def close_at_exit(self) -> None:
        """End all ranks if the script of this one ends with an error; otherwise close. `atexit` calls it."""
        if not self._closed.is_set() and (status := self.of_process.exits.bad_status()) is not None:
            self.of_process.fail_at_exit(status)
        if not self._closed.is_set():
            # of a single process; several have ended with the error
            self._close(getattr(sys, "last_value", None))

    # ---- set-up -----------------------------------------------------------------------------------------------------

    def watch_local_ranks(self, store: Store) -> None:
        """Exchange pids with the ranks of this node and watch them: a rank killed by SIGKILL cannot report."""
        store.set(f"pid/{self.topology.rank}", str(os.getpid()))
        for rank in self.topology.local_ranks:
            if rank != self.topology.rank:
                waiting = f"{self.topology}: waiting for rank {rank} to build its trainer"
                self.of_process.watch_rank(rank, int(when_written(store, f"pid/{rank}", waiting)))
