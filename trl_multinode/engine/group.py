"""Messages to several engines of a node at once, and what becomes of an engine that ends meanwhile."""

from collections.abc import Callable

from ..errors import MultiNodeError
from ..wire.messages import Message
from .client import EngineClient

Posted = list[tuple[EngineClient, int]]  # each engine's client, and the id of its request


class EngineGroup(list[EngineClient]):
    """Clients for some engines of a node, by their place in this group."""

    def post_all(self, message: Message | Callable[[int], Message]) -> Posted:
        """Send a message to every engine without waiting; a function returns the message for an engine's index."""
        posted = []
        for client in self:
            if client.lost is None:
                with client.loss_accepted():
                    own = message if isinstance(message, Message) else message(client.index)
                    posted.append((client, client.post(own)))
        return posted


def answers(posted: Posted) -> list[tuple[EngineClient, Message]]:
    """Return each engine's client and its reply; engines that are given up are left out.

    The first failure is raised at once.
    """
    found = []
    for client, request_id in posted:
        if client.lost is None:
            with client.loss_accepted():
                found.append((client, client.wait(request_id)))
    return found


def failures(posted: Posted) -> list[MultiNodeError]:
    """Wait for every reply, and return the errors of the requests that failed."""
    errors = []
    for client, request_id in posted:
        try:
            client.wait(request_id)
        except MultiNodeError as error:
            errors.append(error)
    return errors
