"""Launchers and ranks as forks of the [`template`](template.py), each in the state of a process that was just started.

accelerate's and torchrun's own code runs in the launcher. Only the last call of torchrun is replaced, `Popen` of a
rank: a rank is a fork of its launcher, so it has the parent, the session and the exit code that it always has. It
differs from a started rank in three ways. All ranks hash strings alike; more modules are imported than the script
needs; and the libraries are not destroyed at the end.
"""

import atexit
import ctypes
import faulthandler
import gc
import importlib.util
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from trl_multinode.run.watch import early

from .launch_files import STACKS
from .namespaces import enter_node
from .thread_safe_fork import fork_without_held_locks

POLL_S = 0.02
# that torchrun has handlers for
LAUNCHERS_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
)
ROOM_VARIABLE = "TRL_MULTINODE_TEST_ROOM"
ROOM = f"{ROOM_VARIABLE}={'x' * 200}"
ENVIRONMENT_START = (
    47  # fields of /proc/self/stat, counted from the one behind the name: env_start, env_end
)


@dataclass(frozen=True)
class Inherited:
    """State of the template that a fork must drop, or must share with a started process."""

    files: frozenset[int]  # file descriptors that belong to imported libraries
    # those that imports have set: value before, value after
    variables: Mapping[str, tuple[str | None, str]]
    temporary: str  # the template's TMPDIR, which some of these values contain

    @classmethod
    def of_this_process(cls, before: Mapping[str, str], listener: int) -> "Inherited":
        """Compare this process with its environment `before` the imports; `listener` is its own file."""
        changed = {
            name: (before.get(name), value)
            for name, value in os.environ.items()
            if before.get(name) != value
        }
        return cls(frozenset(open_files() - {listener}), changed, before["TMPDIR"])

    def add_variables(self) -> None:
        """Set the variables that the imports of a started rank set, unless they have values of their own."""
        for name, (before, after) in self.variables.items():
            if os.environ.get(name) == before:
                os.environ[name] = after.replace(self.temporary, tempfile.gettempdir())

    def close_other_files(self) -> None:
        """Close the files of the parent. Their numbers stay in use, because objects of the parent may close them."""
        null = os.open(os.devnull, os.O_RDWR)
        for fd in open_files() - self.files - {0, 1, 2, null}:
            os.dup2(null, fd, inheritable=False)


def open_files() -> set[int]:
    """Return the file descriptors that are open in this process."""
    return {
        int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")
    }


class ForkedRank:
    """The part of `subprocess.Popen` that torchrun uses, for a fork of this process."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout)
            time.sleep(POLL_S)
        return code


def run_launcher(request: Mapping[str, Any], log: int, inherited: Inherited) -> None:
    """
    Run `accelerate launch`, after a fork of the template.

    Args:
        request (`Mapping`):
            `arguments` of accelerate, `environment` and `folder` (working directory) of the launcher, and the
            arguments of [`enter_node`] as `node`, or `None`.
        log (`int`):
            File descriptor that becomes stdout and stderr.
        inherited (`Inherited`):
            State of the template.
    """
    begin_process(request["environment"], log, inherited)
    show_node()
    if request["node"] is not None:
        enter_node(*request["node"])
    os.chdir(request["folder"])
    from accelerate.commands import accelerate_cli
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    SubprocessHandler._popen = lambda _, command, environment: fork_rank(
        command, environment, inherited
    )
    sys.argv = [accelerate_cli.__file__, *request["arguments"]]
    accelerate_cli.main()


def fork_rank(
    command: tuple[str, ...], environment: Mapping[str, str], inherited: Inherited
) -> ForkedRank:
    """Fork a rank of this launcher. `command` is the one of `per_rank.sh`: a shell, itself, Python, `-u`, script."""
    _, per_rank, _, _, script, *arguments = command
    stem = Path(per_rank).with_name(f"rank{environment['RANK']}")

    def run_rank() -> None:
        stem.with_suffix(".pid").write_text(f"{os.getpid()}\n")
        log = os.open(stem.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        begin_process(environment, log, inherited)
        inherited.add_variables()
        for number in LAUNCHERS_SIGNALS:
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
        signal.pthread_sigmask(signal.SIG_UNBLOCK, LAUNCHERS_SIGNALS)
        faulthandler.register(STACKS)
        run_script(script, arguments)

    # A signal between the fork and the new handlers would run those of the launcher
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHERS_SIGNALS)
    try:
        return ForkedRank(fork_without_held_locks(lambda: run_to_the_end(run_rank, script)))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def begin_process(environment: Mapping[str, str], log: int, inherited: Inherited) -> None:
    """Give a fork a session, an environment, files and random numbers of its own."""
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    inherited.close_other_files()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it holds the parent's TMPDIR
    random.seed()
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()


def run_script(script: str, arguments: list[str]) -> None:
    """Run a script as `python script` does: as `__main__`, with its folder as the first place of imports."""
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
    sys.meta_path.insert(0, FirstImport(sys.modules.pop("trl_multinode")))
    spec = importlib.util.spec_from_file_location("__main__", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__spec__ = None
    sys.modules["__main__"] = module
    spec.loader.exec_module(module)


class FirstImport(MetaPathFinder, Loader):
    """Finder that starts the watch when the script imports the library, which is imported already.

    Args:
        package (`ModuleType`):
            The imported library.
    """

    def __init__(self, package: ModuleType):
        self._package, self._spec = package, package.__spec__

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == self._package.__name__ else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._package

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
        early.start()


def run_to_the_end(call: Callable[[], None], script: str | None = None) -> NoReturn:
    """
    Call a function as a whole program, then end the process with its exit code.

    The end has what a script can notice: it waits for threads, calls `atexit` functions and destroys the script's
    objects. It leaves the libraries alone; to destroy them costs each fork as much as to import them.
    """
    code = 1
    try:
        call()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        error.__traceback__ = traceback_from(script, error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.modules["__main__"].__dict__.clear()
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def traceback_from(script: str | None, traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames above the script, which a started process does not have."""
    first = traceback
    while first is not None and script is not None and first.tb_frame.f_code.co_filename != script:
        first = first.tb_next
    return first or traceback


def show_node() -> None:
    """Show this process's TMPDIR in /proc/<pid>/environ, by which [`Nodes`](nodes.py) finds the processes of a node.

    The kernel reads that file from where it put the environment of the template, which keeps room for it there. A
    process without `TMPDIR` belongs to no node.
    """
    shown = f"TMPDIR={os.environ['TMPDIR']}".encode() if "TMPDIR" in os.environ else b""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(fields[index]) for index in (ENVIRONMENT_START, ENVIRONMENT_START + 1))
    at = ctypes.string_at(start, end - start).index(ROOM.encode())
    if len(shown) > len(ROOM):
        raise ValueError(
            f"{shown.decode()} is longer than the {len(ROOM)} bytes that are kept for it"
        )
    ctypes.memmove(start + at, shown.ljust(len(ROOM), b"\0"), len(ROOM))
