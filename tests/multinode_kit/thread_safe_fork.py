"""A fork of a process with other threads that cannot hang on a lock of the C library's resolver."""

import os
import signal
import socket
from collections.abc import Callable
from typing import NoReturn

MOST_FORKS = 10  # one in 250 hung while others connected
LOOKUP_LIMIT_S = (
    3  # a lookup takes microseconds; on a busy machine too short a limit only means another fork
)


def fork_without_held_locks(child: Callable[[], NoReturn]) -> int:
    """
    Fork until the new process can look up names, and run `child` in it.

    glibc resets the locks of malloc and stdio in a fork, but not the one of its resolver. If another thread holds that
    lock at the moment of the fork, every lookup of the new process waits forever. The thread of a launcher that serves
    torch's store does one lookup for each rank that connects (`formatSockAddr` in torch's `socket.cpp`), while the
    launcher forks the next rank. Of launches with 12 ranks 7 in 155 hung with `os.fork`, 0 in 330 with this function.

    Args:
        child (`Callable[[], NoReturn]`):
            Program of the new process.

    Returns:
        `int`: the pid of the new process.

    Raises:
        RuntimeError: the new process ended before it ran `child`, or the lock was held in all of 10 forks.
    """
    for _ in range(MOST_FORKS):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(read)
                _look_up_or_end()
                os.write(write, b"1")
                os.close(write)
            except BaseException:
                os._exit(1)  # or it would go on as a second parent
            child()
        os.close(write)
        usable = os.read(read, 1)
        os.close(read)
        if usable:
            return pid
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code != -signal.SIGALRM:
            raise RuntimeError(f"fork {pid} ended with {code} before its program")
    raise RuntimeError(
        f"each of {MOST_FORKS} forks inherited a held lock of the resolver: a lookup of this process does not return"
    )


def _look_up_or_end() -> None:
    """Take the resolver's lock and release it. If that takes too long, the process ends with SIGALRM."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LOOKUP_LIMIT_S)
    socket.gethostbyname_ex("127.0.0.1")  # a number needs no server, but it takes the lock
    signal.alarm(0)
