"""Forked launchers for [`Nodes`]: the owner's end of the [`template`](template.py)."""

import atexit
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import IO

from .faults import FAKE, HOOK
from .forked_process import ROOM, ROOM_VARIABLE
from .launch_files import MARKER_VARIABLE

NUMBER_BYTES = 16  # of a pid or an exit code, in digits
Node = tuple[str, list[str]]  # arguments of `namespaces.enter_node`
STOP_LIMIT_S = 10.0
FORK_EVENT = "trl_multinode.testing.fork"  # audit event of each fork, with the program
# Libraries read these when they are imported, which the template has done once for all launches
READ_AT_IMPORT = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "DS_", "OMP_", "TORCH_", "PYTHON", "XDG_", "TRACKIO_")


class ForkedProcess:
    """The part of `subprocess.Popen` that [`Nodes`] uses, for a fork of the template.

    Args:
        socket_path (`str`):
            Path of the template's socket.
        program (`str`):
            Program that the fork runs: `"launcher"` (accelerate) or `"engine"` (the fake one).
        arguments (`list[str]`):
            Arguments of the program.
        environment (`Mapping[str, str]`):
            Whole environment of the process.
        log (`int`):
            File descriptor for stdout and stderr.
        node (`Node`, *optional*):
            Namespace that the process enters, and its mounts.
    """

    def __init__(
        self,
        socket_path: str,
        program: str,
        arguments: list[str],
        environment: Mapping[str, str],
        log: int,
        node: Node | None = None,
    ):
        sys.audit(FORK_EVENT, program)
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(socket_path)
        request = {
            "program": program,
            "arguments": arguments,
            "environment": dict(environment),
            "folder": os.getcwd(),
            "sender": os.getpid(),
            "node": node,
        }
        socket.send_fds(self._connection, [json.dumps(request).encode()], [log])
        self.returncode: int | None = None
        self.pid = self._number()

    def poll(self) -> int | None:
        """Return the exit code, minus the signal number for a killed process, or `None` while it runs."""
        if self.returncode is None:
            self._connection.setblocking(False)
            try:
                self.returncode = self._number()
            except BlockingIOError:
                return None
            self._connection.close()
        return self.returncode

    def wait(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        if self.returncode is None:
            self._connection.setblocking(True)
            self.returncode = self._number()
        return self.returncode

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def _number(self) -> int:
        number = self._connection.recv(NUMBER_BYTES)
        if not number:
            raise RuntimeError(f"the template of forked processes has ended. {template_output()}")
        return int(number)


class _Template:
    """The template process, its socket, and the environment that it was started with."""

    def __init__(self, environment: Mapping[str, str]):
        self.environment = dict(environment)
        self._log = tempfile.TemporaryFile()
        self._folder = tempfile.mkdtemp(prefix="tmn-template-")
        self.socket_path = os.path.join(self._folder, "socket")
        # Not the marker and the TMPDIR of a node: the template belongs to none
        of_no_node = {name: value for name, value in environment.items() if name != MARKER_VARIABLE}
        of_no_node |= {"TMPDIR": self._folder, ROOM_VARIABLE: ROOM.partition("=")[2]}
        of_no_node.setdefault("TRACKIO_DIR", os.path.join(self._folder, "trackio"))  # not in the user's home
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self.socket_path)
            listener.listen()
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", f"{__package__}.template", str(listener.fileno())],
                env=of_no_node,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C reaches the owner only
            )
        atexit.register(self.close)

    def output(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait(STOP_LIMIT_S)
        shutil.rmtree(self._folder, ignore_errors=True)


_template: _Template | None = None


def template_pids() -> list[int]:
    """Return the pids of this process's templates, which live as long as this process."""
    return [_template.process.pid] if _template else []


def template_output() -> str:
    """Return what the template has printed, for error messages."""
    return f"Its output:\n{_template.output()}" if _template else ""


def fork_launcher(
    arguments: list[str], environment: Mapping[str, str], log: IO[bytes], node: Node | None = None
) -> ForkedProcess:
    """
    Start `accelerate` with `arguments` as a fork of the template. The first call starts the template (20 s).

    Args:
        arguments (`list[str]`):
            Arguments of accelerate, `launch` included.
        environment (`Mapping[str, str]`):
            Whole environment of the launcher. A fake engine that it names becomes a fork, too.
        log (`IO[bytes]`):
            File for stdout and stderr.
        node (`Node`, *optional*):
            Namespace that the launcher enters, and its mounts. A fake engine is then started, not forked.

    Raises:
        RuntimeError: `environment` has other values of variables that libraries read when they are imported.
    """
    template = _started(environment)
    if differing := _read_at_import(environment) ^ _read_at_import(template.environment):
        names = sorted({name for name, _ in differing})
        raise RuntimeError(
            f"forked ranks share imports that have read {names} already, with other values: "
            "leave these variables as they are, or launch with Nodes(forked=False)"
        )
    module, *faults = environment.get(HOOK, "").split() or [""]
    if module == FAKE and node is None:
        environment = {**environment, HOOK: " ".join([forked_fake_engine(environment), *faults])}
    return ForkedProcess(template.socket_path, "launcher", arguments, environment, log.fileno(), node)


def forked_fake_engine(environment: Mapping[str, str] | None = None) -> str:
    """
    Return the value of `TRL_MULTINODE_ENGINE_MODULE` with which fake engines are forks: 0.1 s instead of 5 s each. For
    trainers in this process; [`fork_launcher`] sets it itself. The first call starts the template (20 s).

    Args:
        environment (`Mapping[str, str]`, *optional*):
            Environment of the template, if this call starts it. Default: this process's, with one thread per process
            as in the launches of [`Nodes`], so that these may use the template too.
    """
    if environment is None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return f"{__package__}.forked_engine {_started(environment).socket_path}"


def _started(environment: Mapping[str, str]) -> _Template:
    """Return this process's template, and start it if there is none."""
    global _template
    if _template is None:
        _template = _Template(environment)
    return _template


def _read_at_import(environment: Mapping[str, str]) -> set[tuple[str, str]]:
    return {(name, value) for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}
