"""Processes of a rank that run reward functions, one call at a time each."""

import functools
import inspect
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib import import_module
from multiprocessing import Pipe
from typing import Any

import msgspec

from ..errors import ConfigurationError, RolloutError
from ..wire.stop_signals import stop_signals_blocked
from ..wire.supervisor import exit_words
from .reward_call import Call
from .scoring_process import Answer, Request, encoded
from .user_calls import UserCalls

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
        self._calls, of_calls = Pipe()
        self._questions, of_questions = Pipe()
        self._asking = threading.Lock()
        descriptors = of_calls.fileno(), of_questions.fileno()
        command = [sys.executable, "-m", "trl_multinode.rollouts.scoring_process", str(os.getpid())]
        with of_calls, of_questions, stop_signals_blocked():
            self._process = subprocess.Popen(
                [*command, *map(str, descriptors), *modules],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a function prints goes to the rank's log, at once
                env=environment(),
                pass_fds=descriptors,
            )
        self.pid = self._process.pid
        self._ready = False

    def wait(self) -> None:
        """Wait until the process has imported its modules, or has ended."""
        if not self._ready:
            self._ready = self._receive() is not None

    def call(self, request: Request) -> Answer | None:
        """Wait for the answer to a request; `None` if the process has ended."""
        self.wait()
        with suppress(OSError):
            self._calls.send_bytes(encoded(request))
            return self._receive()
        return None

    def _receive(self) -> Answer | None:
        with suppress(EOFError, OSError):
            return msgspec.msgpack.decode(self._calls.recv_bytes(), type=Answer)
        return None

    def ask(self) -> str:
        """Return the row and the line that the function has reached, which any thread may ask."""
        # two threads would wait for the answers that one has read
        with (
            suppress(EOFError, OSError),
            self._asking,
        ):
            while self._questions.poll():
                self._questions.recv_bytes()  # came too late for its question
            self._questions.send_bytes(b"where")
            if self._questions.poll(ASKED_S):
                return self._questions.recv_bytes().decode()
        return f", in process {self.pid}, which does not say where"

    def how_it_ended(self) -> str:
        return exit_words(self._process.wait())

    def kill(self) -> None:
        """End the process, also while its function runs."""
        self._process.kill()
        self._process.wait()


@dataclass(eq=False, kw_only=True)
class ProcessCall(Call):
    """Call of a reward function in a process."""

    process: ScoringProcess

    def row(self) -> str:
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
        calls ([`UserCalls`]):
            Limit for one call of a function. The wait for a free process, and for its imports, does not count.
        functions (`Sequence[Callable]`):
            Functions, whose modules the processes import at once.
    """

    def __init__(self, size: int, where: str, calls: UserCalls, functions: Sequence[Callable]):
        self._where, self._calls = where, calls
        modules = sorted({without_partial(function)[0].__module__ for function in functions})
        self.processes = [ScoringProcess(modules) for _ in range(size)]
        self._free: queue.Queue[ScoringProcess] = queue.Queue()
        for process in self.processes:
            self._free.put(process)
        self.close = weakref.finalize(self, kill_all, self.processes)

    def call(self, function: Callable, name: str, arguments: dict[str, Any]) -> Answer:
        """Call a reward function with the arguments that TRL would give it, and wait for its rewards.

        Raises:
            `ConfigurationError`: if an argument is no plain data.
            `RolloutError`: if the function failed or its process ended.
        """
        function, sent = without_partial(function)
        sent |= {key: value for key, value in arguments.items() if key not in NOT_SENT}
        self._check(name, sent)
        state = plain_state(arguments["trainer_state"])
        request = Request(function.__module__, function.__qualname__, sent, state)
        process = self._free.get()
        try:
            process.wait()
            with self._calls.open_call(
                ProcessCall(f"the reward function `{name}`", process=process)
            ):
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
        name: value
        for name, value in os.environ.items()
        if name not in OF_RANKS and not name.startswith(OF_LAUNCHERS)
    }
    return kept | {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


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


def kill_all(processes: list[ScoringProcess]) -> None:
    """End processes, also those whose function still runs."""
    for process in processes:
        process.kill()


def without_partial(function: Any) -> tuple[Any, dict[str, Any]]:
    """Return the function of a partial without positional arguments, and its keywords."""
    keywords: dict[str, Any] = {}
    while isinstance(function, functools.partial) and not function.args:
        function, keywords = function.func, function.keywords | keywords
    return function, keywords


def is_importable(function: Any) -> bool:
    """Return whether another process finds a function by its module and name."""
    function, keywords = without_partial(function)
    if other_type(keywords) is not None:
        return False
    if (
        not inspect.isfunction(function)
        or function.__module__ == "__main__"
        or "." in function.__qualname__
    ):
        return False
    return getattr(import_module(function.__module__), function.__qualname__, None) is function
