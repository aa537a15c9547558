"""Requests of a rank to the engines of its node, on connections that nothing else uses meanwhile.

A request goes to the engine with room that has the fewest outstanding tokens. Further ones may be added while earlier
ones run, and the open ones of an engine that died or stalled begin again on another one.
"""

import os
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from msgspec.structs import replace

from ..errors import EngineLeavingError
from ..wire.messages import Completions, Failure, Generate, Image, Message, Peek, pack_ids
from .client import LOSSES, EngineClient, Rollout
from .load import EngineLoad

GroupId = tuple[int, int]  # chosen by the caller
NO_GROUP: GroupId = (-1, -1)


@dataclass(frozen=True, eq=False)  # by identity: requests may have equal prompts
class Request:
    """One prompt, to be completed `num_completions` times by one engine."""

    prompt: Sequence[int]  # (P,) token ids, with those of the completion that exist
    num_completions: int = 1
    seed: int | None = None  # row i samples with seed + i
    images: tuple[Image, ...] = ()
    # number of the weight update that must have been attempted before the rows start
    min_update: int = 0
    group: GroupId = NO_GROUP  # those of a group follow each other, so that one engine computes their prompt once
    row: int = 0  # place in the group, or among the requests of a call
    num_made: int = 0  # tokens of the completion that `prompt` ends with
    max_tokens: int | None = None  # of the completion; `None`: the stream's limit


class Peeking:
    """Rows under way of requests for one row, which the thread that polls collects for another one.

    Attributes:
        rows (`list[tuple[Request, Rollout]]`):
            Rows with at least one token.
        complete (`threading.Event`):
            Set when all engines have answered.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[Request, Rollout]] = []
        self.complete = threading.Event()
        self.num_open = 1  # engines that have not answered, and the thread until it has asked all

    def add(self, rows: list[tuple[Request, Rollout]]) -> None:
        self.rows += rows
        self.num_open -= 1
        if self.num_open == 0:
            self.complete.set()


@dataclass
class Lane:
    """Requests of a stream that are under way on one engine."""

    client: EngineClient
    open: dict[int, Request] = field(default_factory=dict)  # by request id
    peeks: dict[int, Peeking] = field(default_factory=dict)  # by request id
    num_rows: int = 0  # of `open`; any thread may read it
    num_made: int = 0  # tokens of the requests that have ended
    since: float = field(default_factory=time.monotonic)

    @property
    def speed(self) -> float:
        """Tokens per second that this rank has got of the engine so far."""
        # a lane that was made just now has no age on a coarse clock
        return self.num_made / max(time.monotonic() - self.since, 1e-6)


class RequestStream:
    """Requests under way on the engines of a node. One thread calls `poll`; any other thread may call `add`.

    ```python
    stream.add(requests)                  # returns at once
    for request, rows in stream.poll():   # waits up to a second for requests that have ended
        ...
    ```

    Args:
        clients (`Sequence[EngineClient]`):
            Clients for the engines of the node; only the thread that polls uses them. If they are tolerant, the
            requests of an engine that died or stalled begin again, on the engines that are left or come back.
        load (`EngineLoad`):
            Outstanding tokens of all ranks of the node.
        window (`int`):
            Rows that this rank keeps in flight per engine. Further requests wait in the rank, oldest first.
        message (`Generate`):
            Message with the settings that all requests share.
    """

    def __init__(
        self, clients: Sequence[EngineClient], load: EngineLoad, window: int, message: Generate
    ):
        self._renew: Callable[[], Sequence[EngineClient]] | None = None
        self._load = load
        self._window = window
        self._message = message
        self._waiting: deque[Request] = deque()
        self._lanes = [Lane(client) for client in clients]  # by engine
        # group and engine of the last request that was sent
        self._last: tuple[GroupId, int] = (NO_GROUP, 0)
        self._num_added = self._num_ended = 0  # each is written by one thread
        self._asked: deque[Peeking] = deque()
        # any thread writes it, to end the wait of the thread that polls
        self._event = os.eventfd(0)
        # not in `close`, after which a thread may still write: the number could be another file's
        weakref.finalize(self, os.close, self._event)
        self._select()

    def _select(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._event, selectors.EVENT_READ)
        for lane in self._lanes:
            if lane.client.lost is None:
                self._selector.register(lane.client, selectors.EVENT_READ, lane.client)

    @property
    def stopped(self) -> bool:
        """Return whether rows wait and no engine is left. Any thread may read it."""
        return (
            self.rows_left > 0
            and self._renew is None
            and all(
                lane.client.lost or (lane.client.leaves and not lane.num_rows)
                for lane in self._lanes
            )
        )

    def renew_with(self, renew: Callable[[], Sequence[EngineClient]]) -> None:
        """Let the thread that polls call `renew`, which connects to engines that were started again.

        It returns the connections to all engines.
        """
        self._renew = renew
        os.eventfd_write(self._event, 1)

    @property
    def rows_left(self) -> int:
        """Number of rows that were added and have not ended. Any thread may read it."""
        return self._num_added - self._num_ended

    @property
    def rows_under_way(self) -> int:
        """Number of rows that were sent to an engine and have not ended. Any thread may read it."""
        return sum(lane.num_rows for lane in self._lanes)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, and wake the thread that polls."""
        self._num_added += sum(request.num_completions for request in requests)
        self._waiting.extend(requests)
        os.eventfd_write(self._event, 1)

    def peek(self) -> "Peeking":
        """Ask for the rows under way as far as they are made; the thread that polls collects the answers."""
        peeking = Peeking()
        self._asked.append(peeking)
        os.eventfd_write(self._event, 1)
        return peeking

    def poll(self, timeout_s: float = 1.0) -> list[tuple[Request, list[Rollout]]]:
        """Send the requests for which there is room, wait for some that end, and return these with their rows.

        Raises:
            `EngineError`: if an engine failed, or made no token for `engine_stall_timeout` seconds.
        """
        self._renew_engines()
        self._send_waiting()
        self._send_peeks()
        ended = []
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                os.eventfd_read(self._event)
                continue
            with self._loss_accepted(key.data):
                if (found := self._receive(key.data)) is not None:
                    ended.append(found)
        for lane in list(self._lanes):
            with self._loss_accepted(lane.client):
                lane.client.check_stall()
        self._num_ended += sum(request.num_completions for request, _ in ended)
        return ended

    def _renew_engines(self) -> None:
        if (renew := self._renew) is not None:
            for client in renew():
                if client.index == len(self._lanes):  # it has joined
                    self._lanes.append(Lane(client))
                if client is not self._lanes[client.index].client:
                    # its requests are still open if nothing was read since it was lost
                    self._begin_again(client)
            self._selector.close()
            self._select()
            self._renew = None

    @contextmanager
    def _loss_accepted(self, client: EngineClient) -> Iterator[None]:
        """Give an engine up that dies or stalls inside. Its requests begin again, before those that wait."""
        try:
            yield
        except LOSSES as error:
            if not client.tolerant:
                raise
            self._selector.unregister(client)
            client.lose(error)
            self._begin_again(client)

    def _begin_again(self, client: EngineClient) -> None:
        lane = self._lanes[client.index]
        self._lanes[client.index] = Lane(client)
        for request in reversed(lane.open.values()):
            self._give_back(client, request)
            self._waiting.appendleft(request)
        for peeking in lane.peeks.values():
            peeking.add([])  # these rows have no tokens any more

    def _send_waiting(self) -> None:
        while self._waiting and (room := self._engines_with_room()):
            request = self._waiting[0]
            group, engine = self._last
            # the engine of the group's request before has computed its prompt
            if group == request.group != NO_GROUP and engine in room:
                room = [engine]
            engine = self._take(request, room)
            self._last = (request.group, engine)
            message = replace(
                self._message,
                prompt=pack_ids(request.prompt),
                num_completions=request.num_completions,
                seed=request.seed,
                images=request.images,
                min_update=request.min_update,
                max_tokens=self._left(request),
            )
            lane = self._lanes[engine]
            with self._loss_accepted(lane.client):
                number = lane.client.post(message)
                lane.open[number] = self._waiting.popleft()
                lane.num_rows += request.num_completions
            if lane.client.lost is not None:
                self._give_back(lane.client, request)

    def _take(self, request: Request, candidates: list[int]) -> int:
        """Choose the engine of a request; those of the node are chosen by the outstanding tokens of all its ranks."""
        if self._lanes[candidates[0]].client.is_near:
            return self._load.take(self._cost(request), candidates)
        lanes = [self._lanes[index] for index in candidates]
        # an engine that has made nothing yet is taken to be as fast as the fastest
        fastest = max(lane.speed for lane in lanes) or 1.0
        lane = min(lanes, key=lambda lane: lane.num_rows / (lane.speed or fastest))
        return lane.client.index

    def _give_back(self, client: EngineClient, request: Request) -> None:
        if client.is_near:
            self._load.give_back(client.index, self._cost(request))

    def _send_peeks(self) -> None:
        while self._asked:
            peeking = self._asked.popleft()
            for lane in list(self._lanes):
                if lane.num_rows and lane.client.lost is None:
                    with self._loss_accepted(lane.client):
                        lane.peeks[lane.client.post(Peek())] = peeking
                        peeking.num_open += 1
            peeking.add([])  # all are asked

    def _engines_with_room(self) -> list[int]:
        """Return the engines of this node that have room or, if none of them has, the other ones."""
        free = [lane.client for lane in self._lanes if lane.num_rows < self._window]
        free = [client for client in free if client.lost is None and not client.leaves]
        near = [client.index for client in free if client.is_near]
        return near or [client.index for client in free]

    def _cost(self, request: Request) -> int:
        """Return an upper bound on the tokens that a request costs its engine."""
        return len(request.prompt) + request.num_completions * self._left(request)

    def _left(self, request: Request) -> int:
        """Return the most tokens that a row may still make."""
        limit = self._message.max_tokens if request.max_tokens is None else request.max_tokens
        return limit - request.num_made

    def _receive(self, client: EngineClient) -> tuple[Request, list[Rollout]] | None:
        reply = client.receive()
        if reply is None:
            return None
        lane = self._lanes[client.index]
        number = reply.request_id
        if (peeking := lane.peeks.pop(number, None)) is not None:
            peeking.add(self._rows_so_far(client, client.checked(reply)))
            return None
        if number not in lane.open:
            # another part of the rank has asked for it, or a call that has failed
            client.keep(reply)
            return None
        if isinstance(reply, Failure) and reply.error == EngineLeavingError.__name__:
            client.leaves = True
            self._waiting.appendleft(self._closed(lane, number))
            return None
        client.checked(reply)  # before the request is closed: a lost one begins again
        request = self._closed(lane, number)
        rows = client.rows(reply)
        lane.num_made += sum(len(row.tokens) for row in rows)
        return request, rows

    def _closed(self, lane: Lane, number: int) -> Request:
        """Return a request that has a reply, and is no longer under way."""
        request = lane.open.pop(number)
        lane.num_rows -= request.num_completions
        self._give_back(lane.client, request)
        return request

    def _rows_so_far(self, client: EngineClient, reply: Message) -> list[tuple[Request, Rollout]]:
        """Return the rows in an answer to `Peek`; those that ended before it are no longer open."""
        assert isinstance(reply, Completions), reply
        lane = self._lanes[client.index]
        rows = [(lane.open.get(row.request_id), client.row(row)) for row in reply.rows]
        return [(request, row) for request, row in rows if request is not None]

    def close(self) -> None:
        """Forget all requests, after a failure or at the end, when no thread polls. A second call does nothing."""
        self._selector.close()
        for lane in self._lanes:
            for request_id, request in lane.open.items():
                self._give_back(lane.client, request)
                lane.client.unanswered.discard(request_id)
            lane.open.clear()
        self._waiting.clear()
