"""A process that runs reward functions for a rank: `python -m trl_multinode.rollouts.scoring_process OWNER SOCKET`.

Some functions need the main thread of a process, as TRL's `accuracy_reward` does for its time limit, and others hold
the interpreter. A request names a function by its module and carries msgpack values, so nothing is unpickled. A thread
answers in which row the function is, and ends the process with its owner. It loads only what the functions load.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import IO, Any, TypeVar

import msgspec

from ..run.endings.error_text import described
from ..wire.process_end import open_end
from ..wire.stop_signals import preempt_signals
from .reward_call import Call, as_rewards, with_rows

Message = TypeVar("Message", bound=msgspec.Struct)
LENGTH = 8  # bytes before each message
QUESTION = b"?"  # where is the function?


class Request(msgspec.Struct, array_like=True):
    """Call of a reward function."""

    module: str
    name: str
    arguments: dict[str, Any]
    trainer_state: dict[str, Any]


class Answer(msgspec.Struct, array_like=True):
    """Result of a call: the rewards, what it logged, or its error with the row and the traceback."""

    rewards: list[Any] = []
    extras: dict[str, list[Any]] = {}
    metrics: list[tuple[str, float]] = []
    error: str = ""
    row: str = ""
    trace: str = ""


def write(stream: IO[bytes], message: msgspec.Struct) -> None:
    """Write a message to a pipe."""
    body = msgspec.msgpack.encode(message, enc_hook=as_logged)
    stream.write(len(body).to_bytes(LENGTH, "little") + body)
    stream.flush()


def read(stream: IO[bytes], kind: type[Message]) -> Message | None:
    """Read a message from a pipe; `None` at its end."""
    head = stream.read(LENGTH)
    if len(head) < LENGTH:
        return None
    size = int.from_bytes(head, "little")
    body = stream.read(size)
    return msgspec.msgpack.decode(body, type=kind) if len(body) == size else None


def as_logged(value: Any) -> Any:
    """Return plain data for what a function gave to `log_extra`: numbers of arrays and tensors, the text of others."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


class Functions:
    """Reward functions of this process, one call at a time. Any thread may ask where it is."""

    def __init__(self) -> None:
        self._call: Call | None = None

    def answer(self, request: Request) -> Answer:
        """Call the function of a request in this thread."""
        found = Answer(extras=defaultdict(list), metrics=[])
        call = Call(request.name, time.monotonic(), threading.get_ident(), whose="the group's")
        try:
            function: Callable = getattr(import_module(request.module), request.name)
            self._call = call
            rewards = function(
                **with_rows(request.arguments, call),
                trainer_state=SimpleNamespace(**request.trainer_state),
                log_extra=lambda column, values: found.extras[column].extend(values),
                log_metric=lambda name, value: found.metrics.append((name, float(value))),
            )
            found.rewards = as_rewards(
                "a process of this rank", request.name, rewards, len(request.arguments["prompts"])
            )
        except Exception as error:
            found.error, found.row = described(error), call.row()
            found.trace = traceback.format_exc()
        finally:
            self._call = None
        return found

    def where(self) -> str:
        """Return the row and the line that the function has reached."""
        call = self._call
        return "" if call is None else call.row() + call.where()


def serve(owner: int, questions: socket.socket, functions: Functions) -> None:
    """Answer where the function is, and end this process when another one ends, also while a function runs."""
    end = open_end(owner)
    both: list[Any] = [end, questions]
    while end not in select.select(both, [], [])[0]:
        try:
            if questions.recv(1) != QUESTION:
                break
            questions.send(functions.where().encode() or b" ")
        except OSError:  # the owner has closed it
            break
    os._exit(1)


def own_streams() -> tuple[IO[bytes], IO[bytes]]:
    """Return this process's pipes from and to its owner. What a function prints goes to the rank's log, at once."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return requests, answers


def main() -> None:
    """Answer requests from standard input on standard output, until the owner closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the rank, which ends this process
    for number in preempt_signals():  # so does a pre-emption, whose checkpoint needs the rewards under way
        signal.signal(number, lambda *_: None)  # a handler, because programs that a function starts inherit `SIG_IGN`
    signal.pthread_sigmask(signal.SIG_UNBLOCK, preempt_signals())
    functions, questions = Functions(), socket.socket(fileno=int(sys.argv[2]))
    arguments = (int(sys.argv[1]), questions, functions)
    threading.Thread(target=serve, args=arguments, name="questions", daemon=True).start()
    requests, answers = own_streams()
    for module in sys.argv[3:]:  # some take seconds
        with contextlib.suppress(Exception):  # the call says what is wrong
            import_module(module)
    with contextlib.suppress(BrokenPipeError):
        write(answers, Answer())  # ready
        while (request := read(requests, Request)) is not None:
            write(answers, functions.answer(request))


if __name__ == "__main__":
    main()
