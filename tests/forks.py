"""Ranks as forked processes: a world takes 0.2 s to start, where spawned ones take 25 s."""

import gc
import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from waiting import HANG_S, until

FORK = multiprocessing.get_context("fork")


class Rank:
    """One forked process; all it prints is in `log`, what `body` returns in `result`."""

    def __init__(self, body: Callable[[int], Any], rank: int, folder: Path):
        self.log = folder / f"rank{rank}.log"
        self._result = folder / f"rank{rank}.json"
        self.process = FORK.Process(target=self._run, args=(body, rank), name=f"rank{rank}")
        self.process.start()

    def _run(self, body: Callable[[int], Any], rank: int) -> None:
        handle = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
        torch.set_num_threads(1)  # the parent's OpenMP threads do not exist here
        gc.freeze()  # else a collection copies all objects of the parent: 1.3 of a short run's 1.6 CPU seconds
        try:
            self._result.write_text(json.dumps(body(rank)))
        except Exception:
            traceback.print_exc()
            os._exit(70)

    def wait(self, timeout_s: float = HANG_S) -> int:
        """The exit status, negative for a signal."""
        self.process.join(timeout_s)
        assert self.process.exitcode is not None, f"still running after {timeout_s} s:\n{self.text}"
        return self.process.exitcode

    def wait_for(self, text: str) -> None:
        """Wait until the rank has printed `text`; fail at once if it ends without it."""

        def printed_or_ended() -> bool:
            # asked before the log is read, which would otherwise miss a last line
            alive = self.process.is_alive()
            return text in self.text or not alive

        until(printed_or_ended, lambda: f"rank prints {text!r}:\n{self.text}")
        assert text in self.text, f"the rank ended and never printed {text!r}:\n{self.text}"

    @property
    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    @property
    def result(self) -> Any:
        assert self.wait() == 0, self.text
        return json.loads(self._result.read_text())


@contextmanager
def forked(body: Callable[[int], Any], count: int, folder: Path) -> Iterator[list[Rank]]:
    """`body(rank)` in `count` processes; whoever is left at the end is killed."""
    ranks = [Rank(body, rank, folder) for rank in range(count)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()


def on_gloo_ranks(
    body: Callable[[int], Any],
    count: int,
    folder: Path,
    before: Callable[[], object] = lambda: None,
) -> list[Any]:
    """Return the results of `body(rank)` on all ranks of a gloo world. Each rank calls `before` before gloo starts its
    threads."""

    def joined(rank: int) -> Any:
        before()
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=count
        )
        dist.barrier()  # a rank that leaves while another still connects would make that one fail
        try:
            return body(rank)
        finally:
            dist.destroy_process_group()

    with forked(joined, count, folder) as ranks:
        return [rank.result for rank in ranks]


def even_nodes(per_node: int) -> list[int]:
    """The ranks of each node of a world whose nodes are alike; one node of one rank without a world."""
    return [per_node] * (dist.get_world_size() // per_node) if dist.is_initialized() else [1]
