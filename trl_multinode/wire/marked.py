"""Processes that a session of an agent leaves behind: they have its key in their environment."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

MARK = "TRL_MULTINODE_SESSION"  # environment variable of a session's processes, with its key
# for processes that start others while they are killed; one that hangs in the kernel stays
MOST_LOOKS = 20
LOOK_S = 0.05  # from one look to the next


def kill_processes_of(*keys: str) -> None:
    """Kill all processes of this user that have the key of one of these sessions as their mark."""
    marks = {f"{MARK}={key}".encode() for key in keys}
    for _ in range(MOST_LOOKS if keys else 0):
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        found = [pid for pid in pids if not marks.isdisjoint(_environment(pid))]
        if not found:
            return
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or belongs to another user
        return []
