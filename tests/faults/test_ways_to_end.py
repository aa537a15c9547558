"""A rank never fails alone: for each way to end, all ranks print one line and leave with one exit code."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGSTOP, SIGTERM

import pytest
import torch
from forks import Rank, forked
from store_host import FAILED, RANKS, StoreHost, enter, enter_early, num_finished, topology_of
from waiting import HANG_S, until

from trl_multinode.errors import EngineDiedError
from trl_multinode.run import reporter
from trl_multinode.run import store as run_store
from trl_multinode.run.endings.exit_codes import ENGINE, OTHER, PEER_LOST, PREEMPTED, USER_CODE
from trl_multinode.run.meeting import Meeting
from trl_multinode.run.reconnecting import StoreConnection
from trl_multinode.run.store import connect_store
from trl_multinode.run.topology import Topology
from trl_multinode.run.watch import arrivals, early, leaving, watch_thread, watchdog
from trl_multinode.run.watch.watch_thread import WatchThread
from trl_multinode.run.watch.watchdog import Watchdog

KILLED = -SIGKILL
RUNS = None  # a rank that is stopped, or knows nothing of the run


@dataclass
class Here:
    """One rank in its own process."""

    rank: int
    store: StoreHost
    folder: Path

    def trainer(self, launched: bool = False) -> Watchdog:
        """Enter the run with a trainer."""
        watch = enter(self.rank, self.store, launched)
        clean_up(watch)
        self.up()
        return watch

    def alone(self, launched: bool = False) -> Watchdog:
        """Enter a run of one process."""
        watch = Watchdog(Topology(0, 1, 0, 1, 0, 1, launched))
        clean_up(watch)
        self.up()
        return watch

    def imported(self) -> WatchThread:
        """Import the library in a rank of a launch; return the watch when it has registered this rank."""
        enter_early(self.rank, self.store)
        watch = early.early_watch()
        assert watch is not None
        until(lambda: watch.arrivals._registered, "this rank in the store")
        return watch

    def with_neighbours(self) -> WatchThread:
        """As `imported`; the watch knows the other rank of the node, too."""
        watch = self.imported()
        until(lambda: not watch.arrivals._neighbours, "the pids of the node")
        return watch

    def up(self) -> None:
        """Let the fault happen, once all ranks have called this."""
        print("ready", flush=True)

    def until_now(self) -> None:
        """Wait until the fault has happened."""
        until((self.folder / "now").exists, "the fault")

    def wait(self) -> None:
        """Wait as in a collective whose other ranks never come."""
        time.sleep(2 * HANG_S)


def clean_up(watch: Watchdog) -> None:
    print("to be closed", flush=True)
    watch.cleanups.append(lambda: print("closed by the watch", flush=True))


# ---- what the ranks do


def wait_in_a_trainer(here: Here) -> None:
    with here.trainer().guard():
        here.wait()


def one_raises(raising: int, error: Exception) -> Callable[[Here], None]:
    def body(here: Here) -> None:
        with here.trainer().guard():
            here.until_now()
            if here.rank == raising:
                raise error
            here.wait()

    return body


class Unshowable(Exception):
    def __str__(self) -> str:
        return str(1 // 0)


class Wordless(Exception):
    def __str__(self) -> str:
        time.sleep(2 * HANG_S)
        return "too late"


def one_raises_without_a_word(here: Here) -> None:
    watch_thread.EXPLAIN_S = leaving.PRINTING_S = 0.5
    one_raises(2, Wordless())(here)


def one_aborts_in_a_collective(here: Here) -> None:
    with here.trainer().guard():
        here.until_now()
        if here.rank == 3:
            os.write(2, b"terminate called\n  what(): 6 vs 2. Is there a collective mismatch?\n\n")
            os.abort()
        here.wait()


def all_raise(here: Here) -> None:
    with here.trainer().guard():
        here.until_now()
        raise ValueError(f"row of rank {here.rank}")


def one_raises_when_the_others_are_through(here: Here) -> None:
    watch = here.trainer()
    with watch.guard():
        if here.rank == 1:
            until(lambda: num_finished(watch) == RANKS - 1, "the others to close")
            raise OSError("disk full")
        watch.close()


def output_of_one_blocks(here: Here) -> None:
    """As after Ctrl-S, or with a pager that was stopped."""
    watch = here.trainer()
    with watch.guard():
        if here.rank != 3:
            here.wait()
        here.until_now()
        watch.cleanups.clear()  # it prints
        leaving.PRINTING_S = reporter.BLOCKED_S = 0.5
        for stream in (1, 2):
            os.dup2(full_pipe(), stream)
        raise ValueError("the reward failed")


def full_pipe() -> int:
    """Return the end of a pipe that takes no more bytes."""
    _, end = os.pipe()
    os.set_blocking(end, False)
    with suppress(BlockingIOError):
        while True:
            os.write(end, b"x" * 512)
    os.set_blocking(end, True)
    return end


def wait_with_a_limit_of_the_store(here: Here) -> None:
    here.trainer()
    here.until_now()
    StoreConnection.limit_s = 3.0
    here.wait()


def a_symptom_before_its_cause(here: Here) -> None:
    """Rank 1 sees an end of file first, as a rank without the engine's pid does."""
    watch_thread.SYMPTOM_DELAY_S = 2 * HANG_S
    watch = here.trainer()
    with watch.guard():
        if here.rank == 1:
            raise EngineDiedError("engine 0 of node 0 ended")
        if here.rank == 0:
            engine = an_engine(watch, "engine 0 of node 0 was killed by SIGKILL")
            here.until_now()
            engine.kill()
        here.wait()


def an_engine(watch: Watchdog, cause: str) -> subprocess.Popen:
    """Return a process that runs and is watched."""
    engine = subprocess.Popen(["sleep", str(HANG_S)])
    watch.add_process(engine.pid, lambda: cause)
    return engine


def wait_for_a_signal(here: Here) -> None:
    default_signals()
    here.trainer(launched=True)
    here.wait()


def default_signals() -> None:
    """A suite in the background ignores SIGINT, and so would its forks."""
    signal.signal(SIGINT, signal.default_int_handler)
    signal.signal(SIGTERM, signal.SIG_DFL)


def sys_exit_inside(here: Here) -> None:
    watch = here.trainer()
    try:
        with watch.guard():
            here.until_now()
            if here.rank == 1:
                sys.exit(3)
            here.wait()
    finally:
        watch.close()  # as at exit


def one_leaves_well(here: Here) -> None:
    """Code that a model has written, run by `exec` in a reward function, calls `sys.exit(0)`."""
    watch = here.trainer()
    try:
        with watch.guard():
            here.until_now()
            if here.rank == 1:
                sys.exit(0)
            meet(watch)
    finally:
        watch.close()  # as at exit


def one_leaves_well_and_the_others_are_in_a_collective(here: Here) -> None:
    watchdog.LEAVE_S = 1.0
    with here.trainer().guard():
        here.until_now()
        if here.rank == 1:
            sys.exit(0)
        here.wait()


def one_closes_early(here: Here) -> None:
    """As after a callback that stops the training of one rank."""
    watch = here.trainer()
    with watch.guard():
        meet(watch)
        here.until_now()
        if here.rank != 2:
            meet(watch)
    watch.close()


def meet(watch: Watchdog) -> None:
    if watch not in meetings:
        meetings[watch] = Meeting(watch.topology, connect_store(watch.topology, watch.run))
        watch.missed = meetings[watch].is_missed
    meetings[watch].wait()


meetings: dict[Watchdog, Meeting] = {}


def system_exit_outside(here: Here) -> None:
    watch = here.trainer()
    try:
        here.until_now()
        if here.rank == 1:
            raise SystemExit(3)
        here.wait()
    finally:
        watch.close()


def script_ends_with(status: object) -> Callable[[Here], None]:
    def body(here: Here) -> None:
        watch = here.trainer()
        here.until_now()
        if here.rank == 1:
            # as Python at the end of a script, before it calls the functions of `atexit`
            with suppress(SystemExit):
                sys.exit(status)
            watch.close_at_exit()
        here.wait()

    return body


# ---- before the trainer


def wait_before_the_trainer(here: Here) -> None:
    here.with_neighbours()
    here.up()
    here.wait()


def one_does_not_import(here: Here) -> None:
    arrivals.MISSING_EVERY_S = 1.0
    if here.rank == 3:
        here.up()
        here.wait()
    watch = here.imported()
    here.up()
    here.until_now()
    watch.arrivals.limit_s = 1.0
    here.wait()


def a_node_does_not_import(here: Here) -> None:
    arrivals.LOOK_EVERY_S, arrivals.ENDED_S = 0.2, 1.0
    if here.rank < 2:
        here.imported()
    here.up()
    here.wait()


def one_has_no_trainer(here: Here) -> None:
    arrivals.LOOK_EVERY_S, arrivals.ALIVE_EVERY_S = 0.2, 0.5
    watch = here.with_neighbours()
    if here.rank == 3:
        here.up()
        here.wait()
    trainer = Watchdog(topology_of(here.rank, launched=True))
    until(lambda: watch.arrivals._signs._told, "the sign that this rank has a trainer")
    here.up()
    here.until_now()
    trainer.of_process.arrivals.limit_s = 1.0
    here.wait()


def uncaught_before_the_trainer(here: Here) -> None:
    here.imported()
    here.up()
    here.until_now()
    if here.rank == 3:
        early._early._on_uncaught(ValueError("no data"))
    here.wait()


def exits_before_the_trainer(here: Here) -> None:
    here.imported()
    here.up()
    here.until_now()
    if here.rank == 3:
        with suppress(SystemExit):
            sys.exit(3)
        early._early._at_exit()
    here.wait()


def ends_well_without_a_trainer(here: Here) -> None:
    here.imported()
    if here.rank != 1:
        Watchdog(Topology.from_environment())
    here.up()
    here.until_now()
    if here.rank == 1:
        early._early._at_exit()
    here.wait()


def between_two_trainers(here: Here) -> None:
    """Trainers attach to the thread of the import, which goes on without them."""
    here.imported()
    before = signal.getsignal(SIGTERM)
    first, second = (Watchdog(Topology.from_environment()) for _ in range(2))
    assert first.of_process is second.of_process is early.early_watch()
    assert signal.getsignal(SIGTERM) is not before
    for watch in (first, second):
        watch.close()
    assert signal.getsignal(SIGTERM) is before and not first.of_process.stopped.is_set()
    here.up()
    here.until_now()
    if here.rank == 2:
        early._early._on_uncaught(OSError("the third trainer"))
    here.wait()


# ---- one process


def all_but_one_signal_are_the_scripts(here: Here) -> None:
    """A time limit of a reward, a loader's workers, SLURM's warning: each comes by the same pipe, before SIGINT."""
    default_signals()
    seen = []
    own = (signal.SIGALRM, signal.SIGUSR1, signal.SIGCHLD, SIGTERM)
    for number in own:
        signal.signal(number, lambda number, _: seen.append(number))
    here.alone(launched=True)
    for number in own:
        os.kill(os.getpid(), number)
    assert sorted(seen) == sorted(own)
    os.kill(os.getpid(), SIGINT)
    here.wait()


def one_signal_becomes_the_scripts(here: Here) -> None:
    default_signals()
    seen = []
    here.alone(launched=True)
    signal.signal(SIGINT, lambda number, _: seen.append(number))
    os.kill(os.getpid(), SIGINT)
    assert seen == [SIGINT]
    os.kill(os.getpid(), SIGTERM)
    here.wait()


def a_pool_ends_before_the_run(here: Here) -> None:
    """The pool of a reward function gets SIGTERM, which would be in the pipe before SIGINT."""
    default_signals()
    here.alone(launched=True)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply_async(work_for_long, (here.folder / "works",))
        until((here.folder / "works").exists, "the pool to work")
    os.kill(os.getpid(), SIGINT)
    here.wait()


def work_for_long(begun: Path) -> None:
    begun.touch()
    time.sleep(2 * HANG_S)


def a_process_is_gone_already(here: Here) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    here.alone().add_process(gone.pid, lambda: "engine 0 was gone")
    here.wait()


def a_forgotten_process_ends_first(here: Here) -> None:
    watch = here.alone()
    forgotten = an_engine(watch, "engine 0 ended")
    watch.forget_processes()
    forgotten.kill()
    forgotten.wait()
    an_engine(watch, "engine 1 ended").kill()
    here.wait()


def fails_with_a_note(here: Here) -> None:
    watch = here.alone(launched=True)
    with watch.noting("Lower `max_num_seqs`."):
        an_engine(watch, "engine 0 ended").kill()
        here.wait()


def fails_after_a_note(here: Here) -> None:
    watch = here.alone(launched=True)
    with watch.noting("Lower `max_num_seqs`."):
        pass
    watch.report("engine 0 ended")
    here.wait()


def the_watch_itself_fails(here: Here) -> None:
    def broken() -> str:
        raise OSError("log folder is gone")

    watch = here.alone()
    engine = subprocess.Popen(["sleep", str(HANG_S)])
    watch.add_process(engine.pid, broken)
    engine.kill()
    here.wait()


# ---- what happens to them


def nothing(ranks: list[Rank], store: StoreHost) -> None:
    """The ranks do all."""


def send(number: signal.Signals, to: int) -> Callable[[list[Rank], StoreHost], None]:
    return lambda ranks, store: os.kill(ranks[to].process.pid, number)


def end_the_store(ranks: list[Rank], store: StoreHost) -> None:
    store.end()


def end_the_launcher(ranks: list[Rank], store: StoreHost) -> None:
    time.sleep(2.0)  # in which nothing may end the ranks: the launcher is there
    store.end_launcher()


def stop_the_store(ranks: list[Rank], store: StoreHost) -> None:
    os.kill(store.process.pid, SIGSTOP)


def rank_1_reports_a_symptom(ranks: list[Rank], store: StoreHost) -> None:
    ranks[1].wait_for("EngineDiedError")


def both_sides_name_rank_3(ranks: list[Rank], store: StoreHost) -> None:
    """One rank of node 0, and one of the other nodes."""

    def names(rank: Rank) -> bool:
        return "rank 3 (node 1)" in rank.text

    until(
        lambda: names(ranks[2]) and (names(ranks[0]) or names(ranks[1])), "lines that name rank 3"
    )
    assert not (names(ranks[0]) and names(ranks[1]))


# ---- the table


@dataclass(frozen=True)
class Ending:
    """A way to end: what the ranks do, what happens, and what is seen."""

    name: str
    body: Callable[[Here], None]
    line: tuple[str, ...]  # identifiers in the line of all ranks
    code: int
    fault: Callable[[list[Rank], StoreHost], None] = nothing
    # ranks that do not print it, with their exit codes
    silent: dict[int, int | None] = field(default_factory=dict)
    ranks: int = RANKS
    log: tuple[int, str] | None = None  # a rank, and text that only its own log has
    never: str | None = None  # text that no rank prints


ENDINGS = [
    pytest.param(Ending("a reward raises", one_raises(2, ValueError("no reward\nfor row 3")),
        line=("node 1, rank 2, phase reward: ValueError: no reward for row 3",), code=USER_CODE,
        log=(2, "    raise error")),
        marks=pytest.mark.fault("17")),
    pytest.param(Ending("the text of an error raises", one_raises(2, Unshowable()),
        line=("node 1, rank 2, phase reward: Unshowable: ", "raised ZeroDivisionError"), code=USER_CODE),
        marks=pytest.mark.fault("17")),
    pytest.param(Ending("the text of an error never comes", one_raises_without_a_word,
        line=("node 1, rank 2, phase reward: Wordless, ",), code=OTHER),
        marks=pytest.mark.fault("17")),
    pytest.param(Ending("an error has 20 MB of text", one_raises(2, ValueError("begin " + "x" * 20_000_000 + " end")),
        line=("node 1, rank 2, phase reward: ValueError: begin xx", "characters left out", "xx end"), code=USER_CODE),
        marks=pytest.mark.fault("17")),
    Ending("all raise", all_raise, ("phase reward: ValueError: row of rank",), USER_CODE),
    Ending("one raises while the others close", one_raises_when_the_others_are_through,
        line=("node 0, rank 1, phase reward: OSError: disk full",), code=USER_CODE),
    pytest.param(Ending("memory is too small", one_raises(3, torch.OutOfMemoryError("Tried to allocate 2.00 GiB")),
        line=("node 1, rank 3, phase reward: OutOfMemoryError", "2.00 GiB"), code=USER_CODE),
        marks=pytest.mark.fault("gpu_memory")),
    pytest.param(Ending("output blocks", output_of_one_blocks,
        line=("node 1, rank 3", "ValueError: the reward failed"), code=USER_CODE, silent={3: USER_CODE}),
        marks=pytest.mark.fault("output_blocks")),
    pytest.param(Ending("a rank is killed", wait_in_a_trainer, fault=send(SIGKILL, to=2),
        line=("node 1, rank 3, phase reward", "rank 2 (local main process)", "(pid {pids[2]})"), code=PEER_LOST,
        silent={2: KILLED}),
        marks=pytest.mark.fault("10")),
    pytest.param(Ending("a rank aborts in a collective", one_aborts_in_a_collective,
        line=("node 1, rank 2", "rank 3", "(pid {pids[3]})", "SIGABRT", "only some ranks call"),
        code=PEER_LOST, silent={3: -signal.SIGABRT}),
        marks=pytest.mark.fault("aborted")),
    Ending("one raises while another is stopped", one_raises(0, ValueError("engine gone")), fault=send(SIGSTOP, to=3),
        line=("node 0, rank 0", "ValueError: engine gone"), code=USER_CODE, silent={3: RUNS}),
    Ending("the store is closed", wait_in_a_trainer, fault=end_the_store,
        line=("PeerFailureError", "launcher of node 0", "127.0.0.1:{port}"), code=PEER_LOST),
    pytest.param(Ending("the store is stopped", wait_with_a_limit_of_the_store, fault=stop_the_store,
        line=("PeerFailureError", "launcher of node 0", "127.0.0.1:{port}"), code=PEER_LOST),
        marks=pytest.mark.fault("launcher_frozen")),
    Ending("an engine is killed", a_symptom_before_its_cause, fault=rank_1_reports_a_symptom,
        line=("node 0, rank 0, phase reward: engine 0 of node 0 was killed by SIGKILL",), code=ENGINE),
    Ending("SIGTERM", wait_for_a_signal, fault=send(SIGTERM, to=1),
        line=("node 0, rank 1, phase reward", "SIGTERM"), code=PREEMPTED),
    Ending("SIGINT", wait_for_a_signal, fault=send(SIGINT, to=1),
        line=("node 0, rank 1, phase reward", "SIGINT"), code=OTHER),
    Ending("sys.exit in the trainer", sys_exit_inside, ("node 0, rank 1, phase reward", "3"), USER_CODE),
    pytest.param(Ending("sys.exit(0) in the trainer of one rank", one_leaves_well,
        line=("node 0, rank 1, phase reward: SystemExit", "exit code 0"), code=USER_CODE),
        marks=pytest.mark.fault("leaves_alone")),
    pytest.param(Ending("sys.exit(0) of one rank in a step", one_leaves_well_and_the_others_are_in_a_collective,
        line=("node 0, rank 1, phase reward: SystemExit", "exit code 0"), code=USER_CODE),
        marks=pytest.mark.fault("leaves_alone")),
    pytest.param(Ending("one rank ends its training early", one_closes_early,
        line=("node 1, rank 2, phase reward: this rank has closed its trainer",), code=USER_CODE),
        marks=pytest.mark.fault("leaves_alone")),
    Ending("a trainer is closed by an exit", system_exit_outside,
        line=("node 0, rank 1, phase reward: SystemExit", "code 3"), code=USER_CODE),
    Ending("a script ends with 3", script_ends_with(3),
        line=("node 0, rank 1, phase reward: SystemExit", "code 3"), code=USER_CODE),
    Ending("a script ends with a message", script_ends_with("no data"),
        line=("node 0, rank 1, phase reward: SystemExit", "'no data'"), code=USER_CODE),
    pytest.param(Ending("a rank is killed before the trainer", wait_before_the_trainer, fault=send(SIGKILL, to=3),
        line=("node 1, rank 2, phase before the trainer", "rank 3", "(pid {pids[3]})"), code=PEER_LOST,
        silent={3: KILLED}),
        marks=pytest.mark.fault("script_error")),
    pytest.param(Ending("a rank does not import", one_does_not_import, fault=both_sides_name_rank_3,
        line=("rank 3 (node 1)", "trl_multinode", " 1 s", "`engine_start_timeout`"), code=PEER_LOST, silent={3: RUNS}),
        marks=pytest.mark.fault("script_error")),
    pytest.param(Ending("a launcher ends before its ranks import", a_node_does_not_import, fault=end_the_launcher,
        line=("PeerFailureError", "rank 2 (node 1), rank 3 (node 1)", "1 of 2 launchers"), code=PEER_LOST,
        silent={2: RUNS, 3: RUNS}),
        marks=pytest.mark.fault("script_error")),
    pytest.param(Ending("a script raises before the trainer", uncaught_before_the_trainer,
        line=("node 1, rank 3, phase before the trainer: ValueError: no data",), code=USER_CODE),
        marks=pytest.mark.fault("script_error")),
    pytest.param(Ending("a script exits before the trainer", exits_before_the_trainer,
        line=("node 1, rank 3, phase before the trainer: SystemExit", "code 3"), code=USER_CODE),
        marks=pytest.mark.fault("script_error")),
    pytest.param(Ending("a script ends well without the others' trainer", ends_well_without_a_trainer,
        line=("node 0, rank 1, phase before the trainer",), code=USER_CODE),
        marks=pytest.mark.fault("script_error")),
    Ending("a script raises between two trainers", between_two_trainers,
        line=("node 1, rank 2, phase script: OSError: the third trainer",), code=USER_CODE),
    pytest.param(Ending("a rank is stopped before its trainer", one_has_no_trainer, fault=send(SIGSTOP, to=3),
        line=("rank 3 (node 1)", "`engine_start_timeout` 1 s"), code=PEER_LOST, silent={3: RUNS}),
        marks=pytest.mark.fault("frozen_early")),
    Ending("SIGINT after signals of the script", all_but_one_signal_are_the_scripts,
        line=("node 0, rank 0", "SIGINT"), code=OTHER, ranks=1),
    Ending("SIGTERM after the script's SIGINT", one_signal_becomes_the_scripts,
        line=("node 0, rank 0", "SIGTERM"), code=PREEMPTED, ranks=1),
    Ending("SIGINT after the end of a pool", a_pool_ends_before_the_run, ("node 0, rank 0", "SIGINT"), OTHER, ranks=1),
    Ending("an engine is gone already", a_process_is_gone_already,
        line=("node 0, rank 0, phase set-up: engine 0 was gone",), code=ENGINE, ranks=1),
    Ending("an engine ends after a forgotten one", a_forgotten_process_ends_first,
        line=("node 0, rank 0, phase set-up: engine 1 ended",), code=ENGINE, ranks=1),
    Ending("an engine ends inside a note", fails_with_a_note,
        line=("phase set-up: engine 0 ended. Lower `max_num_seqs`.",), code=ENGINE, ranks=1),
    Ending("an engine ends after a note", fails_after_a_note,
        line=("engine 0 ended",), code=OTHER, ranks=1, never="max_num_seqs"),
    Ending("the watch fails", the_watch_itself_fails,
        line=("node 0, rank 0", "OSError: log folder is gone"), code=OTHER, ranks=1),
]  # fmt: skip


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.name)
def test_all_ranks_end_with_one_line_and_one_code(ending, tmp_path, store, monkeypatch):
    monkeypatch.setattr(run_store, "STORE_TIMEOUT_S", 60.0)
    monkeypatch.setattr(leaving, "PRINTING_S", HANG_S)
    # All wait until all have read the line: a killed rank must be counted, and only one that runs on may be given up
    given_up = RUNS in ending.silent.values()
    monkeypatch.setattr(run_store, "GRACE_S", 0.5 if given_up else 2 * HANG_S)

    with forked(
        lambda rank: ending.body(Here(rank, store, tmp_path)), ending.ranks, tmp_path
    ) as ranks:
        for rank in ranks:
            rank.wait_for("ready")
        ending.fault(ranks, store)
        (tmp_path / "now").touch()
        speaking = [ranks[number] for number in range(ending.ranks) if number not in ending.silent]
        statuses = [rank.wait() for rank in speaking]
        assert statuses == [ending.code] * len(speaking), [rank.text for rank in ranks]

        lines = {rank.text.splitlines()[-1] for rank in speaking}
        assert len(lines) == 1, lines
        (line,) = lines
        assert line.startswith(FAILED)
        pids = [rank.process.pid for rank in ranks]
        for identifier in ending.line:
            assert identifier.format(pids=pids, port=store.port) in line
        if ending.log is not None:
            rank, text = ending.log
            assert [text in other.text for other in ranks] == [
                number == rank for number in range(ending.ranks)
            ]
        if ending.never is not None:
            assert not any(ending.never in rank.text for rank in ranks)
        for rank in speaking:
            assert rank.text.count("closed by the watch") == rank.text.count("to be closed")
        for number, status in ending.silent.items():
            if status is RUNS:
                assert ranks[number].process.is_alive()
            else:
                assert ranks[number].wait() == status
