"""Ways in which a script ends by an error outside the trainer's methods: an uncaught exception, or `sys.exit`."""

import builtins
import dis
import io
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from types import FrameType, TracebackType
from typing import Any

from ..hooks import Hooks

EXIT_FUNCTIONS = ((sys, "exit"), (builtins, "exit"), (builtins, "quit"))


class ScriptExits(Hooks):
    """Hooks that notice how the main thread's script ends, wherever it does so.

    `sys.excepthook` gets every uncaught exception but `SystemExit`, of which Python keeps nothing for the functions of
    `atexit`. So the functions that raise it are wrapped, and their last status is kept. A script that raises
    `SystemExit` itself is noticed only inside the trainer's methods.

    Args:
        on_exception (`Callable[[BaseException], bool]`):
            Function that is called with an uncaught exception; it returns `False` to leave it to the previous hook.
    """

    def __init__(self, on_exception: Callable[[BaseException], bool]):
        super().__init__()
        self._on_exception = on_exception
        self._status: Any = None  # of the last call of an exit function
        self._script: FrameType | None = None

    def watch(self) -> None:
        """Install the hooks."""
        previous = sys.excepthook

        def hook(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            with unbuffered():
                ours = self._on_exception(error)
            if not ours:
                previous(kind, error, trace)

        self.replace(sys, "excepthook", hook)
        for owner, name in EXIT_FUNCTIONS:
            if hasattr(owner, name):  # `python -S` has no `exit`
                self.replace(owner, name, self._noticed(getattr(owner, name)))

    def restore(self) -> None:
        """Remove the hooks, except those on top of which the script has installed its own."""
        super().restore()
        self._script = None

    def bad_status(self) -> Any:
        """Return the status with which the script ends; `None` if it does not end by an exit function with an error.

        Call it at exit. A script that caught the `SystemExit` has returned from its last line.
        """
        if is_good(self._status) or (self._script is not None and has_returned(self._script)):
            return None
        return self._status

    def _noticed(self, leave: Callable) -> Callable:
        def leave_noticed(status: Any = None, /) -> None:
            if threading.current_thread() is threading.main_thread():
                self._status, self._script = status, script_frame()
            leave(status)

        return leave_noticed


def unbuffered() -> AbstractContextManager:
    """Print to the real stderr inside: `init_process_group` installs a hook that calls earlier ones with a buffer as
    stderr, which a process that ends in one of them never prints."""
    is_buffer = isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None
    return redirect_stderr(sys.__stderr__) if is_buffer else nullcontext()


def is_good(status: Any) -> bool:
    """Return whether Python would end with exit code 0 after `sys.exit(status)`."""
    return status is None or (isinstance(status, int) and status == 0)


def script_frame() -> FrameType | None:
    """Return the frame of the running script's module; `None` if no script runs."""
    script = vars(sys.modules["__main__"])
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code.co_name == "<module>" and frame.f_globals is script:
            return frame
    return None


def has_returned(frame: FrameType) -> bool:
    """Return whether a frame has ended by a `return` or its last line, and not by an exception."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
