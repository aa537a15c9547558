"""Processes of a rank that run reward functions, one call at a time each."""

import functools
import inspect
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib import import_module
from typing import IO, Any

import msgspec

from ..errors import ConfigurationError, RolloutError
from ..wire.stop_signals import stop_signals_blocked
from .reward_call import Call
from .rewards import RewardCalls
from .scoring_process import QUESTION, Answer, Request, read, write

NOT_SENT = {"trainer_state", "log_extra", "log_metric", "environments"}
PLAIN = {bool, int, float, str, bytes, type(None)}
# With these a library that a function imports would join the world of the ranks
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OF_LAUNCHERS = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_", "GROUP_", "ROLE_")
ASKED_S = 1.0  # for the row in which a function is; one that holds the interpreter does not answer


class ScoringProcess:
    """
    A process that runs one reward function at a time. It ends with this one.

    Args:
        modules (`Sequence[str]`):
            Modules that it imports at once.
    """

    def __init__(self, modules: Sequence[str] = ()):
        self._questions, theirs = socket.socketpair()
        self._asking = threading.Lock()
        command = [sys.executable, "-m", "trl_multinode.rollouts.scoring_process", str(os.getpid())]
        with theirs, stop_signals_blocked():
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), *modules],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), pass_fds=[theirs.fileno()],
            )  # fmt: skip
        self.pid = self._process.pid
        self._ready = False

    def wait(self) -> None:
        """Wait until the process has imported its modules, or has ended."""
        if not self._ready:
            self._ready = read(pipe(self._process.stdout), Answer) is not None

    def call(self, request: Request) -> Answer | None:
        """Wait for the answer to a request; `None` if the process has ended."""
        self.wait()
        try:
            write(pipe(self._process.stdin), request)
            return read(pipe(self._process.stdout), Answer)
        except BrokenPipeError:
            return None

    def ask(self) -> str:
        """Return the row and the line that the function has reached, which any thread may ask."""
        with suppress(OSError), self._asking:  # else two threads would wait for the answers that one of them has read
            self._questions.send(QUESTION)
            if select.select([self._questions], [], [], ASKED_S)[0]:
                return self._questions.recv(1 << 16, socket.MSG_DONTWAIT).decode().rstrip()
        return f", in process {self.pid}, which does not say where"

    def how_it_ended(self) -> str:
        code = self._process.wait()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def leave(self) -> None:
        """Let the process end after what it does."""
        self._questions.close()
        with suppress(BrokenPipeError):  # a request that it did not read
            pipe(self._process.stdin).close()

    def end(self, wait_s: float = 0.5) -> None:
        """End the process, also while its function runs."""
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(eq=False)
class ProcessCall(Call):
    """Call of a reward function in a process."""

    process: ScoringProcess | None = None

    def row(self) -> str:
        assert self.process is not None
        return self.process.ask()

    def known_row(self) -> str:
        return ""  # heartbeats read it, and must not wait for an answer

    def where(self) -> str:
        return ""


class ScoringPool:
    """
    Processes that run reward functions. Any thread may call `call`, which waits for a free process.

    They start at once, so that their imports are done when the first group is complete, and end with the rank.

    Args:
        size (`int`):
            Number of processes.
        where (`str`):
            Node and rank, for messages.
        calls ([`RewardCalls`]):
            Limit for one call of a function. The wait for a free process, and for its imports, does not count.
        modules (`Sequence[str]`, *optional*):
            Modules of the functions, which the processes import at once.
    """

    def __init__(self, size: int, where: str, calls: RewardCalls, modules: Sequence[str] = ()):
        self._where, self._calls = where, calls
        self.processes = [ScoringProcess(modules) for _ in range(size)]
        self._free: queue.Queue[ScoringProcess] = queue.Queue()
        for process in self.processes:
            self._free.put(process)
        self.close = weakref.finalize(self, end_all, self.processes)

    def call(self, function: Callable, name: str, arguments: dict[str, Any]) -> Answer:
        """Call a reward function with the arguments that TRL would give it, and wait for its rewards.

        Raises:
            `ConfigurationError`: if an argument is no plain data.
            `RolloutError`: if the function failed or its process ended.
        """
        sent = {key: value for key, value in arguments.items() if key not in NOT_SENT}
        self._check(name, unwrapped(function)[1] | sent)
        function, keywords = unwrapped(function)
        state = plain_state(arguments["trainer_state"])
        request = Request(function.__module__, function.__qualname__, keywords | sent, state)
        process = self._free.get()
        try:
            process.wait()
            with self._calls.open_call(ProcessCall(name, time.monotonic(), None, process=process)):
                found = process.call(request)
        finally:
            self._free.put(process)  # if it has ended, the next call finds that too
        if found is None:
            raise RolloutError(
                f"{self._where}: the process of the reward function `{name}` {process.how_it_ended()}. See the lines "
                f"before this one, or write `score_with_batch=['{name}']`, with which the rank calls it itself."
            )
        if found.error:
            raise RolloutError(
                f"{self._where}: the reward function `{name}` failed{found.row} with {found.error}. Mend it, or "
                f"return None for a row that it cannot score. In its process:\n{found.trace}"
            )
        return found

    def _check(self, name: str, sent: dict[str, Any]) -> None:
        """Raise `ConfigurationError` for an argument that the process would not get as it is."""
        for key, value in sent.items():
            problem = other_type(value)
            if problem is None:
                try:
                    msgspec.msgpack.encode(value)
                except (ValueError, OverflowError) as error:
                    problem = str(error)
            if problem is not None:
                raise ConfigurationError(
                    f"{self._where}: `{key}` cannot be sent to the process of the reward function `{name}` "
                    f"(got {problem}).",
                    setting=key,
                    got=problem,
                    cure=f"Keep it to text, numbers, lists and dictionaries, or write `score_with_batch=['{name}']`.",
                )


def environment() -> dict[str, str]:
    """Return the environment of a process: this rank's without its place in the world, and without GPUs."""
    kept = {
        name: value for name, value in os.environ.items() if name not in OF_RANKS and not name.startswith(OF_LAUNCHERS)
    }
    return kept | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def other_type(value: Any) -> str | None:
    """Return the name of a type in `value` that another process would get as something else; `None` without one."""
    if type(value) is dict:
        return other_type([*value, *value.values()])
    if not isinstance(value, list):
        return None if type(value) in PLAIN else type(value).__name__
    if set(map(type, value)) <= PLAIN:
        return None
    return next((found for one in value if (found := other_type(one)) is not None), None)


def plain_state(state: Any) -> dict[str, Any]:
    """Return the numbers and texts of a `TrainerState`; its history stays here."""
    values = {one.name: getattr(state, one.name) for one in fields(state) if one.init}
    return {key: value for key, value in values.items() if type(value) in PLAIN}


def pipe(stream: IO[bytes] | None) -> IO[bytes]:
    """Return a pipe of a process that was started with pipes."""
    assert stream is not None
    return stream


def end_all(processes: list[ScoringProcess]) -> None:
    """End processes: close what they read, and kill those whose function still runs."""
    for process in processes:
        process.leave()
    for process in processes:
        process.end()


def unwrapped(function: Any) -> tuple[Any, dict[str, Any]]:
    """Return the function of a partial without positional arguments, and its keywords."""
    keywords: dict[str, Any] = {}
    while isinstance(function, functools.partial) and not function.args:
        function, keywords = function.func, function.keywords | keywords
    return function, keywords


def is_importable(function: Any) -> bool:
    """Return whether another process finds a function by its module and name."""
    function, keywords = unwrapped(function)
    if other_type(keywords) is not None:
        return False
    if not inspect.isfunction(function) or function.__module__ == "__main__" or "." in function.__qualname__:
        return False
    return getattr(import_module(function.__module__), function.__qualname__, None) is function
