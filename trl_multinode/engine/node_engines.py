"""A rank's client for its node's engines: completions, scores, and (on the local main process) weight updates.

Nothing in here is a collective: a rank communicates with the engines of its own node only.
"""

import fcntl
import itertools
import mmap
import os
import selectors
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from .. import errors
from ..errors import EngineDiedError, EngineError, EngineStalledError
from .protocol import (
    Completions,
    Connection,
    Failure,
    Generate,
    Hello,
    Image,
    Message,
    Progress,
    Ready,
    Score,
    Shutdown,
    WeightVersion,
    pack_ids,
    unpack_floats,
    unpack_ids,
)


@dataclass(frozen=True)
class PromptRequest:
    """One prompt, to be completed `num_completions` times by one engine."""

    prompt: Sequence[int]  # (P,) token ids
    num_completions: int
    seed: int | None = None  # completion i samples with seed + i
    images: tuple[Image, ...] = ()


@dataclass(frozen=True)
class Rollout:
    """One completion, as an engine returned it."""

    tokens: np.ndarray  # int32 (T,)
    logprobs: np.ndarray  # float32 (T,), of the sampled tokens, after temperature and other processing
    version: WeightVersion  # the weights that generated it
    engine: int  # index on the node


class LoadBoard:
    """Outstanding tokens per engine of a node, shared by its ranks in one small file.

    Each rank of a node chooses the engines of its own requests; without a shared count all ranks would choose the same
    engine. `flock` makes choosing and adding one atomic step.

    Args:
        path (`Path`):
            File in the run's private folder; the first rank that opens it creates it.
        num_engines (`int`):
            Number of engines of the node.
    """

    def __init__(self, path: Path, num_engines: int):
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        if os.fstat(self._file).st_size < 8 * num_engines:
            os.ftruncate(self._file, 8 * num_engines)
        self._tokens = np.frombuffer(mmap.mmap(self._file, 8 * num_engines), dtype=np.int64)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)  # held for microseconds; the kernel releases it if the holder dies
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def take(self, tokens: int, candidates: Sequence[int]) -> int:
        """Add `tokens` to the candidate with the fewest outstanding tokens, and return its index."""
        with self._locked():
            engine = min(candidates, key=lambda index: self._tokens[index])
            self._tokens[engine] += tokens
        return engine

    def give_back(self, engine: int, tokens: int) -> None:
        with self._locked():
            self._tokens[engine] -= tokens

    def close(self) -> None:
        os.close(self._file)


class NodeEngines:
    """A rank's connections to all engines of its node.

    Args:
        sockets (`list[Path]`):
            Unix sockets, one per engine.
        node (`int`), rank (`int`):
            Numbers of the calling rank and its node, for error messages.
        board (`Path`):
            File of the node's [`LoadBoard`].
        stall_timeout_s (`float`):
            Seconds without a token after which an engine with work counts as stalled. The total time has no limit.
        window (`int`):
            Rows that this rank keeps in flight per engine if the node has several. Further rows wait in the rank, so
            that they go to the engine that has room first.
        log_folder (`Path`):
            Folder of the engines' logs, for error messages.
    """

    def __init__(
        self,
        sockets: Sequence[Path],
        node: int,
        rank: int,
        board: Path,
        stall_timeout_s: float,
        window: int,
        log_folder: Path,
    ):
        self._stall_timeout_s = stall_timeout_s
        self._window = window
        self._ids = itertools.count(1)
        self._where = f"Rank {rank} (node {node})"
        self._board = LoadBoard(board, len(sockets))
        self.connections = [
            Connection(str(path), f"engine {i} of node {node}", log_folder / f"engine{i}.log")
            for i, path in enumerate(sockets)
        ]
        self._unclaimed: dict[tuple[int, int], Message] = {}  # replies that arrived before they were waited for
        self.ready = [self._hello(i, rank) for i in range(len(sockets))]

    def _hello(self, engine: int, rank: int) -> Ready:
        reply = self.ask(engine, Hello(rank=rank))
        assert isinstance(reply, Ready), reply
        return reply

    @property
    def max_model_len(self) -> int:
        """Context length that every engine has, in tokens."""
        return min(ready.max_model_len for ready in self.ready)

    # ---- one message, one answer ------------------------------------------------------------------------------------

    def post(self, engine: int, message: Message) -> int:
        """Send a request without waiting for the reply, and return the request's id."""
        request_id = next(self._ids)
        self.connections[engine].send(replace(message, request_id=request_id), self._stall_timeout_s)
        return request_id

    def wait(self, engine: int, request_id: int) -> Message:
        """Wait for the reply to `request_id` and return it.

        Raises:
            `EngineError` (or the subclass that the engine names): if the request failed.
        """
        while (reply := self._unclaimed.pop((engine, request_id), None)) is None:
            self.keep(engine, self.connections[engine].receive(self._stall_timeout_s))
        if isinstance(reply, Failure):
            raise self._error(engine, reply)
        return reply

    def keep(self, engine: int, reply: Message) -> None:
        """Store a reply that arrived early. `Progress` messages are dropped."""
        if not isinstance(reply, Progress):
            self._unclaimed[engine, reply.request_id] = reply

    def ask(self, engine: int, message: Message) -> Message:
        return self.wait(engine, self.post(engine, message))

    def ask_all(self, message: Message) -> list[Message]:
        """Send the same message to every engine, and return the replies in the engines' order."""
        posted = [self.post(engine, message) for engine in range(len(self.connections))]
        return [self.wait(engine, request_id) for engine, request_id in enumerate(posted)]

    def shutdown(self, timeout_s: float) -> None:
        """Send `Shutdown` to every engine without waiting for the reply: its owner waits for the process."""
        for connection in self.connections:
            with suppress(EngineError):  # the engine has ended, or hangs
                connection.send(Shutdown(request_id=next(self._ids)), timeout_s)

    def _error(self, engine: int, failure: Failure) -> EngineError:
        cls = getattr(errors, failure.error, EngineError)
        connection = self.connections[engine]
        if cls is EngineDiedError:
            return connection.ended(failure.message)
        return cls(f"{self._where}: {connection.name}: {failure.message}. Log: {connection.log_path}")

    # ---- completions ------------------------------------------------------------------------------------------------

    def generate(
        self, requests: Sequence[PromptRequest], max_tokens: int, sampling: dict, min_update: int
    ) -> list[list[Rollout]]:
        """Return the completions of every request, in the requests' order. It is not a collective.

        Args:
            requests (`Sequence[PromptRequest]`):
                Prompts of this rank.
            max_tokens (`int`):
                Limit for a completion, in tokens.
            sampling (`dict`):
                Keywords of vLLM's `SamplingParams`.
            min_update (`int`):
                Number of the weight update that must have been attempted before generation starts.

        Raises:
            `EngineStalledError`: if an engine makes no token for `stall_timeout_s` seconds.
            `EngineDiedError`: if an engine has ended.
            `EngineRefusedError`: if vLLM refuses a prompt or the sampling settings.
        """
        with _Dispatch(self, requests, max_tokens, sampling, min_update) as dispatch:
            return dispatch.run()

    def score(self, tokens: Sequence[int], engine: int) -> Rollout:
        """Return the log-probs of `tokens[1:]` under the current weights of one engine."""
        return self.scored(engine, self.post_score(tokens, engine))

    def post_score(self, tokens: Sequence[int], engine: int) -> int:
        """Request a score without waiting for it, and return the request's id."""
        return self.post(engine, Score(prompt=pack_ids(tokens)))

    def scored(self, engine: int, request_id: int) -> Rollout:
        """Wait for the score that `post_score` requested, and return it."""
        return _rows(self.wait(engine, request_id), engine)[0]

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self._board.close()


class _Dispatch:
    """One `generate` call: each request goes to the engine with room that has the fewest outstanding tokens."""

    def __init__(self, engines: NodeEngines, requests: Sequence[PromptRequest], max_tokens, sampling, min_update):
        self._engines = engines
        self._requests = requests
        self._message = Generate(
            prompt=b"", num_completions=1, max_tokens=max_tokens, sampling=sampling, min_update=min_update
        )
        self._open: list[dict[int, int]] = [{} for _ in engines.connections]  # per engine: request id -> index
        self._heard = [0.0] * len(engines.connections)  # per engine: time of its last sign of work
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> "_Dispatch":
        for index, connection in enumerate(self._engines.connections):
            self._selector.register(connection, selectors.EVENT_READ, index)
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for engine, opened in enumerate(self._open):
            for index in opened.values():
                self._engines._board.give_back(engine, self._cost(index))

    def run(self) -> list[list[Rollout]]:
        results: list[list[Rollout]] = [[] for _ in self._requests]
        waiting = list(range(len(self._requests)))[::-1]
        while waiting or any(self._open):
            while waiting and (room := self._engines_with_room()):
                self._send(waiting.pop(), room)
            for engine, reply in self._replies():
                index = self._open[engine].pop(reply.request_id)
                self._engines._board.give_back(engine, self._cost(index))
                results[index] = _rows(reply, engine)
        return results

    def _cost(self, index: int) -> int:
        """Return an upper bound on the tokens that a request costs its engine."""
        request = self._requests[index]
        return len(request.prompt) + request.num_completions * self._message.max_tokens

    def _engines_with_room(self) -> list[int]:
        if len(self._open) == 1:
            return [0]
        rows = [sum(self._requests[i].num_completions for i in opened.values()) for opened in self._open]
        return [engine for engine, count in enumerate(rows) if count < self._engines._window]

    def _send(self, index: int, room: list[int]) -> None:
        request = self._requests[index]
        engine = self._engines._board.take(self._cost(index), room)
        message = replace(
            self._message, prompt=pack_ids(request.prompt), num_completions=request.num_completions,
            seed=request.seed, images=request.images,
        )  # fmt: skip
        if not self._open[engine]:
            self._heard[engine] = time.monotonic()
        self._open[engine][self._engines.post(engine, message)] = index

    def _replies(self) -> Iterator[tuple[int, Completions]]:
        """Wait up to a second and yield the replies that have arrived; every message is a sign of work."""
        for key, _ in self._selector.select(1.0):
            engine = key.data
            reply = self._engines.connections[engine].receive(self._engines._stall_timeout_s)
            self._heard[engine] = time.monotonic()
            if reply.request_id not in self._open[engine]:
                self._engines.keep(engine, reply)
            elif isinstance(reply, Failure):
                raise self._engines._error(engine, reply)
            else:
                yield engine, reply
        self._check_stalls()

    def _check_stalls(self) -> None:
        limit = self._engines._stall_timeout_s
        for engine, opened in enumerate(self._open):
            if opened and time.monotonic() - self._heard[engine] > limit:
                raise EngineStalledError(
                    f"{self._engines._where}: {self._engines.connections[engine].name} made no token for "
                    f"{limit:.0f} s with {len(opened)} requests open. Raise `engine_stall_timeout`, or see its log: "
                    f"{self._engines.connections[engine].log_path}"
                )


def _rows(reply: Message, engine: int) -> list[Rollout]:
    assert isinstance(reply, Completions), reply
    ends = np.cumsum(unpack_ids(reply.lengths)).tolist()
    tokens, logprobs = unpack_ids(reply.tokens), unpack_floats(reply.logprobs)
    return [
        Rollout(tokens[start:end], logprobs[start:end], reply.version, engine)
        for start, end in itertools.pairwise([0, *ends])
    ]
