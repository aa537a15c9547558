"""Watch thread of every rank: when one rank fails, all ranks of the run end with the same line.

Ranks wait inside collectives, torchrun stops only the workers of its own node, and NCCL can wait for half an hour. So
each rank has a thread with its own TCPStore client. The thread polls one `fatal` key, and it holds pidfds on its
launcher, on the other ranks of its node and, on the local main process, on the engines. The first failure written to
the store wins. Every rank prints exactly that line, waits until all have read it (a few seconds at most) and exits
with `os._exit`, because its main thread may be blocked inside NCCL for ever.
"""

import itertools
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import EngineDiedError, PeerFailureError
from .exits import ScriptExits, is_good
from .reporter import report
from .signals import StopSignals
from .store import GRACE_S, STORE_TIMEOUT_S, RunStore, store_gone, when_written
from .topology import Topology

if TYPE_CHECKING:
    from torch.distributed import Store

POLL_S = 0.5  # a failure then reaches every rank within about a second
SYMPTOM_DELAY_S = 1.0  # symptoms (end of file, SIGTERM) are reported later than causes (a process ended)
PRINTING_S = 2.0  # longest wait for the main thread to print its traceback
EXIT_CODE = 1
_runs = itertools.count()  # numbers a script's trainers, which all ranks build in the same order


class Watchdog:
    """Watch thread of one rank.

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
        self.topology = topology
        self.phase = phase
        self.run = next(_runs)
        self._store = RunStore(topology, self.run)
        self._cleanups: list[Callable[[], None]] = []
        self._chores: list[Callable[[Store], None]] = []
        self._processes: dict[int, Callable[[], str]] = {}  # pidfd -> cause
        self._local_failure: tuple[str, float] | None = None  # line, time at which to report it
        self._only_symptom = False
        self._note = ""  # added to every failure that this rank reports
        self._end: Callable[[], None] | None = None  # called by the watch thread as the last thing
        self._closed = threading.Event()
        self._store_call_start: float | None = None  # of the pending call, if any
        self._signals = StopSignals()
        self._exits = ScriptExits(self._on_uncaught)
        self._poll = select.poll()
        self._poll.register(self._signals.read_end, select.POLLIN)
        self._lock = threading.Lock()
        self._printing = threading.Lock()  # the failure line comes after a traceback, not in the middle of one
        if not self._store.alone:
            self._exits.watch()
        if topology.launched:
            self._signals.catch()
            self._watch_launcher()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    # ---- watched processes and failures -----------------------------------------------------------------------------

    def add_process(self, pid: int, cause: Callable[[], str]) -> None:
        """Treat the end of process `pid` as a failure of the run; `cause` then returns the message."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.report(cause())
            return
        with self._lock:
            self._processes[pidfd] = cause
            self._poll.register(pidfd, select.POLLIN)
        self._signals.wake()

    def forget_processes(self) -> None:
        """Stop watching all processes, before this rank shuts its engines down cleanly."""
        with self._lock:
            for pidfd in self._processes:
                self._poll.unregister(pidfd)
                os.close(pidfd)
            self._processes.clear()

    def add_cleanup(self, cleanup: Callable[[], None]) -> None:
        """Register a function that the watch thread calls before a failed run exits; it must not wait long."""
        self._cleanups.append(cleanup)

    def add_chore(self, chore: "Callable[[Store], None]") -> None:
        """Register a function that the watch thread calls twice a second with its client of the store."""
        self._chores.append(chore)

    def is_first(self, key: str) -> bool:
        """Return whether no other rank of this node has called this with `key`. Any thread may call it."""
        return self._store.is_first(key)

    def end_with(self, close: Callable[[], None]) -> None:
        """Make the watch thread call `close`, which closes this object too, and end. It takes no lock."""
        self._end = close
        self._signals.wake()

    def report(self, cause: str, delay_s: float = 0.0, **code: int) -> None:
        """Report this rank's failure and return at once; the watch thread writes it to the store, then exits."""
        cause = cause if self._note in cause else f"{cause.rstrip('.')}. {self._note}"
        line = f"{self.topology}, phase {self.phase()}: " + " ".join(cause.split())
        with self._lock:
            if self._local_failure is None or (delay_s == 0.0 and self._only_symptom):  # a cause replaces a symptom
                self._local_failure, self._only_symptom = (line, time.monotonic() + delay_s), delay_s > 0.0
        self._signals.wake()

    @contextmanager
    def noting(self, note: str) -> Iterator[None]:
        """Add `note` to the failures that this rank reports, until the context has ended well.

        An engine that ends is reported by this thread; only the main thread knows what the engine was doing.
        """
        self._note = note
        yield
        self._note = ""

    @contextmanager
    def guard(self) -> Iterator[None]:
        """End all ranks on an exception inside the context; a run of one process raises it as usual."""
        try:
            yield
        except (Exception, SystemExit) as error:
            good_exit = isinstance(error, SystemExit) and is_good(error.code)
            if self._store.alone or self._closed.is_set() or good_exit:
                raise
            self.fail_with(error)

    def fail_with(self, error: BaseException) -> None:
        """Print the traceback, report the error, and wait until the watch thread ends the process with `os._exit`."""
        with self._printing:
            traceback.print_exception(error)
        self._fail(f"{type(error).__name__}: {error}", SYMPTOM_DELAY_S if is_symptom(error) else 0.0)

    def _fail(self, cause: str, delay_s: float = 0.0) -> None:
        self.report(cause, delay_s)
        time.sleep(STORE_TIMEOUT_S + 2 * GRACE_S)
        os._exit(EXIT_CODE)

    def _on_uncaught(self, error: BaseException) -> bool:
        """Treat an uncaught exception of the main thread, wherever it is raised, as a failure of all ranks."""
        if self._closed.is_set():
            return False
        self.fail_with(error)
        return True

    def close(self) -> None:
        """Wait until every rank of the run has called this, then stop watching.

        No rank leaves early: engines must serve their node until its last rank has finished, and a launcher whose
        ranks have finished waits in torchrun's exit barrier for 300 s if another node fails. The wait has no limit of
        its own (a rank may push to the Hub for an hour); if a rank fails, the watch thread still ends the process.
        """
        if self._closed.is_set():
            return
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit) and not is_good(error.code):  # the script leaves, and closes in a `finally`
            self._fail_at_exit(error.code)
        self._store.wait_for_all(linger_s=2 * POLL_S)
        self._closed.set()
        self._signals.restore()
        self._exits.restore()
        self._signals.wake()
        if threading.current_thread() is self._thread:
            return
        self._thread.join(2 * POLL_S + STORE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._signals.close()

    def close_at_exit(self) -> None:
        """End all ranks if the script of this one ends with an error; otherwise close. `atexit` calls it."""
        if not self._closed.is_set() and (status := self._exits.bad_status()) is not None:
            self._fail_at_exit(status)
        self.close()

    def _fail_at_exit(self, status: Any) -> None:
        """End all ranks; a rank that waited for them with its own error would wait for ever."""
        if self._store.alone:
            return
        how = f"exit code {int(status)}" if isinstance(status, int) else f"the message {str(status)!r}"
        self._fail(f"SystemExit: the script of this rank ended with {how}")

    # ---- set-up -----------------------------------------------------------------------------------------------------

    def _watch_launcher(self) -> None:
        launcher = os.getppid()
        self.add_process(launcher, lambda: f"the launcher of node {self.topology.node} (pid {launcher}) ended")

    def watch_local_ranks(self, store: "Store") -> None:
        """Exchange pids with the ranks of this node and watch them: a rank killed by SIGKILL cannot report."""
        store.set(f"pid/{self.topology.rank}", str(os.getpid()))
        for rank in self.topology.local_ranks:
            if rank != self.topology.rank:
                waiting = f"{self.topology}: waiting for rank {rank} to build its trainer"
                pid = int(when_written(store, f"pid/{rank}", waiting))
                self.add_process(pid, lambda rank=rank, pid=pid: self._rank_ended(rank, pid))  # type: ignore[misc]

    def _rank_ended(self, rank: int, pid: int) -> str:
        main = " (local main process)" if rank == self.topology.local_ranks[0] else ""
        return f"the process of rank {rank}{main} ended (pid {pid}); if no line above gives the reason, it was killed"

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        threading.Thread(target=self._watch_store, name="watch-store", daemon=True).start()
        try:
            self._watch()
        except Exception as error:
            traceback.print_exception(error)
            self._leave(
                self._store.publish(f"{self.topology}: the watchdog itself failed: {type(error).__name__}: {error}")
            )

    def _watch_store(self) -> None:
        """Exit if the store does not respond: its client waits without a deadline while the connection is open."""
        while not self._closed.wait(POLL_S):
            start = self._store_call_start
            if start is not None and time.monotonic() - start > STORE_TIMEOUT_S:
                self._store.give_up()
                self._leave(store_gone())

    def _watch(self) -> None:
        while not self._closed.is_set():
            fired = [fd for fd, _ in self._poll.poll(POLL_S * 1000)]
            if self._end is not None:
                self._end()
                return
            if self._closed.is_set():
                return
            self._store_call_start = time.monotonic()
            for fd in fired:
                self._on_event(fd)
            line = self._due_line() or self._store.fatal_line()
            for chore in self._chores if line is None else ():
                self._store.lend(chore)
            self._store_call_start = None
            if line is not None:
                self._leave(line)

    def _on_event(self, fd: int) -> None:
        if fd == self._signals.read_end:
            for stop in self._signals.received():
                self.report(f"stopped by {stop.name}", SYMPTOM_DELAY_S)
            return
        with self._lock:
            cause = self._processes.pop(fd, None)
            if cause is None:
                return  # `forget_processes` ran meanwhile
            self._poll.unregister(fd)
            os.close(fd)
        # A launcher ends after its ranks, and their own report explains more, so it takes precedence.
        if self._store.fatal_line() is None and not self._store.all_finished():
            self.report(cause())

    def _due_line(self) -> str | None:
        with self._lock:
            if self._local_failure is None or time.monotonic() < self._local_failure[1]:
                return None
            line = self._local_failure[0]
        return self._store.publish(line)

    def _leave(self, line: str) -> None:
        for cleanup in self._cleanups:
            try:
                cleanup()
            except Exception:
                traceback.print_exc()
        # in a thread, because a store whose host lost power never responds
        waiting = threading.Thread(target=self._store.wait_for_readers, daemon=True)
        waiting.start()
        waiting.join(GRACE_S + 1.0)
        sys.stdout.flush()
        self._printing.acquire(timeout=PRINTING_S)  # never released: a later traceback would follow the line
        report(f"the run failed: {line}", error=True)
        os._exit(EXIT_CODE)


def is_symptom(error: BaseException) -> bool:
    """Return whether another process's end caused the error: an engine's end of file, a collective without a peer."""
    if isinstance(error, EngineDiedError | PeerFailureError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "Connection"))
