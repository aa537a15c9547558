"""Outstanding tokens of a node's engines, by which each rank of the node chooses the engine of a request."""

import fcntl
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np


class EngineLoad:
    """Outstanding tokens per engine of a node, shared by its ranks in one small file.

    Each rank of a node chooses the engines of its own requests; without a shared count all ranks would choose the same
    engine. `flock` makes choosing and adding one atomic step.

    Args:
        path (`Path`):
            File in the run's private folder; the first rank that opens it creates it.
        num_engines (`int`):
            Number of engines of the node.
    """

    def __init__(self, path: Path, num_engines: int):
        self._lock = threading.Lock()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, 8 * num_engines)
        self._tokens = np.frombuffer(mmap.mmap(self._file, 8 * num_engines), dtype=np.int64)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # held for microseconds; the kernel releases it if the holder dies. It does not exclude threads of one process
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def take(self, tokens: int, candidates: Sequence[int]) -> int:
        """Add `tokens` to the candidate with the fewest outstanding tokens, and return its index."""
        with self._locked():
            engine = min(candidates, key=lambda index: self._tokens[index])
            self._tokens[engine] += tokens
        return engine

    def give_back(self, engine: int, tokens: int) -> None:
        with self._locked():
            self._tokens[engine] -= tokens

    def close(self) -> None:
        os.close(self._file)
