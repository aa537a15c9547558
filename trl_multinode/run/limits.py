"""Open files: each rank holds three connections to the run's store, and all of them end in node 0's launcher."""

import os
import resource
from contextlib import suppress

from ..wire.process_end import stat_fields

CONNECTIONS_PER_RANK = 3  # torch's own, the watch thread's and the main thread's
MOST_WRAPPERS = 3
OTHER_FILES = 64  # of a launcher: logs, pipes, libraries


def raise_file_limit(launched: bool) -> None:
    """Raise the soft limit of open files to the hard one, for this process and for its launcher.

    With a soft limit of 1024, the store in node 0's launcher refuses connections at about 48 nodes of 7 ranks.

    Args:
        launched (`bool`):
            Whether a launcher has started this process. A process may change the limits of others of the same user.
    """
    for pid in (0, *launchers()) if launched else (0,):
        with suppress(OSError, ValueError):  # another user's, or forbidden: then the limit stays
            soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            if soft != hard:
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))


def launchers() -> list[int]:
    """Return the parents up to the first one that runs Python, because a shell may stand between.

    In a container the launcher may be process 1. Any other process 1 is not of this run.
    """
    found: list[int] = []
    pid = os.getppid()
    with suppress(OSError):
        while pid > 0 and len(found) < MOST_WRAPPERS:
            is_python = runs_python(pid)
            if pid > 1 or is_python:
                found.append(pid)
            if is_python:
                break
            pid = parent_of(pid)
    return found


def parent_of(pid: int) -> int:
    """Return the pid of a process's parent."""
    return int(stat_fields(pid)[1])


def runs_python(pid: int) -> bool:
    """Return whether a process runs Python, as far as this user may know it."""
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")
    except OSError:
        return False


def file_limit_cure(world_size: int) -> str:
    """Return the cure for a store that accepts no further connection."""
    needed = CONNECTIONS_PER_RANK * world_size + OTHER_FILES
    return (
        f"If node 0's launcher runs, it may have no file descriptors left for {world_size} ranks: start it with "
        f"`ulimit -n {max(needed, 4096)}` or more (in systemd `LimitNOFILE`, in a container `--ulimit nofile`)"
    )
