"""State of a rank that other ranks can see: innermost frames of its main thread, its CPU time in /proc."""

import gc
import sys
import threading
import traceback
from itertools import islice
from pathlib import Path
from types import FrameType

import psutil

from ...wire.process_end import stat_fields

NUM_FRAMES = 3
DISK_WAIT = "D"  # state of a thread that waits for a disk
_reading = threading.Lock()


def innermost_frames() -> str:
    """Return the innermost frames of this process's main thread in one line, innermost first.

    The frames come from the interpreter, so the caller needs the interpreter lock: a rank whose main thread holds it
    for long keeps the frames that it wrote before.
    """
    innermost = frame_of(threading.main_thread().ident or 0)
    # it has none while the interpreter ends; `walk_stack` would walk this thread's instead
    if innermost is None:
        return ""
    frames = islice(traceback.walk_stack(innermost), NUM_FRAMES)
    return " < ".join(_named(frame) for frame, _ in frames)


def frame_of(thread: int) -> FrameType | None:
    """Return the frame of a thread, by its number, without a garbage collection meanwhile.

    Until Python 3.11.9 `sys._current_frames` holds a lock that the start of every thread takes with the interpreter
    lock held. A finalizer of a collection inside of it lets another thread run, and if that starts a thread, each of
    the two waits for the lock of the other: the whole process stands still
    (https://github.com/python/cpython/issues/106883).
    """
    with _reading:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread)
        finally:
            if collects:
                gc.enable()


def _named(frame: FrameType) -> str:
    code = frame.f_code
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{frame.f_lineno} in {code.co_name}"


def work_of(pid: int) -> tuple[int, str] | None:
    """Return a number that grows while a process works, and the state of its main thread; `None` if it has ended.

    The number is the CPU time of all its threads, in ticks, and its page faults that needed the disk: a library that
    loads from a slow disk uses little CPU time.
    """
    try:
        fields = stat_fields(pid)
    except OSError:
        return None
    major_faults, user, system = int(fields[9]), int(fields[11]), int(fields[12])
    return major_faults + user + system, fields[0]


def bytes_written() -> int:
    """Return the bytes that this process has written; 0 if the kernel does not count them."""
    try:
        return psutil.Process().io_counters().write_chars
    except Exception:
        return 0
