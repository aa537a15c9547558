"""The measure of memory is right in a process that was forked from one with much freed memory."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from forks import forked
from memory import MIB, free_at_once, peak_bytes

NUM_THREADS = 6


def leave_holes(kept: list[bytearray], together: threading.Barrier) -> None:
    """Leave holes of 8 MiB in this thread's arena, after blocks so large that glibc takes no more from the system."""
    together.wait()
    for size in range(2, 32):
        del (_ := [bytearray(size * MIB)])[:]
    blocks = [bytearray(size) for _ in range(4) for size in (8 * MIB, 200_000)]
    kept += blocks[1::2]
    together.wait()


def test_memory_that_the_parent_freed_is_not_counted(tmp_path):
    kept, together = [], threading.Barrier(NUM_THREADS)
    threads = [threading.Thread(target=leave_holes, args=(kept, together)) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    def body(rank: int) -> float:
        if rank:
            free_at_once()
        with ExitStack() as all_threads:
            executors = [all_threads.enter_context(ThreadPoolExecutor(1)) for _ in range(NUM_THREADS)]
            for executor in executors:  # each has an arena of its own
                executor.submit(bytearray, 100_000).result()

            def one_after_another() -> None:
                for executor in executors:
                    executor.submit(lambda: bool(bytearray(8 * MIB))).result()

            return peak_bytes(one_after_another) / (8 * MIB)

    with forked(body, 2, tmp_path) as ranks:
        kept_by_glibc, true = (rank.result for rank in ranks)
    print(f"blocks of 8 MiB: {kept_by_glibc} without free_at_once, {true} with it")
    assert kept_by_glibc > 2.5 and true < 1.3
