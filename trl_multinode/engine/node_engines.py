"""A rank's clients for its engines: completions, and (on the local main process) weight updates.

Nothing in here is a collective. The engines are those of the rank's node or, if it has none, those of all other nodes.
"""

import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

from ..errors import ConfigurationError, EngineDiedError, EngineError
from ..run.reporter import report
from ..wire.connection import connect
from ..wire.messages import Generate, WeightVersion
from .client import EngineClient, EnginePlace, Rollout
from .group import EngineGroup
from .load import EngineLoad
from .stream import Request, RequestStream

AGENT_POLL_S = 0.5  # between two looks for an agent, by a rank without engines
CONNECT_AGAIN_S = 5.0  # limit for a connection to an engine that was started again and is ready
RESERVE_S = 1.0  # limit for one to an engine that may be starting
SESSION_TOKENS = 4096  # that a session of an agent counts in the load of its engine


def local_places(sockets: Sequence[Path], node: int, log_folder: Path) -> list[EnginePlace]:
    """Return the places of a node's engines with these unix sockets, for a rank of the node."""
    places = []
    for index, path in enumerate(sockets):
        log = log_folder / f"engine{index}.log"
        reach = partial(connect, path, f"engine {index} of node {node}", log)
        places.append(EnginePlace(node, index, reach))
    return places


class NodeEngines(EngineGroup):
    """A rank's clients for its engines.

    Args:
        places (`Sequence[EnginePlace]`):
            Places of the engines.
        node (`int`), rank (`int`):
            Numbers of the calling rank and its node, for error messages.
        load (`Path`):
            File of the node's [`EngineLoad`].
        stall_timeout_s (`float`):
            Seconds without a token after which an engine with work counts as stalled. The total time has no limit.
        window (`int`):
            Rows that this rank keeps in flight per engine if the node has several. Further rows wait in the rank, so
            that they go to the engine that has room first.
        tolerant (`bool`, *optional*, defaults to `False`):
            Give an engine up that died or stalled, instead of raising its error: its owner starts it again.

    Attributes:
        own (`EngineGroup`):
            Clients of the engines of this node, which come first.
        folder (`Path`):
            Private folder of the run on this node.
        recover (`Callable[[], None]`, *optional*):
            Function that returns when lost engines serve again. `generate` calls it when no engine is left; without it
            `generate` raises the error of the first engine that was lost.
        find_more (`Callable[[], bool]`):
            Function that connects to the engines of agents that have joined, and returns whether there are any.
        context (`int`):
            Context length of engines that have not joined yet, in tokens.
    """

    def __init__(
        self,
        places: Sequence[EnginePlace],
        node: int,
        rank: int,
        load: Path,
        stall_timeout_s: float,
        window: int,
        tolerant: bool = False,
    ):
        self.tolerant = tolerant
        self.recover: Callable[[], None] | None = None
        self.find_more: Callable[[], bool] = lambda: False
        self.context = sys.maxsize
        self._renew_next: set[int] = set()  # engines for `_renew_now`
        # optimizer step of every weight update that was sent, by its number
        self._sent: dict[int, int] = {}
        self._connect = partial(
            EngineClient,
            rank=rank,
            node=node,
            stall_timeout_s=stall_timeout_s,
            sent=self._sent,
            tolerant=tolerant,
        )
        self._window = window
        self._joined: list[EnginePlace] = []  # engines for `_renew_now`
        self._stream: RequestStream | None = None  # the open one, or that of the running `generate`
        super().__init__(map(self._connect, places, count()))
        self.own = EngineGroup(client for client in self if client.is_near)
        self.folder = load.parent
        self._load = EngineLoad(load, max(1, len(self.own)))

    # ---- engines that are started again -----------------------------------------------------------------------------

    @property
    def lost(self) -> list[EngineClient]:
        """Clients whose engines have ended. Only the thread that uses these connections reads it."""
        return [client for client in self if client.has_ended]

    def renew(self, indices: Iterable[int]) -> None:
        """Connect to the engines that were started again. Only the thread that uses the connections calls it."""
        for client in [self[index] for index in indices if self[index].has_ended]:
            try:
                renewed = self._connect(client.place, client.index, timeout_s=CONNECT_AGAIN_S)
                self[client.index] = renewed
                if client in self.own:
                    self.own[client.index] = renewed
                # an update that it was loading beside training has no answer any more
                client.lose(EngineDiedError(f"{client.name} was started again"))
                client.close()
            except EngineError as error:  # it has ended again
                client.lose(error)

    def join(self, place: EnginePlace) -> bool:
        """Connect to an engine that an agent offers, and return whether it answers.

        Only the thread that uses the connections calls it.
        """
        # the index of one that has left
        free = [one.index for one in self if one.place.is_of_agent and one.has_ended]
        index = free[0] if free else len(self)
        try:
            self[index : index + 1] = [self._connect(place, index, timeout_s=CONNECT_AGAIN_S)]
        except (EngineError, ConfigurationError) as error:  # it has left, or belongs to another run
            report(f"an engine of an agent is left out: {error}")
            return False
        return True

    def leave_out(self, serving: Collection[int]) -> None:
        """Send no new rows to engines of agents other than these. Any thread calls it."""
        for client in list(self):
            if client.place.is_of_agent and client.place.node not in serving:
                client.leaves = True

    def renew_later(self, indices: Iterable[int], joined: Iterable[EnginePlace] = ()) -> None:
        """Let the thread that uses these connections call `renew` and `join` before its next request.

        Any thread calls it.
        """
        self._renew_next |= set(indices)
        self._joined += joined
        stream = self._stream
        if stream is not None:
            stream.renew_with(self._renew_now)

    def _renew_now(self) -> Sequence[EngineClient]:
        indices = self._renew_next
        self._renew_next = set()
        self.renew(indices)
        while self._joined:
            self.join(self._joined.pop(0))
        return self

    def serving(self, indices: Sequence[int]) -> EngineGroup:
        """Return those of the engines `indices` that are not lost."""
        return EngineGroup(self[index] for index in indices if self[index].lost is None)

    # ---- sessions of agents -----------------------------------------------------------------------------------------

    def reserve(self, without: Collection[int] = ()) -> EngineClient:
        """Return a new connection to the engine of this node with the fewest outstanding tokens. Any thread calls it.

        Args:
            without (`Collection[int]`, *optional*):
                Engines that are left out.

        Raises:
            `EngineError`: if no other engine of this node answers.
        """
        candidates = [index for index in range(len(self.own)) if index not in without]
        while True:
            index = self._load.take(SESSION_TOKENS, candidates)
            try:
                return self._connect(self.own[index].place, index, timeout_s=RESERVE_S)
            except EngineError:
                self._load.give_back(index, SESSION_TOKENS)
                candidates.remove(index)
                if not candidates:
                    raise

    def release(self, client: EngineClient) -> None:
        """Close a connection of `reserve`. Any thread calls it."""
        self._load.give_back(client.index, SESSION_TOKENS)
        client.close()

    # ---- requests ---------------------------------------------------------------------------------------------------

    def expect(self, version: WeightVersion) -> None:
        """Accept completions of `version` from now on. Every rank calls it before its part in sending these weights;
        once it was called, completions of other versions raise `WeightVersionError`."""
        self._sent[version.update] = version.step

    @property
    def max_model_len(self) -> int:
        """Context length that every engine has, or will have, in tokens."""
        return min((client.ready.max_model_len for client in self), default=self.context)

    @property
    def rows_left(self) -> int:
        """Number of completions for which the running `generate` or the open stream waits. Any thread may read it."""
        stream = self._stream
        return 0 if stream is None else stream.rows_left

    def generate(
        self, requests: Sequence[Request], max_tokens: int, sampling: dict, min_update: int
    ) -> list[list[Rollout]]:
        """Return the completions of every request, in the requests' order. It is not a collective.

        Args:
            requests (`Sequence[Request]`):
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
        numbered = [
            replace(request, row=row, min_update=min_update) for row, request in enumerate(requests)
        ]
        results: list[list[Rollout]] = [[] for _ in numbered]
        try:
            with closing(self.open_stream(max_tokens, sampling)) as stream:
                stream.add(numbered)
                while stream.rows_left:
                    if stream.stopped:
                        self._recover()
                        stream.renew_with(self._renew_now)
                    for request, rows in stream.poll():
                        results[request.row] = rows
        finally:
            self._stream = None
        return results

    def _recover(self) -> None:
        """Wait until an engine serves again, or raise the error of the first one that was lost."""
        if self.find_more():
            return
        if self.recover is not None:
            self.recover()
            return
        for client in self:
            if client.lost is not None and not client.place.is_of_agent:
                raise client.lost
        time.sleep(AGENT_POLL_S)

    def open_stream(self, max_tokens: int, sampling: dict) -> RequestStream:
        """Return a stream of requests, which from now on is the only user of these connections.

        Args:
            max_tokens (`int`):
                Limit for a completion, in tokens.
            sampling (`dict`):
                Keywords of vLLM's `SamplingParams`.
        """
        self._renew_now()
        message = Generate(prompt=b"", num_completions=1, max_tokens=max_tokens, sampling=sampling)
        self._stream = RequestStream(self, self._load, self._window, message)
        return self._stream

    def shutdown(self, timeout_s: float) -> None:
        """Send `Shutdown` to each engine of this node without waiting for a reply: its owner waits for the process."""
        for client in self.own:
            with suppress(EngineError):  # the engine has ended, or hangs
                client.shutdown(timeout_s)

    def close(self) -> None:
        stream = self._stream
        if stream is not None and stream.rows_left == 0:  # otherwise a thread uses it
            stream.close()
        for client in self:
            client.close()
        self._load.close()
