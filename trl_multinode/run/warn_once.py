"""Each warning of a library once per node, in the ranks of a launch.

Python shows a warning once per line of code, but forgets what it has shown whenever a library enters
`warnings.catch_warnings()`, which torch and transformers do in every step: 644 of the 661 lines that one node of the
demo printed were a single `FutureWarning`. And every rank of a node prints its own.

Only repetitions are left out: the same text from the same line of code. Errors, a script's own log lines and this
library's warnings always appear. With `python -W` or PYTHONWARNINGS the user has chosen, so Python's warnings are then
left alone.
"""

import hashlib
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

from .hooks import Hooks

LONGEST_MEMORY = 1000  # distinct warnings; later ones all appear, so that a text with a counter fills neither memory
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_seen: set[str] = set()  # digests; also those of this process's earlier trainers


class WarnOnce(Hooks):
    """Filter for the warnings of this process.

    ```python
    once = WarnOnce(watch.store.is_first)
    once.install()
    once.restore()  # at the end, in the order of a stack if a process has several
    ```

    Args:
        is_first (`Callable[[str], bool]`):
            Function of a warning's digest that returns whether no other rank of this node has shown it.
    """

    def __init__(self, is_first: Callable[[str], bool]):
        super().__init__()
        self._is_first = is_first
        self._pid = os.getpid()

    def install(self) -> None:
        """Leave out repetitions from now on."""
        if not sys.warnoptions:
            module: Any = warnings  # whose names these are is Python's own business
            show = module._showwarnmsg

            def show_once(found: warnings.WarningMessage) -> None:
                # a caller that records warnings gets each of them
                records = inspect.isbuiltin(module._showwarnmsg_impl)
                text = f"{found.category.__name__}: {found.message} {found.filename}:{found.lineno}"
                if records or self.is_new(text):
                    show(found)

            # `showwarning` would come back where a `catch_warnings()` ends that began before
            self.replace(warnings, "_showwarnmsg", show_once)
        handle = logging.Logger.handle

        def handle_once(logger: logging.Logger, record: logging.LogRecord) -> None:
            if is_library_warning(record):
                text = f"{record.msg} {record.args} {record.pathname}:{record.lineno}"  # formatting could raise
                if not self.is_new(text):
                    return
            handle(logger, record)

        self.replace(logging.Logger, "handle", handle_once)

    def is_new(self, text: str) -> bool:
        """Return whether to show a warning: it is new in this process, and on this node."""
        digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:24]
        if digest in _seen:
            return False
        # a forked child must not use this rank's connection to the store
        if len(_seen) >= LONGEST_MEMORY or os.getpid() != self._pid:
            return True
        _seen.add(digest)
        return not self._undo or self._is_first(digest)


def is_library_warning(record: logging.LogRecord) -> bool:
    """Return whether a log record is a warning of an installed library other than this one."""
    if record.levelno != logging.WARNING or record.name.split(".")[0] == "trl_multinode":
        return False
    return record.name == "py.warnings" or any(part in record.pathname for part in INSTALLED)
