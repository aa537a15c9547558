"""An engine's log while the engine starts: the stage that it has reached, its last lines, the cause of a failure.

vLLM has no other report of its start: its stages run in several processes. `tests/engine/test_start_log.py` holds the
phrases against the installed vLLM, so that a reworded line fails a test.
"""

import re
import time
from pathlib import Path

# Stage and the phrases of vLLM with which it begins. On a CPU the log has neither `profile`, `compile` nor `graphs`;
# the second phrase of `weights` is that of Model Runner V2.
STAGES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("imports", ()),
    ("config", ("Resolved architecture:",)),
    ("workers", ("Initializing a V1 LLM engine",)),
    ("weights", ("Starting to load model", "Loading model from scratch")),
    ("profile", ("Model loading took",)),
    ("compile", ("vLLM's torch.compile",)),
    ("cache", ("KV cache size:",)),
    ("graphs", ("Capturing CUDA graphs",)),
)
# With these vLLM's core and its workers log why they end, before they end: a thread or a driver may keep them
FAILED = ("EngineCore failed to start", "WorkerProc failed to start")
KEPT_LINES = 20
LONGEST_LINE = 300
LONGEST_PHRASE = 100  # a phrase may be split between two reads
# An exception of one of vLLM's processes, as its logger writes it
LOGGED_EXCEPTION = re.compile(
    r"^\(.*?pid=\d+\) ERROR .*?\] (?P<error>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt): .+)$"
)
# The front end and the core report with these words that another process has failed
REFERS_TO_ANOTHER = ("See root cause above", "See stack trace", "exception in a background process")


class StartLog:
    """The part of a log file that one start of an engine writes.

    Args:
        path (`Path`):
            Log of the engine. Lines that it has already, of earlier runs, are left out.
    """

    def __init__(self, path: Path):
        self._path = path
        self._start = self._read_to = path.stat().st_size if path.exists() else 0
        self._rest = b""
        self._stage = 0
        self._since = [(0, time.monotonic())]  # index and begin of the stages so far
        self._failed_at: float | None = None
        self._ready_at: float | None = None

    @property
    def stage(self) -> str:
        """Name of the stage that the engine has reached."""
        return STAGES[self._stage][0]

    @property
    def last_change(self) -> float:
        """Time at which that stage began."""
        return self._since[-1][1]

    @property
    def total_s(self) -> float:
        """Seconds since the start, until the engine was ready if it is."""
        return (self._ready_at or time.monotonic()) - self._since[0][1]

    @property
    def failed_s(self) -> float:
        """Seconds since a process of vLLM has logged that the start failed; 0 if none has."""
        return 0.0 if self._failed_at is None else time.monotonic() - self._failed_at

    def follow(self) -> None:
        """Read what is new in the log, and note the stages that have begun."""
        new = self._read_from(self._read_to)
        self._read_to += len(new)
        text = (self._rest + new).decode(errors="replace")
        self._rest = (self._rest + new)[-LONGEST_PHRASE:]
        if self._failed_at is None and any(phrase in text for phrase in FAILED):
            self._failed_at = time.monotonic()
        for index in range(len(STAGES) - 1, self._stage, -1):
            if any(phrase in text for phrase in STAGES[index][1]):
                self._stage = index
                self._since.append((index, time.monotonic()))
                return

    def end(self) -> None:
        """Note that the engine is ready."""
        self._ready_at = self._ready_at or time.monotonic()

    def seconds(self) -> str:
        """Return the stages so far with the seconds of each, in words."""
        ends = [begin for _, begin in self._since[1:]] + [self._since[0][1] + self.total_s]
        pairs = zip(self._since, ends, strict=True)
        return ", ".join(f"{STAGES[index][0]} {end - begin:.0f} s" for (index, begin), end in pairs)

    def last_lines(self) -> list[str]:
        """Return the last 20 lines of this start."""
        return [line[:LONGEST_LINE] for line in self._lines()[-KEPT_LINES:]]

    def cause(self) -> str | None:
        """Return the first exception that a process of vLLM logged and that does not refer to another one's."""
        for line in self._lines():
            found = LOGGED_EXCEPTION.match(line)
            if found and not any(words in line for words in REFERS_TO_ANOTHER):
                return found["error"]
        return None

    def _lines(self) -> list[str]:
        text = self._read_from(self._start).decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()]

    def _read_from(self, start: int) -> bytes:
        try:
            with open(self._path, "rb") as log:
                log.seek(start)
                return log.read()
        except OSError:
            return b""
