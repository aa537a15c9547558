"""Messages to several engines of a node at once, and what becomes of an engine that ends meanwhile."""

from collections.abc import Callable, Iterator, Sequence
from typing import overload

from ..errors import EngineDiedError, EngineStalledError, MultiNodeError
from ..wire.messages import Message
from .client import EngineClient

LOSSES = (EngineDiedError, EngineStalledError)  # errors after which an engine can be started again


class PendingReplies:
    """Replies to requests that were sent to several engines of a node.

    Args:
        requests (`list[tuple[EngineClient, int]]`):
            Each engine's client and the id of its request.
        tolerant (`bool`, *optional*, defaults to `False`):
            Give an engine up that died or stalled, instead of raising its error.
    """

    def __init__(self, requests: list[tuple[EngineClient, int]], tolerant: bool = False):
        self._requests = requests
        self._tolerant = tolerant

    def wait(self) -> list[Message]:
        """Return the replies in the engines' order; raise the first failure at once."""
        return [reply for _, reply in self.answers()]

    def answers(self) -> list[tuple[EngineClient, Message]]:
        """Return each engine's client and its reply; engines that are given up are left out."""
        found = []
        for client, request_id in self._requests:
            if client.lost is not None:
                continue
            try:
                found.append((client, client.wait(request_id)))
            except LOSSES as error:
                if not self._tolerant:
                    raise
                client.lose(error)
        return found

    def failures(self) -> list[MultiNodeError]:
        """Wait for every reply, and return the errors of the requests that failed."""
        errors = []
        for client, request_id in self._requests:
            try:
                client.wait(request_id)
            except MultiNodeError as error:
                errors.append(error)
        return errors


class EngineGroup(Sequence[EngineClient]):
    """Clients for some engines of a node, by their place in this group.

    Args:
        clients (`list[EngineClient]`):
            Clients of the calling rank.
        tolerant (`bool`, *optional*, defaults to `False`):
            Give an engine up that died or stalled, instead of raising its error: it is started again.
    """

    def __init__(self, clients: list[EngineClient], tolerant: bool = False):
        self._clients = clients
        self.tolerant = tolerant

    def __len__(self) -> int:
        return len(self._clients)

    @overload
    def __getitem__(self, index: int) -> EngineClient: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[EngineClient]: ...

    def __getitem__(self, index: int | slice) -> EngineClient | Sequence[EngineClient]:
        return self._clients[index]

    def __iter__(self) -> Iterator[EngineClient]:
        return iter(self._clients)

    def post_all(self, message: Message | Callable[[int], Message]) -> PendingReplies:
        """Send a message to every engine without waiting; a function returns the message for an engine's index."""
        posted = []
        for client in self:
            if client.lost is not None:
                continue
            try:
                posted.append((client, client.post(_for(client, message))))
            except LOSSES as error:
                if not self.tolerant:
                    raise
                client.lose(error)
        return PendingReplies(posted, self.tolerant)

    def ask_all(self, message: Message) -> list[Message]:
        """Send the same message to every engine, and return the replies in the engines' order."""
        return self.post_all(message).wait()


def _for(client: EngineClient, message: Message | Callable[[int], Message]) -> Message:
    return message if isinstance(message, Message) else message(client.index)
