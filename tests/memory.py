"""Resident memory of a forked rank, without what glibc keeps of memory that the test process freed before the fork."""

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path

MIB = 1 << 20
M_MMAP_THRESHOLD = -3
CHUNK_IS_MMAPPED = 2  # a bit of the size that glibc keeps in front of a block
NUM_ARENAS = 64  # at least as many as the test process had threads at the same time
LIBC = ctypes.CDLL(None)
LIBC.malloc.restype = ctypes.c_void_p


def free_at_once() -> None:
    """Have glibc give each freed block of 1 MiB or more back to the system, in a forked process of one thread.

    Larger blocks than the threshold come from the system and go back to it, but only if the calling thread's arena has
    no free block for them. A test process that ran many threads has arenas full of free blocks, and each arena would
    keep what it once gave out: a sync with a true peak of 3 buckets then showed 4 to 6. So those blocks are taken here
    and never touched.
    """
    LIBC.mallopt(M_MMAP_THRESHOLD, MIB)
    together = threading.Barrier(NUM_ARENAS, timeout=60)

    def take_all() -> None:
        take_free_memory()
        together.wait()  # a thread that ends leaves its arena to the next one

    threads = [threading.Thread(target=take_all) for _ in range(NUM_ARENAS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    take_free_memory()


def take_free_memory() -> None:
    """Take all free blocks of 1 MiB or more of this thread's arena, and keep them."""
    while True:
        block = LIBC.malloc(MIB)
        size = ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value
        if size & CHUNK_IS_MMAPPED:
            LIBC.free(ctypes.c_void_p(block))
            return


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the peak of resident memory during `call`, in bytes above its start."""
    LIBC.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


def status(key: str, process: int | str = "self") -> int:
    """Return an entry of /proc/<process>/status in bytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))
