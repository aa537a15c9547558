"""Leftovers of a killed run on this machine: run folders, and the shared memory that the files in them list.

A run cleans up after itself, and an engine does it for a killed owner. If all processes of a node are killed at once,
nobody is left to do it, and each engine leaves up to 160 MiB of vLLM's message queues in /dev/shm.
"""

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from .locks import held_here, machine, try_to_lock
from .supervisor import recorded_segments, unlink_shared_memory

PREFIX = "trl_multinode_n"  # of a run's folder; the number of its node follows
# of the folder in which `launch` waits for the ending of a run
CHECK_PREFIX = "trl_multinode_check_"
OWNER_LOCK = "owner.lock"
RECORDS = "*.shm"  # of the shared memory of a folder's engines
YOUNG_S = 60.0  # a folder without a lock may be so young that its owner is about to lock it


@dataclass(frozen=True)
class Leftover:
    """A run folder with its shared memory, and the reason why it must stay, if any."""

    folder: Path
    segments: tuple[Path, ...]
    num_bytes: int
    kept: str | None = None


def candidates() -> list[Path]:
    """Return the run folders on this machine, and those of roll-calls, in the order of their names."""
    places = {Path(tempfile.gettempdir()).resolve(), Path("/tmp").resolve()}
    patterns = (f"{PREFIX}[0-9]*_*", f"{CHECK_PREFIX}*")
    return sorted(
        found for place in places for pattern in patterns for found in place.glob(pattern)
    )


def leftovers(remove: bool) -> Iterator[Leftover]:
    """Yield every run folder of this machine; with `remove`, remove those of dead runs of this user."""
    for folder in candidates():
        with ExitStack() as locks:
            try:
                reason = reason_to_keep(folder, locks)
                segments = () if reason else tuple(recorded_segments(*folder.glob(RECORDS)))
                num_bytes = size_of(folder) + sum(path.stat().st_size for path in segments)
                found = Leftover(folder, segments, num_bytes, reason)
                if remove and reason is None:
                    remove_folder(folder)
            except FileNotFoundError:  # its owner or another start removes it now
                continue
        yield found


def reason_to_keep(folder: Path, locks: ExitStack) -> str | None:
    """Return why a run folder must stay, or `None` with the locks of its owner and its engines held in `locks`."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return "it belongs to another user"
    if stat.S_IMODE(found.st_mode) & 0o077:
        return "other users may write into it"
    owner = folder / OWNER_LOCK
    if held_here(owner):  # first: to read the file would drop the lock
        return "its run lives"
    if not owner.exists():
        is_young = time.time() - found.st_mtime <= YOUNG_S
        return "it has no lock" if is_young or list(folder.iterdir()) else None
    if owner.read_text() != machine():
        return "it is of another machine, or from before a restart of this one"
    return _lock_all(folder, locks)


def _lock_all(folder: Path, locks: ExitStack) -> str | None:
    for path in (folder / OWNER_LOCK, *folder.glob("engine*.json")):
        try:
            locks.callback(os.close, try_to_lock(path))
        except FileNotFoundError:
            raise
        except OSError:
            return "its run lives"
    return None


def remove_folder(folder: Path) -> None:
    """Remove a run folder with the shared memory that it lists."""
    unlink_shared_memory(*folder.glob(RECORDS))
    shutil.rmtree(folder, ignore_errors=True)


def size_of(folder: Path) -> int:
    """Return the bytes of a folder's files, which other processes may be writing."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # renamed or removed meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


def remove_leftovers(report: Callable[[str], None]) -> None:
    """Remove what killed runs of this user left, and report it in one line. A start calls it; it never fails."""
    try:
        removed = [found for found in leftovers(remove=True) if found.kept is None]
    except OSError as error:
        report(
            f"could not look for what killed runs left ({error}); `trl-multinode clean` shows it"
        )
        return
    if removed:
        segments = sum(len(found.segments) for found in removed)
        size = sum(found.num_bytes for found in removed) / 1e6
        report(
            f"removed what killed runs left here: {len(removed)} folder(s), {segments} segment(s) of shared memory, "
            f"{size:.1f} MB"
        )
