"""Choice of the engine for each request of a rank: the one with room that has the fewest outstanding tokens."""

import fcntl
import mmap
import os
import selectors
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from ..errors import EngineError
from ..wire.messages import Generate, Image, Message, pack_ids
from .client import EngineClient, Rollout
from .group import LOSSES


@dataclass(frozen=True)
class PromptRequest:
    """One prompt, to be completed `num_completions` times by one engine."""

    prompt: Sequence[int]  # (P,) token ids
    num_completions: int
    seed: int | None = None  # completion i samples with seed + i
    images: tuple[Image, ...] = ()


class EngineLoad:
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


class Dispatch:
    """One `generate` call of a rank: it sends the requests to the node's engines and collects the completions.

    ```python
    with Dispatch(clients, load, window, requests, message) as dispatch:
        groups = dispatch.run()
    ```

    Args:
        clients (`Sequence[EngineClient]`):
            Clients for the engines of the node.
        load (`EngineLoad`):
            Outstanding tokens of all ranks of the node.
        window (`int`):
            Rows that this rank keeps in flight per engine if the node has several.
        requests (`Sequence[PromptRequest]`):
            Prompts of this rank.
        message (`Generate`):
            Message with the settings that all requests share.
        tolerant (`bool`, *optional*, defaults to `False`):
            Send the open requests of an engine that died or stalled again, to the engines that are left.
        recover (`Callable[[], None]`, *optional*):
            Function that returns when an engine serves again, or raises; called when no engine is left.
    """

    def __init__(
        self,
        clients: Sequence[EngineClient],
        load: EngineLoad,
        window: int,
        requests: Sequence[PromptRequest],
        message: Generate,
        tolerant: bool = False,
        recover: Callable[[], None] = lambda: None,
    ):
        self._tolerant = tolerant
        self._recover = recover
        self._clients = clients
        self._load = load
        self._window = window
        self._requests = requests
        self._message = message
        self._waiting = list(range(len(requests)))[::-1]  # indices of requests, the next one last
        self._open: dict[tuple[int, int], int] = {}  # engine, request id -> index of the request
        self._selector = selectors.DefaultSelector()
        self.rows_left = sum(
            request.num_completions for request in requests
        )  # without a reply; any thread may read it

    def __enter__(self) -> "Dispatch":
        self._select()
        return self

    def _select(self) -> None:
        self._selector.close()
        self._selector = selectors.DefaultSelector()
        for client in self._clients:
            if client.lost is None:
                self._selector.register(client, selectors.EVENT_READ, client)

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for (engine, request_id), index in self._open.items():  # after a failure
            self._load.give_back(engine, self._cost(index))
            self._clients[engine].unanswered.pop(request_id, None)  # this call no longer waits for it

    def run(self) -> list[list[Rollout]]:
        """Return the completions of every request, in the requests' order."""
        results: list[list[Rollout]] = [[] for _ in self._requests]
        while self._waiting or self._open:
            while all(client.lost is not None for client in self._clients):
                self._recover()
                self._select()
            while self._waiting and (room := self._engines_with_room()):
                self._send(self._waiting.pop(), room)
            for client, reply in self._replies():
                index = self._close((client.index, reply.request_id))
                try:
                    results[index] = client.rows(client.checked(reply))
                    self.rows_left -= len(results[index])
                except LOSSES as error:
                    self._waiting.append(index)
                    self._lose(client, error)
        return results

    def _close(self, request: tuple[int, int]) -> int:
        """Count a request as answered, and return its index."""
        index = self._open.pop(request)
        self._load.give_back(request[0], self._cost(index))
        return index

    def _lose(self, client: EngineClient, error: EngineError) -> None:
        """Give an engine up, and let its open requests wait for another one."""
        if not self._tolerant:
            raise error
        if client.lost is None:
            self._selector.unregister(client)
            client.lose(error)
        self._waiting += [self._close(request) for request in list(self._open) if request[0] == client.index]
        self._waiting.sort(reverse=True)

    def _cost(self, index: int) -> int:
        """Return an upper bound on the tokens that a request costs its engine."""
        request = self._requests[index]
        return len(request.prompt) + request.num_completions * self._message.max_tokens

    def _engines_with_room(self) -> list[int]:
        if len(self._clients) == 1 and self._clients[0].lost is None:
            return [0]
        rows = [0] * len(self._clients)
        for (engine, _request_id), index in self._open.items():
            rows[engine] += self._requests[index].num_completions
        return [
            engine for engine, count in enumerate(rows) if count < self._window and self._clients[engine].lost is None
        ]

    def _send(self, index: int, room: list[int]) -> None:
        request = self._requests[index]
        engine = self._load.take(self._cost(index), room)
        message = replace(
            self._message, prompt=pack_ids(request.prompt), num_completions=request.num_completions,
            seed=request.seed, images=request.images,
        )  # fmt: skip
        try:
            self._open[engine, self._clients[engine].post(message)] = index
        except LOSSES as error:
            self._load.give_back(engine, self._cost(index))
            self._waiting.append(index)
            self._lose(self._clients[engine], error)

    def _replies(self) -> Iterator[tuple[EngineClient, Message]]:
        """Wait up to a second and yield the replies to this call's requests that have arrived."""
        for key, _ in self._selector.select(1.0):
            client: EngineClient = key.data
            try:
                reply = client.receive()
            except LOSSES as error:
                self._lose(client, error)
                continue
            if reply is not None and (client.index, reply.request_id) in self._open:
                yield client, reply
            elif reply is not None:
                client.keep(reply)
        for client in self._clients:
            try:
                client.check_stall()
            except LOSSES as error:
                self._lose(client, error)
