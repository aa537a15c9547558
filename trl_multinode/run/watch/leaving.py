"""End of a process whose run failed: it kills the engines, writes its ending, waits for the others, and exits."""

import os
import sys
import threading
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

from .. import store as stores
from ..endings.fatal import Fatal
from ..reporter import report

if TYPE_CHECKING:
    from .watch_thread import WatchThread

PRINTING_S = 2.0  # longest wait for the main thread to print its traceback
WRITING_S = 1.0  # longest wait for the files of the end, after that for the other ranks


def leave(watch: "WatchThread", fatal: Fatal) -> None:
    """End this process with the line and the code of the run's failure. The threads of `watch` call it."""
    for cleanup in [cleanup for trainer in watch.trainers for cleanup in trainer.cleanups]:
        try:
            cleanup()
        except Exception:
            traceback.print_exc()

    def write() -> None:
        watch.ending.write(fatal)
        for call in [call for trainer in watch.trainers for call in trainer.closings]:
            with suppress(Exception):
                call()

    # in threads, because a store whose host lost power never responds, nor does a lost file system
    writing = threading.Thread(target=write, daemon=True)
    waiting = threading.Thread(target=watch.store.wait_for_readers, daemon=True)
    writing.start()
    waiting.start()
    waiting.join(stores.GRACE_S + 1.0)
    writing.join(WRITING_S)
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(WRITING_S)
    # never released: a later traceback would follow the line
    watch.printing.acquire(timeout=PRINTING_S)
    report(f"the run failed: {fatal.line}", error=True)
    os._exit(fatal.code)


def _flush() -> None:
    """Write what the script has printed; a terminal that was stopped, or a full pipe, may not take it."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
