"""The watch thread of a process: when one rank fails, all ranks of the run end with the same line and exit code.

Ranks wait inside collectives, torchrun stops only the workers of its own node, and NCCL can wait for half an hour. So
each rank has a thread with its own TCPStore client. The thread polls one `fatal` key, and it holds pidfds on its
launcher, on the other ranks of its node and, on the local main process, on the engines. The first failure written to
the store wins. Every rank prints exactly that line, waits until all have read it (a few seconds at most) and exits
with `os._exit`, because its main thread may be blocked inside NCCL for ever.
"""

import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .. import store as stores
from ..endings.ending import Ending
from ..endings.error_text import described, text_of_error
from ..endings.exit_codes import ENGINE, OTHER, PEER_LOST, PREEMPTED, USER_CODE, code_of, is_symptom
from ..endings.fatal import Fatal, store_gone
from ..limits import raise_file_limit
from ..reconnecting import StoreConnection
from ..store import RunStore, connect_store
from ..topology import Topology
from .arrivals import Arrivals
from .exits import ScriptExits
from .leaving import leave
from .neighbour_end import how_ended
from .pidfds import Pidfds
from .signals import StopSignals, ends_well

if TYPE_CHECKING:
    from .watchdog import Watchdog

POLL_S = 0.5  # a failure then reaches every rank within about a second
EXPLAIN_S = 5.0  # in which an error must have said what it is, beside its class
# symptoms (end of file, SIGTERM) are reported later than causes (a process ended)
SYMPTOM_DELAY_S = 1.0
NODE_0_LEFT_EVERY_S = 5.0


class WatchThread:
    """Watch thread of this process, to which its trainers' [`Watchdog`]s attach. `watch_of` has the only one.

    Args:
        topology (`Topology`):
            Topology of this rank.
        exits ([`ScriptExits`], *optional*):
            Hooks on the end of the script, if the thread runs since the import of this library, until the script
            ends. Default: it ends with the last trainer.
    """

    def __init__(self, topology: Topology, exits: ScriptExits | None = None):
        self.topology = topology
        self.pid = os.getpid()
        self.since_import = exits is not None
        self.note = ""  # added to every failure that this rank reports
        self.ending = Ending(topology)
        self.trainers: list[Watchdog] = []  # the open ones
        self.num_built = 0
        raise_file_limit(topology.launched)
        self.store = RunStore(topology, connect_store(topology, None))
        self.stopped = threading.Event()
        self.signals = StopSignals()
        self.processes = Pidfds(self.signals)
        self.exits = exits or ScriptExits(self.on_uncaught)
        self.arrivals = Arrivals(topology, self.watch_rank)
        self._watched: set[int] = set()  # other ranks of this node
        # of trainers that were collected; this thread calls them
        self.ends: list[Callable[[], None]] = []
        # failures of this rank before all ranks know them, each with the time at which to report it: one that is due
        # earlier replaces another, as a cause does with a symptom
        self._failures: list[tuple[float, Fatal]] = []
        self._store_call_start: float | None = None  # of the pending call, if any
        self._node_0_left = (False, 0.0)  # as far as this thread knows, and when it looked
        # held while a traceback is printed: the failure line comes after it, not in the middle of it
        self.printing = threading.Lock()
        if not self.since_import and not self.store.alone:
            self.exits.watch()
        if topology.launched:
            launcher = os.getppid()
            cause = f"the launcher of node {topology.node} (pid {launcher}) ended"
            self.processes.add(launcher, lambda: self._neighbour_ended(cause), self)

    def start(self) -> None:
        """Run in a thread of its own."""
        self.thread = threading.Thread(target=self.run, name="watch", daemon=True)
        self.thread.start()

    # ---- trainers ---------------------------------------------------------------------------------------------------

    def attach(self, trainer: "Watchdog") -> str | None:
        """Add a trainer, and return a rank whose script has ended without this trainer, if there is one."""
        if self.topology.launched and not self.trainers:
            self.signals.catch()
        self.trainers.append(trainer)
        self.num_built += 1
        return self.store.open_trainer(self.num_built - 1)

    def detach(self, trainer: "Watchdog", error: BaseException | None = None) -> None:
        """Remove a trainer that all ranks have closed. The thread ends with the last one, or with the script.

        Args:
            trainer ([`Watchdog`]):
                Trainer that is closed.
            error (`BaseException`, *optional*):
                Error with which a script of a single process ends.
        """
        failure = None
        if error is not None and not self.since_import:
            failure = self._failure(described(error), code_of(error))
        self.processes.forget(trainer)
        if trainer in self.trainers:
            self.trainers.remove(trainer)
        if self.trainers:
            return
        self.store.leave("closed")
        self.signals.restore()
        if not self.since_import:
            self.stop()
            self.exits.restore()
            if failure is None:
                self.ending.write_good()
            else:
                self.ending.write(failure)

    def stop(self) -> None:
        """End the thread, and wait for it unless it is the caller."""
        self.stopped.set()
        self.signals.wake()
        if threading.current_thread() is self.thread:
            return
        self.thread.join(2 * POLL_S + stores.STORE_TIMEOUT_S)
        if not self.thread.is_alive():
            self.processes.forget()
            self.signals.close()

    # ---- failures ---------------------------------------------------------------------------------------------------

    def report(self, cause: str, delay_s: float = 0.0, code: int = OTHER) -> None:
        """Report this rank's failure and return at once; the watch thread writes it to the store, then exits.

        Args:
            cause (`str`):
                Message, to which the place and the phase are added.
            delay_s (`float`, *optional*, defaults to `0.0`):
                Seconds to wait for a better explanation by any rank.
            code (`int`, *optional*, defaults to `OTHER`):
                Exit code of all ranks; one of `exit_codes.py`.
        """
        self._failures.append((time.monotonic() + delay_s, self._failure(cause, code)))
        self.signals.wake()

    def _failure(self, cause: str, code: int) -> Fatal:
        """Return a failure of this rank, with the place and the phase before its cause."""
        phase = "script" if self.num_built else "before the trainer"
        for trainer in self.trainers[-1:]:
            phase = trainer.phase()
        cause = cause if self.note in cause else f"{cause.rstrip('.')}. {self.note}"
        return Fatal(f"{self.topology}, phase {phase}: {' '.join(cause.split())}", code)

    def fail_with(self, error: BaseException) -> None:
        """Report the error, print the traceback, and wait until the watch thread ends the process with `os._exit`."""
        # at once, because the text of an error of unknown code may never come
        self.report(f"{type(error).__name__}, whose text did not come", EXPLAIN_S)
        explained = error
        for trainer in self.trainers:
            with suppress(Exception):  # an explanation that fails must not hide the error
                explained = trainer.explain(explained)
        cause = (
            "stopped by SIGINT"
            if isinstance(explained, KeyboardInterrupt)
            else described(explained)
        )
        code = code_of(explained, has_trainer=bool(self.trainers))
        with self.printing:
            self.report(cause, SYMPTOM_DELAY_S if is_symptom(explained) else 0.0, code)
            # after the report: stderr may be a pipe that nobody reads
            traceback.print_exception(error)
        self._wait_for_the_end(code)

    def fail(self, cause: str) -> None:
        """Report a fault of the script, and wait until the watch thread ends the process."""
        self.report(cause, code=USER_CODE)
        self._wait_for_the_end(USER_CODE)

    @staticmethod
    def _wait_for_the_end(code: int) -> None:
        time.sleep(stores.STORE_TIMEOUT_S + 2 * stores.GRACE_S)
        os._exit(code)

    def fail_at_exit(self, status: Any) -> None:
        """End all ranks; a rank that waited for them with its own error would wait for ever."""
        if self.store.alone:
            return
        how = (
            f"exit code {int(status)}"
            if isinstance(status, int)
            else f"the message {text_of_error(status)!r}"
        )
        self.fail(f"SystemExit: the script of this rank ended with {how}")

    def on_uncaught(self, error: BaseException) -> bool:
        """Treat an uncaught exception of the main thread, wherever it is raised, as a failure of all ranks."""
        if self.stopped.is_set() or os.getpid() != self.pid or ends_well(error):
            return False
        self.fail_with(error)
        return True

    def leave(self) -> None:
        """End the watch of a script that ends well. It waits for no other rank."""
        if self.store.leave_after(self.num_built):
            self.fail(
                "the script of this rank has ended without the trainer that other ranks have built: all ranks must "
                "take the same way through the script. `raise SystemExit` with an error ends like this, too.",
            )
        self.store.leave("ended")
        self.ending.write_good()
        self.stop()

    # ---- watched processes ------------------------------------------------------------------------------------------

    def watch_rank(self, rank: int, pid: int) -> None:
        """Treat the end of another rank of this node as a failure, unless it has no trainer and ends well."""
        if rank in self._watched:
            return
        self._watched.add(rank)
        main = " (local main process)" if rank == self.topology.local_ranks[0] else ""

        def ended() -> None:
            how = how_ended(pid)  # at once, because the launcher asks for its status soon
            if self._neighbour_ended(f"the process of rank {rank}{main} (pid {pid}) {how}", rank):
                self.store.count_as_reader(rank)

        self.processes.add(pid, ended, self)

    def _neighbour_ended(self, cause: str, rank: int | None = None) -> bool:
        """Report the end of a launcher or of a rank, if the run has not ended. Return whether that is so.

        A launcher ends after its ranks, and their own report explains more, so it takes precedence.
        """
        trainers = self.trainers[-1:]  # once, because the main thread may close it meanwhile
        has_left = rank is not None and not trainers and self.store.have_left([rank])
        if has_left or self._has_ended(trainers):
            return False
        self.report(cause, code=PEER_LOST)
        return True

    def _has_ended(self, trainers: "list[Watchdog]") -> bool:
        """Return whether the run has failed, or all ranks have finished these trainers."""
        is_finished = any(trainer.store.all_have("done") for trainer in trainers)
        return is_finished or self.store.fatal() is not None

    def process_ended(self, cause: Callable[[], str | None]) -> None:
        """Report the end of a process that a trainer has added, unless `cause` returns `None`."""
        if not self._has_ended(self.trainers[-1:]) and (line := cause()) is not None:
            self.report(line, code=ENGINE)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Watch until the end of the run. It is the body of the thread."""
        threading.Thread(target=self._watch_store, name="watch-store", daemon=True).start()
        try:
            self._watch()
        except Exception as error:
            traceback.print_exception(error)
            line = f"{self.topology}: the watchdog itself failed: {described(error)}"
            leave(self, self.store.publish(Fatal(line)))

    def _watch_store(self) -> None:
        """Exit if the store does not respond: its client waits without a deadline while the connection is open."""
        # in turns of this loop, because a process that was stopped must not blame the store
        last, waited = None, 0.0
        while not self.stopped.wait(POLL_S):
            for tick in [tick for trainer in self.trainers for tick in trainer.ticks]:
                tick()
            start = self._store_call_start
            waited = waited + POLL_S if start is not None and start == last else 0.0
            last = start
            if waited > StoreConnection.limit_s:
                self.store.give_up()
                leave(self, store_gone())

    def _watch(self) -> None:
        while not self.stopped.is_set():
            fired, woken = self.processes.wait(POLL_S)
            while self.ends:
                self.ends.pop(0)()
            if self.stopped.is_set():
                return
            self._store_call_start = time.monotonic()
            for ended in fired:
                ended()
            if woken:
                self._receive_signals()
            fatal = self._due() or self.store.fatal()
            if fatal is None:
                self._do_chores()
            self._store_call_start = None
            if fatal is not None and not (fatal == store_gone() and self._may_outlive_the_store()):
                leave(self, fatal)

    def _receive_signals(self) -> None:
        for stop in self.signals.received():
            # torchrun sends SIGTERM after a second Ctrl-C: a run that ends already is not pre-empted as well
            if self._failures or not any(trainer.on_stop(stop) for trainer in self.trainers):
                code = OTHER if stop.name == "SIGINT" else PREEMPTED
                self.report(f"stopped by {stop.name}", SYMPTOM_DELAY_S, code)

    def _do_chores(self) -> None:
        if self.since_import:
            has_trainer = self.num_built > 0
            late = self.store.lend(lambda client: self.arrivals.look(client, has_trainer))
            if late:
                self.report(late, code=PEER_LOST)
        for trainer in list(self.trainers):
            for chore in trainer.chores:
                trainer.store.lend(chore)
        looked = self._node_0_left[1]
        if (
            not self.trainers
            and self.topology.node
            and time.monotonic() - looked > NODE_0_LEFT_EVERY_S
        ):
            left = self.store.have_left(self.topology.ranks_of(0))
            self._node_0_left = left, time.monotonic()

    def _may_outlive_the_store(self) -> bool:
        """Stop watching, and return `True`, if this rank's script needs no other rank.

        It needs none if node 0 has ended well, or if the checkpoint of a pre-empted run is whole and this rank closes
        its trainers: the launcher of node 0 ends when its ranks have left with code 143, while others still close.
        """
        if not all(trainer.closes for trainer in self.trainers):
            return False
        if self.ending.preempted is None and (self.trainers or not self._node_0_left[0]):
            return False
        self.stopped.set()
        return True

    def _due(self) -> Fatal | None:
        if not self._failures:
            return None
        due, fatal = min(self._failures)
        if time.monotonic() < due:
            return None
        return self.store.publish(fatal)
