"""Shared memory that a test left, without what other workers and other runs have in the machine's /dev/shm."""

import ctypes
import os
import re
import subprocess
from pathlib import Path

import psutil

from trl_multinode.wire.supervisor import descendants

SHARED_MEMORY = Path("/dev/shm")
CLONE_NEWNS = 0x20000
# names that vLLM, DeepSpeed and this library give
SEGMENT = re.compile(r"psm_|vllm_|trl_multinode_|.*-cpushm_")
MAPPED = re.compile(rf"{SHARED_MEMORY}/(\S+)")

# Names that processes of this worker had mapped after a test; used only where /dev/shm cannot be private
_seen: set[str] = set()
_private = False


def make_shared_memory_private() -> bool:
    """Mount a /dev/shm of its own for this process and its children, and return whether that worked. It needs root."""
    global _private
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() == 0 and libc.unshare(CLONE_NEWNS) == 0:
        commands = ["mount --make-rprivate /", f"mount -t tmpfs -o size=50% tmpfs {SHARED_MEMORY}"]
        _private = all(
            subprocess.run(command.split(), capture_output=True).returncode == 0
            for command in commands
        )
    return _private


def note_segments() -> None:
    """Remember what this process and its descendants have mapped. Call it after each test."""
    if not _private:
        _seen.update(_mapped([os.getpid(), *(process.pid for process in descendants())]))


def unused_segments() -> set[str]:
    """Return the segments that no live process has mapped: somebody made them and is gone."""
    names = {path.name for path in SHARED_MEMORY.iterdir() if SEGMENT.match(path.name)}
    if not _private:
        names &= _seen
    return names - _mapped(psutil.pids()) if names else names


def _mapped(pids: list[int]) -> set[str]:
    names: set[str] = set()
    for pid in pids:
        try:
            names.update(MAPPED.findall(Path(f"/proc/{pid}/maps").read_text()))
        except OSError:  # the process has ended, or belongs to another user
            continue
    return names
