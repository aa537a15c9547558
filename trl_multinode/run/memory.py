"""Memory that is left to a container, and the share of it that a slot for each bucket of a weight sync may take."""

from contextlib import suppress
from pathlib import Path

import psutil

STAGED_SHARE = 0.5  # largest share of the memory that is left for slots of all buckets


def obstacle_to_slots(num_bytes: int) -> str | None:
    """Return why so many bytes are too much for a slot for each bucket, or `None` if they are not."""
    left = memory_left()
    if num_bytes <= STAGED_SHARE * left:
        return None
    return (
        f"a slot for each bucket takes {num_bytes >> 20} MiB, more than half of the {left >> 20} MiB of memory that "
        "are left"
    )


def memory_left(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory that this container may still take."""
    left = psutil.virtual_memory().available
    with suppress(OSError, ValueError, StopIteration):  # no limit, or no cgroup of version 2
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        lines = (cgroup / "memory.stat").read_text().splitlines()
        cached = next(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
        left = min(left, limit - used + cached)
    return left
