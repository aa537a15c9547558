"""End of another process of this node, which could not report it itself."""

import os
import signal

from ...wire.process_end import stat_fields
from ...wire.supervisor import exit_words

MISMATCH = (
    "Its own lines say why; gloo aborts a rank whose collective is another than that of its peers: look for a save, a "
    "gather or a log that only some ranks call, in a callback or in a retry."
)


def how_ended(pid: int) -> str:
    """Return in words how a process of the same user ended, as long as its parent has not asked."""
    try:
        state, *fields = stat_fields(pid)
        status = int(fields[-1])  # as for `waitpid`
    except (OSError, ValueError, IndexError):
        state, status = "", 0
    if state != "Z":
        return "ended; if no line above gives the reason, it was killed"
    code = os.waitstatus_to_exitcode(status)
    how = exit_words(code)
    return f"{how}. {MISMATCH}" if code == -signal.SIGABRT else how
