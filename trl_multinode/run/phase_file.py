"""Phase lines of one rank on disk, for timelines. A run never ends because one cannot be written."""

import json
import time
from pathlib import Path
from typing import Any

from ..wire.line_file import LineFile, last_lines
from .reporter import warn


class PhaseFile(LineFile):
    """JSON-lines file of one rank. docs/operate/observe.md describes the fields.

    Args:
        folder (`Path`):
            Folder of the files of all ranks.
        rank (`int`), node (`int`):
            The calling rank and its node.
    """

    def __init__(self, folder: Path, rank: int, node: int):
        super().__init__(folder / f"rank{rank}.jsonl", self._warn)
        self.attempt = 1 + max(last_attempt(self.path), last_attempt(folder / "rank0.jsonl"))
        self._node = node
        self._rank = rank
        self._lines: list[dict[str, Any]] = []  # not written yet

    def write(
        self,
        phase: str,
        start: float,
        total: float,
        seconds: float,
        step: int,
        evaluation: bool = False,
    ) -> None:
        """Keep the line of a phase for the next `flush`."""
        line: dict[str, Any] = {
            "phase": phase, "start": round(start, 6), "seconds": round(seconds, 6), "total": round(total, 6),
            "step": step,
        }  # fmt: skip
        if evaluation:
            line["evaluation"] = True
        self._keep(line)

    def mark(self, text: str) -> None:
        """Keep the line of an event that happens now for the next `flush`. Any thread calls it."""
        self._keep({"mark": text, "start": round(time.time(), 6)})

    def _keep(self, line: dict[str, Any]) -> None:
        """Add the fields that all lines of this rank have, and keep the line."""
        self._lines.append(line | {"node": self._node, "attempt": self.attempt})

    def flush(self) -> None:
        """Write the lines since the last call. After an error, warn once, drop them, and try again with the next ones.

        The main thread calls it at the end of a step, and the watchdog when the run fails. The watchdog's threads do
        not call it in between: they would wait for a disk that hangs, and the rank would look silent.
        """
        lines, self._lines = self._lines, []
        if lines:
            self.add(*lines)

    def _warn(self, error: Exception) -> None:
        warn(
            f"node {self._node}, rank {self._rank}: lines of phases are missing in {self.path} ({error}). The run "
            "goes on; free some space if the disk is full."
        )


def last_attempt(path: Path) -> int:
    """Return the number of the attempt in the last line of a file of phases; 0 if there is none."""
    try:
        return int(json.loads(last_lines(path)[-1])["attempt"])
    # no file, half a line, or a line of an earlier version
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
    ):
        return 0
