"""A process that runs reward functions for a rank.

It is started as `python -m trl_multinode.rollouts.scoring_process OWNER CALLS QUESTIONS MODULE...`, with the pid of
its rank, the descriptors of two connections, and the modules that it imports at once.

Some functions need the main thread of a process, as TRL's `accuracy_reward` does for its time limit, and others hold
the interpreter. A request names a function by its module and carries msgpack values, so nothing is unpickled. A thread
answers in which row the function is, and ends the process with its owner. It loads only what the functions load.
"""

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any

import msgspec

from ..run.endings.error_text import described
from ..wire.process_end import open_end
from ..wire.stop_signals import preempt_signals
from .reward_call import Call, as_rewards, with_rows


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


def encoded(message: msgspec.Struct) -> bytes:
    """Return a message as msgpack."""
    return msgspec.msgpack.encode(message, enc_hook=as_logged)


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
        call = Call(request.name, whose="the group's")
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


def serve(owner: int, questions: Connection, functions: Functions) -> None:
    """Answer where the function is, and end this process when another one ends, also while a function runs."""
    end = open_end(owner)
    while end not in wait([end, questions]):
        try:
            questions.recv_bytes()
            questions.send_bytes(functions.where().encode())
        except (EOFError, OSError):  # the owner has closed it
            break
    os._exit(1)


def inherited(descriptor: int) -> Connection:
    """Return the connection of a descriptor, which programs that a function starts do not get."""
    os.set_inheritable(descriptor, False)
    return Connection(descriptor)


def main() -> None:
    """Answer requests until the owner ends."""
    owner = int(sys.argv[1])
    calls, questions = inherited(int(sys.argv[2])), inherited(int(sys.argv[3]))
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the rank, which ends this process
    # so does a pre-emption, whose checkpoint needs the rewards under way
    for number in preempt_signals():
        # a handler, because programs that a function starts inherit `SIG_IGN`
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, preempt_signals())
    functions = Functions()
    threading.Thread(
        target=serve, args=(owner, questions, functions), name="questions", daemon=True
    ).start()
    for module in sys.argv[4:]:  # some take seconds
        with contextlib.suppress(Exception):  # the call says what is wrong
            import_module(module)
    with contextlib.suppress(EOFError, OSError):  # the owner has ended
        calls.send_bytes(encoded(Answer()))  # ready
        while True:
            request = msgspec.msgpack.decode(calls.recv_bytes(), type=Request)
            calls.send_bytes(encoded(functions.answer(request)))


if __name__ == "__main__":
    main()
