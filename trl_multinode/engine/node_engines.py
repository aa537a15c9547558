"""A rank's clients for all engines of its node: completions, and (on the local main process) weight updates.

Nothing in here is a collective: a rank communicates with the engines of its own node only.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import overload

from ..errors import EngineError, MultiNodeError
from ..wire.connection import Connection
from ..wire.messages import Generate, Message, WeightVersion
from .client import EngineClient, Rollout
from .dispatch import Dispatch, EngineLoad, PromptRequest
from .row_stream import RowStream


class PendingReplies:
    """Replies to requests that were sent to every engine of a node.

    Args:
        requests (`list[tuple[EngineClient, int]]`):
            Each engine's client and the id of its request.
    """

    def __init__(self, requests: list[tuple[EngineClient, int]]):
        self._requests = requests

    def wait(self) -> list[Message]:
        """Return the replies in the engines' order; raise the first failure at once."""
        return [client.wait(request_id) for client, request_id in self._requests]

    def failures(self) -> list[MultiNodeError]:
        """Wait for every reply, and return the errors of the requests that failed."""
        errors = []
        for client, request_id in self._requests:
            try:
                client.wait(request_id)
            except MultiNodeError as error:
                errors.append(error)
        return errors


class NodeEngines(Sequence[EngineClient]):
    """A rank's clients for the engines of its node, by their index.

    Args:
        sockets (`Sequence[Path]`):
            Unix sockets, one per engine.
        node (`int`), rank (`int`):
            Numbers of the calling rank and its node, for error messages.
        load (`Path`):
            File of the node's [`EngineLoad`].
        stall_timeout_s (`float`):
            Seconds without a token after which an engine with work counts as stalled. The total time has no limit.
        window (`int`):
            Rows that this rank keeps in flight per engine if the node has several. Further rows wait in the rank, so
            that they go to the engine that has room first.
        log_folder (`Path`):
            Folder of the engines' logs, for error messages.
        sent (`dict[int, int]`, *optional*):
            Optimizer step of every weight update that was sent, by its number; shared with other clients of this rank.
    """

    def __init__(
        self,
        sockets: Sequence[Path],
        node: int,
        rank: int,
        load: Path,
        stall_timeout_s: float,
        window: int,
        log_folder: Path,
        sent: dict[int, int] | None = None,
    ):
        self._arguments = (sockets, node, rank, load, stall_timeout_s, window, log_folder)
        self._sent = {} if sent is None else sent
        self._window = window
        self._load = EngineLoad(load, len(sockets))
        self._dispatch: Dispatch | RowStream | None = None  # the running `generate`, or the open stream
        connections = [
            Connection(str(path), f"engine {i} of node {node}", log_folder / f"engine{i}.log")
            for i, path in enumerate(sockets)
        ]
        self._clients = [
            EngineClient(c, i, rank, node, stall_timeout_s, self._sent) for i, c in enumerate(connections)
        ]

    def connect_again(self) -> "NodeEngines":
        """Return further connections of this rank to the same engines, for use by another thread."""
        return NodeEngines(*self._arguments, sent=self._sent)

    def expect(self, version: WeightVersion) -> None:
        """Accept completions of `version` from now on. Every rank calls it before its part in sending these weights;
        once it was called, completions of other versions raise `WeightVersionError`."""
        self._sent[version.update] = version.step

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

    @property
    def max_model_len(self) -> int:
        """Context length that every engine has, in tokens."""
        return min(client.ready.max_model_len for client in self)

    @property
    def rows_left(self) -> int:
        """Number of completions for which the running `generate` or the open stream waits. Any thread may read it."""
        dispatch = self._dispatch
        return 0 if dispatch is None else dispatch.rows_left

    def post_all(self, message: Message | Callable[[int], Message]) -> PendingReplies:
        """Send a message to every engine without waiting; a function returns the message for an engine's index."""
        return PendingReplies([(client, client.post(_for(client, message))) for client in self])

    def ask_all(self, message: Message) -> list[Message]:
        """Send the same message to every engine, and return the replies in the engines' order."""
        return self.post_all(message).wait()

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
        message = Generate(
            prompt=b"", num_completions=1, max_tokens=max_tokens, sampling=sampling, min_update=min_update
        )
        with Dispatch(self, self._load, self._window, requests, message) as dispatch:
            self._dispatch = dispatch
            try:
                return dispatch.run()
            finally:
                self._dispatch = None

    def open_stream(self, max_tokens: int, sampling: dict) -> RowStream:
        """Return a stream of single rows, which from now on is the only user of these connections.

        Args:
            max_tokens (`int`):
                Limit for a completion, in tokens.
            sampling (`dict`):
                Keywords of vLLM's `SamplingParams`.
        """
        message = Generate(prompt=b"", num_completions=1, max_tokens=max_tokens, sampling=sampling)
        self._dispatch = stream = RowStream(self, self._load, self._window, message)
        return stream

    def shutdown(self, timeout_s: float) -> None:
        """Send `Shutdown` to every engine without waiting for the reply: its owner waits for the process."""
        for client in self:
            with suppress(EngineError):  # the engine has ended, or hangs
                client.shutdown(timeout_s)

    def close(self) -> None:
        if isinstance(self._dispatch, RowStream) and self._dispatch.rows_left == 0:  # otherwise a thread uses it
            self._dispatch.close()
        for client in self:
            client.close()
        self._load.close()


def _for(client: EngineClient, message: Message | Callable[[int], Message]) -> Message:
    return message if isinstance(message, Message) else message(client.index)
