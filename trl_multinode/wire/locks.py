"""Locks that show whether the process that made a file still runs.

A pid means nothing in another container, which may share the temporary folder. The kernel drops an `fcntl` lock when
its process ends, however that happens, and does not pass it on to children, so a forked loader cannot hold it.
"""

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# A process's own locks never refuse it, and it loses one when it closes *any* descriptor of that file, so it must not
# even look at them
_held: dict[Path, int] = {}


def machine() -> str:
    """Return an identity of the running kernel: locks of another one may be invisible here (NFS without locks)."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def hold(path: Path) -> None:
    """Lock a file until this process ends or calls `release`; create the file if there is none.

    The file gets its name only when it is locked. On a file system without locks it stays unlocked, and
    [`try_to_lock`] fails there too.
    """
    path = path.resolve()
    new = path if path.exists() else path.with_name(f".{path.name}.new")
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    _held[path] = descriptor
    with suppress(OSError):
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if new != path:
        os.write(descriptor, machine().encode())
        new.rename(path)


def release(path: Path) -> None:
    """Drop a lock of this process, if it holds it."""
    descriptor = _held.pop(path.resolve(), None)
    if descriptor is not None:
        os.close(descriptor)


def held_here(path: Path) -> bool:
    """Return whether this process holds the lock, or inherited its descriptor by a fork."""
    return path.resolve() in _held


def try_to_lock(path: Path) -> int:
    """Return an open descriptor with the lock of a file.

    Raises:
        `OSError`: if another process holds it, or the file system has no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
