"""Forked launchers and engines: the owner's end of the [`templates`](template.py)."""

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
from pathlib import Path
from typing import IO

from .faults import FAKE, FORKED, HOOK
from .forked_process import ROOM, ROOM_VARIABLE
from .launch_files import MARKER_VARIABLE

NUMBER_BYTES = 16  # of a pid or an exit code, in digits
Node = tuple[str, list[str]]  # arguments of `namespaces.enter_node`
STOP_LIMIT_S = 10.0
RANKS_KIND, VLLM_KIND = "ranks", "vllm"  # of a template, by what it has imported
LAUNCHER_PROGRAM, FAKE_PROGRAM, VLLM_PROGRAM = "launcher", "fake", "vllm"  # that a fork runs
FORK_EVENT = "multinode_kit.fork"  # audit event of each fork, with the program
# Libraries read these when they are imported, which the template has done once for all launches
READ_AT_IMPORT = (
    "HF_",
    "HUGGINGFACE_",
    "TRANSFORMERS_",
    "DS_",
    "OMP_",
    "TORCH_",
    "PYTHON",
    "XDG_",
    "TRACKIO_",
)


class ForkedProcess:
    """The part of `subprocess.Popen` that [`Nodes`] uses, for a fork of the template.

    Args:
        socket_path (`str`):
            Path of the template's socket.
        program (`str`):
            Program that the fork runs: `LAUNCHER_PROGRAM` (accelerate), or an engine.
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
    """A template process, its socket, and the environment that it was started with."""

    def __init__(self, kind: str, environment: Mapping[str, str]):
        self.environment = dict(environment)
        self._log = tempfile.TemporaryFile()
        self._folder = tempfile.mkdtemp(prefix="tmn-template-")
        self.socket_path = os.path.join(self._folder, "socket")
        # Not the marker and the TMPDIR of a node: the template belongs to none
        of_no_node = {name: value for name, value in environment.items() if name != MARKER_VARIABLE}
        of_no_node |= {"TMPDIR": self._folder, ROOM_VARIABLE: ROOM.partition("=")[2]}
        # not in the user's home
        of_no_node.setdefault("TRACKIO_DIR", os.path.join(self._folder, "trackio"))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self.socket_path)
            listener.listen()
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-u",
                    "-m",
                    f"{__package__}.template",
                    kind,
                    str(listener.fileno()),
                ],
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

    def check(self, environment: Mapping[str, str]) -> None:
        """Raise `RuntimeError` if a fork would need other values of variables that libraries read at their import."""
        if differing := _read_at_import(environment) ^ _read_at_import(self.environment):
            names = sorted({name for name, _ in differing})
            raise RuntimeError(
                f"forked processes share imports that have read {names} already, with other values: "
                "leave these variables as they are, or start processes that are no forks (Nodes(forked=False), TREE)"
            )

    def close(self) -> None:
        self.process.kill()
        self.process.wait(STOP_LIMIT_S)
        shutil.rmtree(self._folder, ignore_errors=True)


_templates: dict[str, _Template] = {}


def template_pids() -> list[int]:
    """Return the pids of this process's templates, which live as long as this process."""
    return [template.process.pid for template in _templates.values()]


def template_output() -> str:
    """Return what the templates have printed, for error messages."""
    return "".join(
        f"Output of the template of {kind}:\n{each.output()}" for kind, each in _templates.items()
    )


def fork_launcher(
    arguments: list[str], environment: Mapping[str, str], log: IO[bytes], node: Node | None = None
) -> ForkedProcess:
    """
    Start `accelerate` with `arguments` as a fork of the template. The first call starts the template (20 s).

    Args:
        arguments (`list[str]`):
            Arguments of accelerate, `launch` included.
        environment (`Mapping[str, str]`):
            Whole environment of the launcher. An engine that it names becomes a fork, too.
        log (`IO[bytes]`):
            File for stdout and stderr.
        node (`Node`, *optional*):
            Namespace that the launcher enters, and its mounts.

    Raises:
        RuntimeError: `environment` has other values of variables that libraries read when they are imported.
    """
    template = _template_of(RANKS_KIND, environment)
    if environment.get(HOOK):
        environment = {**environment, HOOK: from_template(environment[HOOK], environment)}
    return ForkedProcess(
        template.socket_path, LAUNCHER_PROGRAM, arguments, environment, log.fileno(), node
    )


def from_template(engine: str, environment: Mapping[str, str] | None = None) -> str:
    """
    Let a template fork an engine: 0.1 s instead of 5 s for the fake one, 3 CPU seconds instead of 12 for vLLM.

    The first call for each of the two starts its template, which lives as long as this process.

    Args:
        engine (`str`):
            Value of `HOOK`: a module and words for faults.
        environment (`Mapping[str, str]`, *optional*):
            Environment of the process that starts the engine. Default: this process's, with one thread per process as
            in the launches of [`Nodes`], so that these may use the same template.

    Returns:
        `str`: the value of `HOOK` with the template's socket and the program, or `engine` itself if it is neither
            `FAKE` nor `FORKED`.

    Raises:
        RuntimeError: `environment` has other values of variables that libraries read when they are imported.
    """
    if environment is None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    module, *words = engine.split()
    if module == FAKE:
        template, program = _template_of(RANKS_KIND, environment), FAKE_PROGRAM
    elif module == FORKED and not has_template(engine):
        template, program = _template_of(VLLM_KIND, _vllm_environment(environment)), VLLM_PROGRAM
    else:
        return engine
    return " ".join([FORKED, template.socket_path, program, *words])


def has_template(engine: str) -> bool:
    """Return whether [`from_template`] has returned this value of `HOOK`."""
    return engine.startswith(f"{FORKED} /")


def _vllm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of vLLM's template: that of an engine on a CPU, started from `environment`."""
    # They import torch, which the processes that stand for engines import from here must not pay for
    from trl_multinode.engine.environment import engine_environment, is_kept
    from trl_multinode.engine.settings import CPU_ENVIRONMENT

    read = {
        name: value
        for name, value in environment.items()
        if is_kept(name) and name.startswith(READ_AT_IMPORT)
    }
    return engine_environment({**read, **CPU_ENVIRONMENT}, Path(tempfile.gettempdir()))


def _template_of(kind: str, environment: Mapping[str, str]) -> _Template:
    """Return this process's template of a kind. Start it if there is none; otherwise check that it fits."""
    if kind not in _templates:
        _templates[kind] = _Template(kind, environment)
    _templates[kind].check(environment)
    return _templates[kind]


def _read_at_import(environment: Mapping[str, str]) -> set[tuple[str, str]]:
    return {(name, value) for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}
