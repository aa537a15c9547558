"""Output of an engine's processes that survives a full disk: the log lacks lines, and nothing ends for that."""

import sys
from contextlib import suppress
from typing import Any


class TolerantOutput:
    """Text stream that drops what cannot be written.

    Args:
        stream (`TextIO`):
            Stream to write to.
    """

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def tolerate_full_disk() -> None:
    """Let `print` and tracebacks of this process fail silently from now on; `logging` does so by itself."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, TolerantOutput):
            setattr(sys, name, TolerantOutput(stream))
