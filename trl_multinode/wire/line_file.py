"""JSON-lines file that rotates, and whose errors never end a process: ranks and engines record timelines with it.

`last_lines` reads the end of such a file or of a log.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

# about 25,000 lines; a process keeps the current file and the one before it
ROTATE_BYTES = 4 * 2**20
TAIL_BYTES = 4096


class LineFile:
    """JSON-lines file of one writer.

    Args:
        path (`Path`):
            File to append to; its folder is created with the first line.
        on_error (`Callable[[Exception], None]`):
            Function that gets the first error. Those lines are dropped, and the next ones try again.
    """

    def __init__(self, path: Path, on_error: Callable[[Exception], None]):
        self.path = path
        self._on_error = on_error
        self._file: IO[str] | None = None
        self._failed = False

    def add(self, *lines: Mapping[str, Any]) -> None:
        """Write lines at once, or drop them after an error."""
        try:
            self._write("".join(json.dumps(line) + "\n" for line in lines))
        # a full disk, a lost file system; a file that was closed
        except (
            OSError,
            TypeError,
            ValueError,
        ) as error:
            self.close()
            if not self._failed:
                self._failed = True
                self._on_error(error)

    def _write(self, text: str) -> None:
        if self._file is not None and self._file.tell() > ROTATE_BYTES:
            self._file.close()
            os.replace(self.path, f"{self.path}.1")
            self._file = None
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a", buffering=1)
        self._file.write(text)

    def close(self) -> None:
        """Close the file; another line would open it again."""
        file = self._file
        self._file = None
        with suppress(OSError, ValueError):
            if file is not None:
                file.close()  # tries once more to write what is left


def last_lines(path: Path) -> list[str]:
    """Return the lines in the last 4 KiB of a file, without empty ones. The first of them may lack its beginning.

    Raises:
        `OSError`: if the file cannot be read.
    """
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    return [line.strip() for line in lines if line.strip()]
