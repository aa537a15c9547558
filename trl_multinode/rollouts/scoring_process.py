"""A process that runs reward functions for a rank: `python -m trl_multinode.rollouts.scoring_process OWNER`.

Some functions need the main thread of a process, as TRL's `accuracy_reward` does for its time limit, and others hold
the interpreter. A request names a function by its module and carries msgpack values, so nothing is unpickled. The
process ends with its owner.
"""

import contextlib
import os
import select
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import IO, Any, TypeVar

import msgspec

from ..wire.process_end import open_end

Message = TypeVar("Message", bound=msgspec.Struct)
LENGTH = 8  # bytes before each message


class Request(msgspec.Struct, array_like=True):
    """Call of a reward function."""

    module: str
    name: str
    arguments: dict[str, Any]
    trainer_state: dict[str, Any]


class Answer(msgspec.Struct, array_like=True):
    """Result of a call: the rewards, what it logged, or its traceback."""

    rewards: list[Any] = []
    extras: dict[str, list[Any]] = {}
    metrics: list[tuple[str, float]] = []
    error: str = ""
    trace: str = ""


def write(stream: IO[bytes], message: msgspec.Struct) -> None:
    """Write a message to a pipe."""
    body = msgspec.msgpack.encode(message)
    stream.write(len(body).to_bytes(LENGTH, "little") + body)
    stream.flush()


def read(stream: IO[bytes], kind: type[Message]) -> Message | None:
    """Read a message from a pipe; `None` at its end."""
    head = stream.read(LENGTH)
    if len(head) < LENGTH:
        return None
    body = stream.read(int.from_bytes(head, "little"))
    return msgspec.msgpack.decode(body, type=kind)


def answer(request: Request) -> Answer:
    """Call the function of a request."""
    found = Answer(extras=defaultdict(list), metrics=[])
    try:
        function: Callable = getattr(import_module(request.module), request.name)
        rewards = function(
            **request.arguments,
            trainer_state=SimpleNamespace(**request.trainer_state),
            log_extra=lambda column, values: found.extras[column].extend(values),
            log_metric=lambda name, value: found.metrics.append((name, float(value))),
        )
        found.rewards = [None if reward is None else float(reward) for reward in rewards]
    except Exception as error:
        found.error, found.trace = f"{type(error).__name__}: {error}", traceback.format_exc()
    return found


def end_with(owner: int) -> None:
    """End this process when another one ends, also while a function runs."""
    end = open_end(owner)

    def wait() -> None:
        select.select([end], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="end-of-owner", daemon=True).start()


def main() -> None:
    """Answer requests from standard input on standard output, until the owner closes it."""
    end_with(int(sys.argv[1]))
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a function prints goes to the rank's log
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        while (request := read(requests, Request)) is not None:
            write(answers, answer(request))


if __name__ == "__main__":
    main()
