"""A rank never fails alone: the thread that ends every rank of the run with one and the same line.

Ranks wait inside collectives, torchrun stops only the workers of its own node, and NCCL can wait for half an hour. So
each rank has a thread with a TCPStore client of its own. It looks for one `fatal` key, and it holds pidfds on its
launcher, on the other ranks of its node and, on the local main process, on the engines. The first failure to be
written wins; every rank prints exactly that line, waits until all have read it (a few seconds at most) and leaves with
`os._exit`, because its main thread may be inside NCCL for ever.
"""

import itertools
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .blackboard import GRACE_S, STORE_TIMEOUT_S, Blackboard, store_gone, when_written
from .errors import EngineDiedError, PeerFailureError
from .topology import Topology

if TYPE_CHECKING:
    from torch.distributed import Store

POLL_S = 0.5  # so a failure reaches every rank within about a second
SYMPTOM_DELAY_S = 1.0  # a symptom (end of file, SIGTERM) is reported so much later than a cause (a process ended)
EXIT_CODE = 1
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
PYTHONS_OWN = (signal.SIG_DFL, signal.default_int_handler)
_runs = itertools.count()  # a script may build several trainers; ranks do so in the same order


class Watch:
    """The watching thread of one rank.

    ```python
    watch = Watch(topology)                   # every rank, as early as possible
    watch.add_process(pid, lambda: "engine 0 of node 1 was killed by SIGKILL")
    with watch.guard():                       # an exception in here ends all ranks, with this rank's line
        train()
    watch.close()                             # this rank is through; waits until all are
    ```

    Args:
        topology (`Topology`):
            Of this rank.
        phase (`Callable[[], str]`):
            What the rank is doing now.
    """

    def __init__(self, topology: Topology, phase: Callable[[], str] = lambda: "set-up"):
        self.topology = topology
        self.phase = phase
        self.run = next(_runs)
        self._board = Blackboard(topology, self.run)
        self._cleanups: list[Callable[[], None]] = []
        self._processes: dict[int, Callable[[], str]] = {}  # pidfd -> cause
        self._local_failure: tuple[str, float] | None = None  # line, when to report it
        self._only_symptom = False
        self._closed = threading.Event()
        self._asked: float | None = None  # since when the store owes the thread an answer
        self._handlers: dict[int, Any] = {}  # signal -> Python's own handler, where ours took its place
        self._poll = select.poll()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._poll.register(self._wake_read, select.POLLIN)
        self._lock = threading.Lock()
        self._catch_signals()
        self._hook_exceptions()
        if topology.launched:
            self._watch_launcher()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    # ---- what can fail ----------------------------------------------------------------------------------------------

    def add_process(self, pid: int, cause: Callable[[], str]) -> None:
        """From now on the end of process `pid` is a failure of the run. `cause` is called when it ended."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.report(cause())
            return
        with self._lock:
            self._processes[pidfd] = cause
            self._poll.register(pidfd, select.POLLIN)
        self._wake()

    def forget_processes(self) -> None:
        """Called before this rank ends its engines in good order."""
        with self._lock:
            for pidfd in self._processes:
                self._poll.unregister(pidfd)
                os.close(pidfd)
            self._processes.clear()

    def add_cleanup(self, cleanup: Callable[[], None]) -> None:
        """Runs in the watch thread before this rank leaves because of a failure; must not wait long."""
        self._cleanups.append(cleanup)

    def report(self, cause: str, delay_s: float = 0.0) -> None:
        """This rank failed. Returns at once; the watch thread tells the others and ends this process."""
        line = f"{self.topology}, phase {self.phase()}: " + " ".join(cause.split())
        with self._lock:
            if self._local_failure is None or (delay_s == 0.0 and self._only_symptom):  # the first cause counts
                self._local_failure, self._only_symptom = (line, time.monotonic() + delay_s), delay_s > 0.0
        self._wake()

    @contextmanager
    def guard(self):
        """Exceptions inside end all ranks. With a single process they are simply raised."""
        try:
            yield
        except (Exception, SystemExit) as error:
            good_exit = isinstance(error, SystemExit) and error.code in (None, 0)
            if self._board.alone or self._closed.is_set() or good_exit:
                raise
            self.fail_with(error)

    def fail_with(self, error: BaseException) -> None:
        """Print the traceback, report, and wait for the end; the watch thread leaves with `os._exit`."""
        traceback.print_exception(error)
        self.report(f"{type(error).__name__}: {error}", SYMPTOM_DELAY_S if is_symptom(error) else 0.0)
        time.sleep(STORE_TIMEOUT_S + 2 * GRACE_S)
        os._exit(EXIT_CODE)

    def close(self) -> None:
        """Wait until every rank of the run has come here, then stop watching.

        Nobody leaves early: engines must serve their node until its last rank is through, and a launcher whose ranks
        are through while another node fails waits in torchrun's exit barrier for 300 s. The wait has no limit of its
        own (a rank may push to the Hub for an hour); it ends when a rank fails, because the thread is still watching.
        """
        if self._closed.is_set():
            return
        self._board.wait_for_all(linger_s=2 * POLL_S)
        self._closed.set()
        self._restore_signals()
        self._wake()
        self._thread.join(2 * POLL_S + STORE_TIMEOUT_S)

    # ---- set-up -----------------------------------------------------------------------------------------------------

    def _catch_signals(self) -> None:
        """Signals reach this thread through a pipe: a Python handler would wait for the main thread to leave NCCL.

        A handler that somebody else installed, before or later, is theirs (a checkpoint before preemption), and a
        signal that is ignored stays so (`nohup`).
        """
        if threading.current_thread() is not threading.main_thread() or not self.topology.launched:
            return
        for number in STOP_SIGNALS:
            if signal.getsignal(number) in PYTHONS_OWN:
                self._handlers[number] = signal.signal(number, told_by_the_pipe)
        if not any(signal.getsignal(number) is told_by_the_pipe for number in STOP_SIGNALS):
            return  # the pipe would be taken from somebody for nothing
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        # A forked child shares the pipe: a pool that ends its workers by SIGTERM would end the run
        os.register_at_fork(after_in_child=self._restore_signals)

    def _restore_signals(self) -> None:
        if self._handlers and threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            for number, handler in self._handlers.items():
                if signal.getsignal(number) is told_by_the_pipe:
                    signal.signal(number, handler)
            self._handlers.clear()

    def _hook_exceptions(self) -> None:
        """An uncaught exception of the main thread, wherever it is raised, is a failure of all ranks."""
        if self._board.alone:
            return
        previous = sys.excepthook

        def hook(kind, error, trace):
            if self._closed.is_set():
                previous(kind, error, trace)
            else:
                self.fail_with(error)

        sys.excepthook = hook

    def _watch_launcher(self) -> None:
        launcher = os.getppid()
        self.add_process(launcher, lambda: f"the launcher of node {self.topology.node} (pid {launcher}) ended")

    def watch_local_ranks(self, store: "Store") -> None:
        """Exchange pids with the ranks of this node and watch them: a SIGKILLed rank cannot report itself."""
        store.set(f"pid/{self.topology.rank}", str(os.getpid()))
        for rank in self.topology.local_ranks:
            if rank != self.topology.rank:
                pid = int(when_written(store, f"pid/{rank}", f"{self.topology}: rank {rank} has no trainer yet"))
                self.add_process(pid, lambda rank=rank, pid=pid: self._rank_ended(rank, pid))  # type: ignore[misc]

    def _rank_ended(self, rank: int, pid: int) -> str:
        main = " (local main process)" if rank == self.topology.local_ranks[0] else ""
        return f"the process of rank {rank}{main} ended (pid {pid}); if nothing above says why, it was killed"

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            pass  # it is awake as it is

    def _run(self) -> None:
        threading.Thread(target=self._watch_store, name="watch-store", daemon=True).start()
        try:
            self._watch()
        except Exception as error:
            traceback.print_exception(error)
            self._leave(self._board.tell(f"{self.topology}: the watch itself failed: {type(error).__name__}: {error}"))

    def _watch_store(self) -> None:
        """The store's client waits without a deadline for a server that holds the connection and is silent."""
        while not self._closed.wait(POLL_S):
            asked = self._asked
            if asked is not None and time.monotonic() - asked > STORE_TIMEOUT_S:
                self._board.give_up()
                self._leave(store_gone())

    def _watch(self) -> None:
        while not self._closed.is_set():
            fired = [fd for fd, _ in self._poll.poll(POLL_S * 1000)]
            if self._closed.is_set():
                return
            self._asked = time.monotonic()
            for fd in fired:
                self._on_event(fd)
            line = self._due_line() or self._board.fatal_line()
            self._asked = None
            if line is not None:
                self._leave(line)

    def _on_event(self, fd: int) -> None:
        if fd == self._wake_read:
            for number in os.read(self._wake_read, 4096):  # 0 is a plain wake-up, anything else a signal's number
                # The pipe is told of every signal that has a Python handler: a reward function may set an alarm
                if number in STOP_SIGNALS and signal.getsignal(number) is told_by_the_pipe:
                    self.report(f"stopped by {signal.Signals(number).name}", SYMPTOM_DELAY_S)
            return
        with self._lock:
            cause = self._processes.pop(fd, None)
            if cause is None:
                return  # forgotten meanwhile
            self._poll.unregister(fd)
            os.close(fd)
        # A launcher ends after its ranks: let one that knows more speak first.
        if self._board.fatal_line() is None and not self._board.all_through():
            self.report(cause())

    def _due_line(self) -> str | None:
        with self._lock:
            if self._local_failure is None or time.monotonic() < self._local_failure[1]:
                return None
            line = self._local_failure[0]
        return self._board.tell(line)

    def _leave(self, line: str) -> None:
        for cleanup in self._cleanups:
            try:
                cleanup()
            except Exception:
                traceback.print_exc()
        # in a thread, because a store whose host lost its power is silent for ever
        waiting = threading.Thread(target=self._board.wait_for_readers, daemon=True)
        waiting.start()
        waiting.join(GRACE_S + 1.0)
        sys.stdout.flush()
        print(f"[trl_multinode] the run failed: {line}", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)


def told_by_the_pipe(*_: object) -> None:
    """Handler of the signals that end a run: the watch thread reads of them in its pipe."""


def is_symptom(error: BaseException) -> bool:
    """Whether the error says that somebody else ended: end of file of an engine, a collective without its peer."""
    if isinstance(error, EngineDiedError | PeerFailureError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "Connection"))
