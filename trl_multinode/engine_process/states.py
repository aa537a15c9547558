"""Record of what an engine does, for timelines: a line whenever its state or its number of rows changes."""

import time
from pathlib import Path
from typing import Any

from ..wire.line_file import LineFile
from ..wire.messages import EngineSpec

# of the rows since the last line; a round of 1024 rows then has about 50 lines of 110 bytes
LEAST_CHANGE = 1 / 4


class EngineStates:
    """States of an engine process: `start`, then `idle`, `generate` and `sync` in any order, then `end`.

    A line says when a state began; it ends where the next one begins. So a killed engine loses no line, and the states
    of an engine never overlap.

    Args:
        file ([`LineFile`], *optional*):
            File that gets the lines.
        **fixed:
            Fields of every line.
    """

    def __init__(self, file: LineFile | None = None, **fixed: Any):
        self._file = file
        self._fixed = fixed
        self._requests = self._rows = self._update = 0
        self._updating = False
        self._written = ("", 0)

    @classmethod
    def of(cls, spec: EngineSpec) -> "EngineStates":
        """Return the states of the engine with these settings; they are not recorded if it has no file for them."""
        if not spec.state_path:
            return cls()
        missing = f"engine {spec.index}: lines of its states are missing in {spec.state_path}"
        file = LineFile(
            Path(spec.state_path), lambda error: print(f"{missing} ({error})", flush=True)
        )
        return cls(file, **spec.labels)

    def enter(self, phase: str, rows: int = 0) -> None:
        """Write the line of a state that begins now."""
        self._written = (phase, rows)
        if self._file is not None:
            line = {
                "phase": phase,
                "start": round(time.time(), 6),
                "rows": rows,
                "update": self._update,
            }
            self._file.add(line | self._fixed)

    def count(self, requests: int, rows: int) -> None:
        """Take note of the numbers of requests and of rows that run."""
        self._requests = requests
        self._rows = rows
        self._follow()

    def begin_update(self, update: int) -> None:
        """Take note that a weight update has begun; rows that run are frozen."""
        self._updating = True
        self._update = update
        self._follow()

    def end_update(self) -> None:
        """Take note that the update has ended, committed or failed."""
        self._updating = False
        self._follow()

    def _follow(self) -> None:
        if self._updating:
            phase = "sync"
        elif self._requests:
            phase = "generate"
        else:
            phase = "idle"
        before, rows = self._written
        change = abs(self._rows - rows)
        is_large = change > 0 and change >= LEAST_CHANGE * max(rows, self._rows)
        if phase != before or (phase == "generate" and is_large):
            self.enter(phase, self._rows)
