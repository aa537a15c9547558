"""Processes that a session of an agent leaves behind: they have its key in their environment."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

MARK = "TRL_MULTINODE_SESSION"  # environment variable of a session's processes, with its key
MOST_LOOKS = (
    20  # for processes that start others while they are killed; one that hangs in the kernel stays
)
LOOK_S = 0.05  # from one look to the next


def kill_processes_of(key: str) -> list[int]:
    """Kill all processes of this user that have a session's key as their mark, and return their pids."""
    killed: set[int] = set()
    wanted = f"{MARK}={key}".encode()
    for _ in range(MOST_LOOKS):
        found = [
            pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _has(pid, wanted)
        ]
        if not found:
            break
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(found)
        time.sleep(LOOK_S)
    return sorted(killed)


def _has(pid: int, variable: bytes) -> bool:
    try:
        return variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or belongs to another user
        return False
