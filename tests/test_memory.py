"""The measure of memory is right in a process that was forked from one with much freed memory."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from forks import forked
from memory import LIBC, M_MMAP_THRESHOLD, MIB, NUM_ARENAS, free_at_once, peak_bytes

NUM_THREADS = 6
BLOCK = 8 * MIB


def leave_holes(kept: list[bytearray], together: threading.Barrier) -> None:
    """Free ever larger blocks, so that glibc takes blocks of 8 MiB from this thread's arena; then leave holes.

    Each hole has a used block of the same size after it. Smaller blocks would go into free memory that the arena had
    before; the holes would then merge with the free end of the arena, which the measure does not see.
    """
    together.wait()
    for size in range(2, 32):
        del (_ := [bytearray(size * MIB)])[:]
    blocks = [bytearray(BLOCK) for _ in range(4)]
    kept += blocks[1::2]
    together.wait()


def rank_body(rank: int) -> float:
    """Return the peak of many threads that allocate a block one after another, in blocks."""
    free_at_once() if rank else LIBC.mallopt(M_MMAP_THRESHOLD, MIB)
    with ExitStack() as all_threads:
        executors = [all_threads.enter_context(ThreadPoolExecutor(1)) for _ in range(NUM_ARENAS)]
        for executor in executors:  # each gets an arena of its own, and some get those with holes
            executor.submit(bytearray, 100_000).result()

        def one_after_another() -> None:
            for executor in executors:
                executor.submit(lambda: bool(bytearray(BLOCK))).result()

        return peak_bytes(one_after_another) / BLOCK


def test_memory_that_the_parent_freed_is_not_counted(tmp_path):
    def parent(_: int) -> list[float]:
        kept, together = [], threading.Barrier(NUM_THREADS)
        threads = [threading.Thread(target=leave_holes, args=(kept, together)) for _ in range(NUM_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (tmp_path / "ranks").mkdir()
        with forked(rank_body, 2, tmp_path / "ranks") as ranks:
            return [rank.result for rank in ranks]

    with forked(parent, 1, tmp_path) as (process,):  # the test process itself would keep 200 MiB
        threshold_alone, true = process.result
    print(f"blocks: {threshold_alone} with the threshold alone, {true} with free_at_once")
    assert threshold_alone > 2.5 and true < 1.3
