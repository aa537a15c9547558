"""Phase lines of one rank on disk, for timelines. A run never ends because one cannot be written."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import IO

from .reporter import warn

ROTATE_BYTES = 4 * 2**20  # about 25,000 lines; a rank keeps the current file and the one before it


class PhaseFile:
    """JSON-lines file of one rank. docs/running.md describes the fields.

    Args:
        folder (`Path`):
            Folder of the files of all ranks.
        rank (`int`), node (`int`):
            The calling rank and its node.
    """

    def __init__(self, folder: Path, rank: int, node: int):
        self.path = folder / f"rank{rank}.jsonl"
        self.clock_offset: float | None = None  # seconds ahead of node 0's clock, once it is measured
        self.attempt = 1 + max(last_attempt(self.path), last_attempt(folder / "rank0.jsonl"))
        self._node = node
        self._rank = rank
        self._file: IO[str] | None = None
        self._failed = False

    def write(self, phase: str, start: float, total: float, seconds: float, step: int) -> None:
        """Write the line of a phase. After an error, warn once, drop the line, and try again with the next one."""
        line = {
            "phase": phase, "start": round(start, 3), "seconds": round(seconds, 4), "total": round(total, 4),
            "step": step, "node": self._node, "attempt": self.attempt, "clock_offset": self.clock_offset,
        }  # fmt: skip
        try:
            self._write(json.dumps(line) + "\n")
        except (OSError, ValueError) as error:  # a full disk, a lost file system; a file that was closed
            self._drop_file()
            if not self._failed:
                self._failed = True
                warn(
                    f"node {self._node}, rank {self._rank}: lines of phases are missing in {self.path} ({error}). The "
                    "run goes on; free some space if the disk is full."
                )

    def _write(self, line: str) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a", buffering=1)
        elif self._file.tell() > ROTATE_BYTES:
            self._file.close()
            os.replace(self.path, f"{self.path}.1")
            self._file = open(self.path, "a", buffering=1)
        self._file.write(line)

    def _drop_file(self) -> None:
        file, self._file = self._file, None
        with suppress(OSError, ValueError):
            if file is not None:
                file.close()  # tries once more to write what is left


def last_attempt(path: Path) -> int:
    """Return the number of the attempt in the last line of a file of phases; 0 if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - 4096))
            lines = file.read().splitlines()
        return int(json.loads(lines[-1])["attempt"])
    except (OSError, ValueError, LookupError, TypeError):  # no file, half a line, or a line of an earlier version
        return 0
