"""The end of another process: as a readable file descriptor, or as a signal that the kernel sends to its children.

The descriptor is a pidfd, or without one a pipe that a thread writes to.

Linux has `pidfd_open` from 5.3 on. Older kernels and gVisor do not know it (ENOSYS), the seccomp filters of some
containers forbid it (EPERM), and a Python that was built with older headers has no `os.pidfd_open`. The thread then
reads `/proc/PID/stat` every `POLL_S`. Its start time identifies a process, because a later one with the same pid has
another.
"""

import ctypes
import errno
import os
import select
import signal
import threading
from contextlib import suppress
from pathlib import Path

POLL_S = 0.2  # 9 processes then take 1 % of a core, with 0.05 s 3 %; a pidfd fires within 1 ms
NO_PIDFD = {errno.ENOSYS, errno.EPERM, errno.EACCES}
LIBC = ctypes.CDLL(None, use_errno=True)  # loaded before a fork
PR_SET_PDEATHSIG = 1
ENDED = ("Z", "X", "x")  # states of a process that only its parent still sees


def end_with_parent(parent: int, number: int) -> None:
    """Have the kernel send signal `number` to this process when the *thread* that forked it ends.

    Args:
        parent (`int`):
            Pid of the parent. If it has ended before this call, this process is killed.
        number (`int`):
            Number of the signal.

    Raises:
        `OSError`: if the kernel refuses.
    """
    prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def prctl(option: int, value: int) -> None:
    """Set a property of this process; raise `OSError` if the kernel refuses."""
    if LIBC.prctl(option, value) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def open_end(pid: int) -> int:
    """Return a file descriptor that becomes readable when process `pid` ends. The caller closes it.

    Raises:
        `ProcessLookupError`: if there is no such process.
    """
    try:
        return os.pidfd_open(pid)
    except AttributeError:
        pass
    except OSError as error:
        if error.errno not in NO_PIDFD:
            raise
    started = start_time(pid)
    if started is None:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    read_end, write_end = os.pipe()
    arguments = (pid, started, write_end)
    threading.Thread(
        target=_write_at_end, args=arguments, name=f"end-of-{pid}", daemon=True
    ).start()
    return read_end


def _write_at_end(pid: int, started: int, write_end: int) -> None:
    """Write a byte when the process has ended; a closed pipe alone would wait for each fork that has a copy of it."""
    poll = select.poll()
    poll.register(write_end, 0)  # an error is always reported: the reader has closed its end
    while start_time(pid, running=True) == started and not poll.poll(POLL_S * 1000):
        pass
    with suppress(OSError):
        os.write(write_end, b"\0")
    os.close(write_end)


def start_time(pid: int, running: bool = False) -> int | None:
    """Return when a process started, in clock ticks since the boot; `None` if there is no such process.

    Args:
        pid (`int`):
            Process, perhaps one that has ended and waits for its parent.
        running (`bool`, *optional*, defaults to `False`):
            Also return `None` for a process that has ended.
    """
    try:
        fields = stat_fields(pid)
    except OSError:
        return None
    return None if running and fields[0] in ENDED else int(fields[19])


def stat_fields(pid: int) -> list[str]:
    """Return what the kernel says of a process, from its state on; before it is a name, which may have blanks."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
