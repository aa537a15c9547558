"""End of another process of this node, and the last line that it wrote, because it could not report them itself."""

import os
import signal
import stat
from pathlib import Path

from ...wire.line_file import last_lines
from ...wire.process_end import stat_fields
from ...wire.secret_names import without_forms
from ...wire.supervisor import exit_words

LONGEST = 300  # characters of a line
ORDERED = (signal.SIGKILL, signal.SIGTERM)  # by another process, so the last line explains nothing
MISMATCH = (
    "gloo aborts a rank whose collective is another than that of its peers: look for a save, a gather or a log that "
    "only some ranks call, in a callback or in a retry."
)


def output_of(pid: int) -> Path | None:
    """Return the file to which a process writes its errors; `None` for a terminal, a pipe, or one that is gone."""
    try:
        path = Path(os.readlink(f"/proc/{pid}/fd/2"))
        return path if stat.S_ISREG(path.stat().st_mode) else None
    except OSError:
        return None


def how_ended(pid: int, output: Path | None) -> str:
    """Return in words how a process ended, as long as its parent has not asked, with its last line if it was aborted.

    Args:
        pid (`int`):
            Process of the same user.
        output (`Path`, *optional*):
            File to which it wrote its errors.
    """
    try:
        state, *fields = stat_fields(pid)
        status = int(fields[-1])  # as for `waitpid`
    except (OSError, ValueError, IndexError):
        state, status = "", 0
    if state != "Z":
        return "ended; if no line above gives the reason, it was killed"
    code = os.waitstatus_to_exitcode(status)
    line = last_line(output) if code < 0 and -code not in ORDERED else ""
    how = exit_words(code) + (f"; its last line: {line!r}" if line else "")
    return f"{how}. {MISMATCH}" if code == -signal.SIGABRT else how


def last_line(path: Path | None) -> str:
    """Return the last line of a log, shortened and without secrets; empty if there is none."""
    if path is None:
        return ""
    try:
        found = last_lines(path)
    except OSError:
        return ""
    return without_forms(found[-1])[:LONGEST] if found else ""
