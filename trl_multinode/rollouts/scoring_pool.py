"""Processes of a rank that run reward functions, one call at a time each."""

import inspect
import os
import queue
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from typing import IO, Any

import msgspec

from ..errors import ConfigurationError, RolloutError
from .scoring_process import Answer, Request, read, write

NOT_SENT = {"trainer_state", "log_extra", "log_metric", "environments"}


class ScoringPool:
    """
    Processes that run reward functions. Any thread may call `call`, which waits for a free process.

    They start at once, so that their imports are done when the first group is complete, and end with the rank.

    Args:
        size (`int`):
            Number of processes.
        where (`str`):
            Node and rank, for messages.
    """

    def __init__(self, size: int, where: str):
        self._where = where
        self._free: queue.Queue[subprocess.Popen] = queue.Queue()
        self._processes = [self._start() for _ in range(size)]
        for process in self._processes:
            self._free.put(process)
        self.close = weakref.finalize(self, end_all, self._processes)

    def _start(self) -> subprocess.Popen:
        command = [sys.executable, "-m", "trl_multinode.rollouts.scoring_process", str(os.getpid())]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def call(self, function: Callable, name: str, arguments: dict[str, Any]) -> Answer:
        """Call a reward function with the arguments that TRL would give it, and wait for its rewards.

        Raises:
            `ConfigurationError`: if an argument is no plain data.
            `RolloutError`: if the function failed or its process ended.
        """
        sent = {key: value for key, value in arguments.items() if key not in NOT_SENT}
        self._check(name, sent)
        state = arguments["trainer_state"]
        plain = {one.name: getattr(state, one.name) for one in fields(state) if one.init}
        plain = {key: value for key, value in plain.items() if isinstance(value, int | float | str | None)}
        process = self._free.get()
        try:
            write(pipe(process.stdin), Request(function.__module__, function.__qualname__, sent, plain))
            found = read(pipe(process.stdout), Answer)
        except BrokenPipeError:
            found = None
        if found is None:
            self._free.put(process)  # the next call finds it ended, too
            raise RolloutError(
                f"{self._where}: the process of the reward function `{name}` ended with code {process.wait()}. See "
                "the lines before; `score_with_batch` leaves the function in the rank's own process."
            )
        self._free.put(process)
        if found.error:
            raise RolloutError(f"{self._where}: the reward function `{name}` failed: {found.error}\n{found.trace}")
        return found

    def _check(self, name: str, sent: dict[str, Any]) -> None:
        for key, value in sent.items():
            try:
                msgspec.msgpack.encode(value)
            except (TypeError, OverflowError) as error:
                raise ConfigurationError(
                    f"{self._where}: `{key}` cannot be sent to the process of the reward function `{name}` ({error}). "
                    f"Write `score_with_batch=['{name}']`, or keep the column to text, numbers and lists of them."
                ) from None


def pipe(stream: IO[bytes] | None) -> IO[bytes]:
    """Return a pipe of a process that was started with pipes."""
    assert stream is not None
    return stream


def end_all(processes: list[subprocess.Popen]) -> None:
    """End processes: close what they read, and kill those whose function still runs."""
    for process in processes:
        pipe(process.stdin).close()
    for process in processes:
        try:
            process.wait(0.5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        pipe(process.stdout).close()


def is_importable(function: Any) -> bool:
    """Return whether another process finds a function by its module and name."""
    if not inspect.isfunction(function) or function.__module__ == "__main__" or "." in function.__qualname__:
        return False
    return getattr(import_module(function.__module__), function.__qualname__, None) is function
