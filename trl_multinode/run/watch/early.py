"""Watch from `import trl_multinode` on, so that a script that fails before its trainer exists ends all ranks.

It runs in the ranks of a launch only: the processes that torchrun has started, and not in their children. The import
itself loads nothing: the thread waits until the script has imported torch, or imports it after a while. Signal
handlers are left alone until a trainer exists.
"""

import atexit
import os
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ..limits import parent_of, runs_python
from .exits import ScriptExits

if TYPE_CHECKING:
    from .watch_thread import WatchThread

LAUNCHED_BY = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)
OWN_IMPORT_S = 5.0  # after so long without torch, the thread imports it
# Longest wait for the thread, whose import of torch took 30 s on a loaded machine. An interpreter that ends inside it
# aborts: the thread is unwound through C++ that allows no exception, and code 134 replaces that of the script.
READY_S = 180.0
POLL_S = 0.1


class EarlyWatch:
    """Watch of this rank before it has a trainer. `start` makes the only one of a process."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._hurry, self._ready = threading.Event(), threading.Event()
        self._watch: WatchThread | None = None
        self._exits = ScriptExits(self._on_uncaught)
        self._exits.watch()
        # torch needs it, and once a script has ended it cannot be imported
        import_module("concurrent.futures.thread")
        atexit.register(self._at_exit)
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def watch(self) -> "WatchThread | None":
        """Return the connected watch thread; `None` if it could not connect, has ended, or belongs to a parent."""
        if os.getpid() != self._pid:
            return None
        self._hurry.set()
        self._ready.wait(READY_S)
        return None if self._watch is None or self._watch.stopped.is_set() else self._watch

    def _run(self) -> None:
        deadline = time.monotonic() + OWN_IMPORT_S
        while (
            "torch" not in sys.modules and not self._hurry.is_set() and time.monotonic() < deadline
        ):
            time.sleep(POLL_S)
        try:
            import_module("torch")  # waits until the script has imported it to its end
            from ..topology import Topology
            from .watch_thread import WatchThread

            watch = WatchThread(Topology.from_environment(), self._exits)
        except Exception:  # a launch that cannot work: the trainer's own check explains it
            self._ready.set()
            return
        self._watch = watch
        watch.thread = threading.current_thread()
        self._ready.set()
        watch.run()

    def _on_uncaught(self, error: BaseException) -> bool:
        watch = self.watch()
        return watch is not None and watch.on_uncaught(error)

    def _at_exit(self) -> None:
        """End all ranks if the script ends with an error, and let it go otherwise."""
        status, error = self._exits.bad_status(), getattr(sys, "last_value", None)
        failed = status is not None or error is not None
        watch = self.watch()
        if watch is None:
            # the watch has outlived the store
            if not failed and self._watch is not None and os.getpid() == self._pid:
                self._watch.ending.write_good()
            return
        if error is not None:  # the script replaced `sys.excepthook` after the import
            watch.on_uncaught(error)
        if status is not None:
            watch.fail_at_exit(status)
        watch.leave()


_early: EarlyWatch | None = None


def start() -> None:
    """Start the watch if this process is a rank of a launch with several ranks. It never fails and never waits."""
    global _early
    with suppress(Exception):
        if _early is None and is_rank():
            _early = EarlyWatch()


def early_watch() -> "WatchThread | None":
    """Return the watch thread that runs since the import, if there is one."""
    return _early.watch() if _early is not None else None


def is_rank() -> bool:
    """Return whether torchrun has started this process, and not one of its ranks or another Python process."""
    environ = os.environ
    if not all(environ.get(name) for name in LAUNCHED_BY) or environ["WORLD_SIZE"] == "1":
        return False
    # the store is then a rank's, and not there yet
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    own = f"TORCHELASTIC_RUN_ID={environ['TORCHELASTIC_RUN_ID']}".encode()
    pid = os.getppid()
    while pid > 1 and own in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if runs_python(pid):
            return False  # this process is a child of a rank; a shell in between is a wrapper of the user's
        pid = parent_of(pid)
    return True
