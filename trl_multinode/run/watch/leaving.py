"""End of a process whose run failed: it kills the engines, writes its ending, waits for the others, and exits."""

import os
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress

from .. import store as stores
from ..endings.ending import Ending
from ..endings.fatal import Fatal
from ..reporter import report
from ..store import RunStore
from .attachment import Attachment

PRINTING_S = 2.0  # longest wait for the main thread to print its traceback
WRITING_S = 1.0  # longest wait for the files of the end, after that for the other ranks


def leave(
    fatal: Fatal,
    store: RunStore,
    ending: Ending,
    trainers: Sequence[Attachment],
    printing: threading.Lock,
) -> None:
    """End this process with the line and the code of the run's failure. The watch thread calls it.

    Args:
        fatal ([`Fatal`]):
            Failure of the run.
        store ([`RunStore`]):
            Keys of this process.
        ending ([`Ending`]):
            Ending file of this node.
        trainers (`Sequence[Attachment]`):
            Open trainers, whose cleanups are called.
        printing (`threading.Lock`):
            Lock that the main thread holds while it prints a traceback.
    """
    for cleanup in [cleanup for trainer in trainers for cleanup in trainer.cleanups]:
        try:
            cleanup()
        except Exception:
            traceback.print_exc()

    def write() -> None:
        ending.write(fatal)
        for call in [call for trainer in trainers for call in trainer.closings]:
            with suppress(Exception):
                call()

    # in threads, because a store whose host lost power never responds, nor does a lost file system
    writing = threading.Thread(target=write, daemon=True)
    waiting = threading.Thread(target=store.wait_for_readers, daemon=True)
    writing.start()
    waiting.start()
    waiting.join(stores.GRACE_S + 1.0)
    writing.join(WRITING_S)
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(WRITING_S)
    printing.acquire(timeout=PRINTING_S)  # never released: a later traceback would follow the line
    report(f"the run failed: {fatal.line}", error=True)
    os._exit(fatal.code)


def _flush() -> None:
    """Write what the script has printed; a terminal that was stopped, or a full pipe, may not take it."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
