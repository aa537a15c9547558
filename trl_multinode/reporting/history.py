"""Bound for `trainer.state.log_history`, in which every rank keeps all logs until the end of a run."""

import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

KEPT_LOGS = 500


class LogHistory:
    """Memory of a run's logs: this library's metrics stay in the newest ones only, TRL's own stay in all of them.

    100 metrics a log were 11.5 MiB per 1000 logs on every rank, and in every checkpoint. The names of metrics, made
    anew for each log, were the larger half. `_multinode/log.jsonl` keeps all metrics on disk.
    """

    def __init__(self) -> None:
        self._newest: deque[tuple[dict[str, Any], frozenset[str]]] = deque()

    @staticmethod
    def named(metrics: Mapping[str, float]) -> dict[str, float]:
        """Return metrics whose names are the same objects in all logs."""
        return {sys.intern(name): value for name, value in metrics.items()}

    def add(self, entry: dict[str, Any], names: frozenset[str]) -> None:
        """Add the newest entry of the history, with the names of this library's metrics, and shorten an old one."""
        self._newest.append((entry, names))
        if len(self._newest) > KEPT_LOGS:
            old, its_names = self._newest.popleft()
            kept = {name: value for name, value in old.items() if name not in its_names}
            old.clear()  # a dictionary keeps its size when single names are deleted
            old.update(kept)
