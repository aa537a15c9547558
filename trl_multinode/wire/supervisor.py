"""Supervision: an engine process watches its owner and its children, and kills its own tree when one of them ends.

No process may outlive its owner, but vLLM leaves its engine core and workers alive when the parent is SIGKILLed (vllm
#55510). So the engine process is a subreaper, which makes orphaned grandchildren its children, and holds a pidfd on
its owner and on each vLLM process below it. A pidfd fires within 1 ms; a pipe's end of file came 3.7 s late, because a
forked grandchild held the write end. Where there are no pidfds, `process_end.py` watches /proc instead.
"""

import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

from .process_end import open_end, prctl, start_time

PR_SET_CHILD_SUBREAPER = 36
PARENT_S = 0.02  # between the end of a child, which its killed parent caused, and the news of the parent's own end
RECORD_S = 2.0
SHARED_MEMORY = Path("/dev/shm")
# vLLM's message queues, and what the workers of one engine share on a CPU, by the names of different versions; ours
# has no name
LEFT_BEHIND = re.compile(f"{SHARED_MEMORY}/(psm_|vllm_|.*-cpushm_)")


def become_subreaper() -> None:
    """Make orphaned descendants children of this process."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def descendants() -> list[psutil.Process]:
    """Return the live processes below this one, without zombies."""
    return [child for child in psutil.Process().children(recursive=True) if is_running(child.pid)]


def title_of(process: psutil.Process) -> str:
    """Return the start of a process's command line, or an empty string for a process that has ended.

    vLLM pads its titles (`VLLM::EngineCore`) with spaces.
    """
    return " ".join(_command_of(process).split())[:80]


def _command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # also a zombie: a listed process may end at any time
        return ""


def first_ended(pid: int, pids: Iterable[int]) -> int:
    """Return the first of `pids` that has ended, `pid` or a process above it.

    The kernel tells the children of a killed process before it tells us, and they end at once (`PR_SET_PDEATHSIG`), so
    the end of a child can arrive first: in 1 of 20 runs with vLLM's core killed.

    Args:
        pid (`int`):
            Process that has ended.
        pids (`Iterable[int]`):
            Watched processes, parents before their children.
    """
    time.sleep(PARENT_S)
    return next((parent for parent in pids if parent == pid or not is_running(parent)), pid)


def is_running(pid: int) -> bool:
    """Return whether `pid` is a process, and no zombie."""
    return start_time(pid, running=True) is not None


def kill_descendants(deadline_s: float = 10.0) -> list[int]:
    """SIGKILL all processes below this one until none is left; return the pids that survive the deadline.

    It repeats, because a child may fork between listing and killing: its orphans become children of this subreaper and
    are listed next. multiprocessing's resource tracker unlinks the shared memory of killed processes and then ends by
    itself, so it is killed only in the second half of `deadline_s`.
    """
    deadline = time.monotonic() + deadline_s
    while (alive := descendants()) and time.monotonic() < deadline:
        workers = [process for process in alive if not is_resource_tracker(process)]
        overdue = time.monotonic() > deadline - deadline_s / 2
        for process in alive if overdue else workers:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=0.2)
    return [process.pid for process in descendants()]


def release_resource_tracker() -> None:
    """Close this process's end of the tracker's pipe; the tracker then ends with the last process that holds one.

    Call it last: this process cannot share memory any more. Without the call `kill_descendants` waits half of its
    deadline, 5 s, for a tracker that waits for this process.
    """
    runs = any(is_resource_tracker(process) for process in descendants())  # `getfd` would start one
    if (fd := resource_tracker.getfd() if runs else None) is not None:
        os.close(fd)


def is_resource_tracker(process: psutil.Process) -> bool:
    """Return whether a process is multiprocessing's resource tracker."""
    return "resource_tracker" in _command_of(process)


def record_shared_memory(record: Path) -> None:
    """Record in a file which of vLLM's segments in /dev/shm the descendants have mapped.

    vLLM's message queues (160 MiB each) outlive a killed engine core, and also an orderly end of vLLM 0.31.
    """
    segments = set()
    for process in descendants():
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
        except OSError:
            continue
        for line in maps.splitlines():
            if LEFT_BEHIND.search(line) and not line.endswith("(deleted)"):
                segments.add(line.split(maxsplit=5)[-1])
    new = record.with_suffix(".new")  # a reader must not see half of it
    new.write_text("\n".join(sorted(segments)))
    new.rename(record)


@contextmanager
def record_while_starting(record: Path) -> Iterator[None]:
    """Record shared memory every `RECORD_S`, in a thread: the engine may be killed together with its owner."""
    started = threading.Event()

    def run() -> None:
        while not started.wait(RECORD_S):
            with suppress(OSError):  # the folder is gone: the owner has ended
                record_shared_memory(record)

    thread = threading.Thread(target=run, name="shared-memory-record", daemon=True)
    thread.start()
    try:
        yield
    finally:
        started.set()
        thread.join()


def recorded_segments(*records: Path) -> Iterator[Path]:
    """Yield the segments of this user that `record_shared_memory` recorded, as far as they are still there."""
    for record in records:
        lines: list[str] = []
        # not recorded, or removed by another engine of a killed owner
        with suppress(FileNotFoundError):
            lines = record.read_text().splitlines()
        for line in lines:
            path = SHARED_MEMORY / Path(line).name
            with suppress(FileNotFoundError):
                if LEFT_BEHIND.match(str(path)) and path.lstat().st_uid == os.geteuid():
                    yield path


def unlink_shared_memory(*records: Path) -> None:
    """Remove the recorded segments. Call it when the processes have ended."""
    for segment in recorded_segments(*records):
        segment.unlink(missing_ok=True)


def exit_cause(pid: int) -> str:
    """Return in words how a child of this process ended. The zombie stays for a later `wait`."""
    try:
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return "ended"
    if info is None:
        return "ended"
    return exit_words(info.si_status if info.si_code == os.CLD_EXITED else -info.si_status)


def exit_words(code: int) -> str:
    """Return how a process ended, from an exit code as `subprocess` has it: negative for a signal."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def watch_end(pid: int, on_exit: Callable[[int], None]) -> None:
    """Call `on_exit(pid)` in a thread of its own when a process ends; usually it does not return.

    Raises:
        `ProcessLookupError`: if there is no such process.
    """
    end = open_end(pid)

    def run() -> None:
        poll = select.poll()
        poll.register(end, select.POLLIN)
        poll.poll()
        os.close(end)
        on_exit(pid)

    threading.Thread(target=run, name=f"watch-{pid}", daemon=True).start()
