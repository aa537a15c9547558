"""Contract between the engine's server and the model behind it: vLLM, or the test kit's fake."""

import asyncio
from abc import ABC, abstractmethod
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..wire.messages import (
    Completion,
    ErrorName,
    Generate,
    OpenSlots,
    Ready,
    Score,
    Serving,
    UpdateWeights,
    VersionSpan,
    WeightVersion,
)


class CompletionBuffer:
    """One completion, packed while it grows: packing all of it after its last token made ranks wait 5 times as long.

    Args:
        tokens (`Sequence[int]`), logprobs (`Sequence[float]`):
            Ids and log-probs of the sampled tokens, each `(T,)`.

    Attributes:
        complete (`bool`):
            True when no token follows the row's last one, so that the reply to its request follows.
        made (`int`):
            Tokens that the model has made, of which this process may not have read all yet.
    """

    def __init__(self, tokens: Sequence[int] = (), logprobs: Sequence[float] = ()):
        self.complete = False
        self.made = 0
        self.tokens = array("i", tokens)
        self.logprobs = array("f", logprobs)
        # first token after each swap, and the weights from there on
        self._swaps: list[tuple[int, WeightVersion]] = []

    def grow(self, tokens: list[int], logprobs: list[float], start: int | None = None) -> int:
        """Append the lists from index `start` on, and return how many tokens that is. By default the lists hold the
        whole row, of which the new end is appended."""
        if start is None:
            start = len(self.tokens)
        self.tokens.fromlist(tokens[start:])
        self.logprobs.fromlist(logprobs[start : len(tokens)])
        return len(tokens) - start

    def swap(self, at: int, version: WeightVersion) -> None:
        """Record that the tokens from index `at` on have the weights of `version`."""
        self._swaps.append((at, version))

    def spans(self, first: WeightVersion) -> tuple[VersionSpan, ...]:
        """Return the weights that sampled each token; those of the tokens before the first swap are `first`.

        A swap after the last token leaves no span: a stop string may cut off tokens that vLLM had made before it.
        """
        starts = [(0, first), *self._swaps]
        ends = [*(min(at, len(self.tokens)) for at, _ in self._swaps), len(self.tokens)]
        found = [
            VersionSpan(version.update, version.step, end)
            for (start, version), end in zip(starts, ends, strict=True)
            if start < end
        ]
        return tuple(found) or (VersionSpan(first.update, first.step, 0),)

    def copy(self) -> "CompletionBuffer":
        """Return a copy while another thread may append to this row: the log-prob of a token follows the token."""
        count = len(self.logprobs)
        found = CompletionBuffer(self.tokens[:count], self.logprobs[:count])
        found._swaps = list(self._swaps)
        return found

    def packed(self, first: WeightVersion, request_id: int = 0) -> Completion:
        """Return the completion as a rank receives it; `first` are the weights of its first token."""
        return Completion(
            self.tokens.tobytes(), self.logprobs.tobytes(), self.spans(first), request_id
        )


@dataclass
class Growing:
    """Completions of one request while they grow. The backend sets `rows` and calls `end_row`."""

    rows: Sequence[CompletionBuffer] = ()
    first: WeightVersion = WeightVersion()  # weights of the first token
    # counts a completion as complete; the end of the request counts those that are left
    end_row: Callable[[], None] = lambda: None
    # The app that answers agents reads the backend's own outputs, with texts as these keywords of the backend say
    on_output: Callable[[Any], None] = lambda output: None
    text: Mapping[str, Any] = field(default_factory=dict)
    task: asyncio.Task = field(init=False)  # sends the reply


@dataclass(frozen=True)
class AgentApp:
    """App that answers the HTTP calls of agents.

    Args:
        asgi (`Callable`):
            ASGI application with OpenAI's chat completions, completions and models. It generates through
            [`AgentCall.outputs`] of the call under way.
        model (`str`):
            Name of the model that it serves.
        render (`Callable[[Mapping], Awaitable[list[int]]]`):
            Function that returns the token ids of the messages of a chat request, without the beginning of a reply.
        end_tokens (`frozenset[int]`):
            Tokens that end a completion.
    """

    asgi: Callable[..., Awaitable[None]]
    model: str
    render: Callable[[Mapping[str, Any]], Awaitable[list[int]]]
    end_tokens: frozenset[int]


class Refused(Exception):
    """Refusal of one request; the backend can still serve others.

    Args:
        error (`ErrorName`):
            Error that the reply raises in the rank.
        message (`str`):
            Cause and cure.
    """

    def __init__(self, error: ErrorName, message: str):
        super().__init__(message)
        self.error = error


class Backend(ABC):
    """Model behind the server. All methods run on the event loop of the engine process; none may block it.

    An update is `begin_update`, `load_buckets`, `commit_update` and `resume`. Until `resume` the server starts no
    `generate` or `score`. No `score` is running when an update begins, and no `generate` unless the update is in
    flight. If an update fails, the server cancels every `generate` and does not call `resume`.

    Attributes:
        load_s (`float`):
            Seconds that the slowest worker took for the buckets of the last committed update, without its waits.
    """

    load_s = 0.0

    @abstractmethod
    async def start(self) -> None:
        """Start the engine; on return it can serve."""

    @abstractmethod
    def ready(self) -> Ready: ...

    @abstractmethod
    def tokens_done(self) -> int:
        """Return the completion tokens since the start; the number grows while the engine works."""

    @abstractmethod
    async def generate(self, request: Generate, growing: Growing) -> None:
        """Make the completions as `growing.rows`; raise `Refused` if the request cannot be served."""

    async def agent_app(self, serving: Serving) -> AgentApp:
        """Build the app that answers agents; raise `Refused` if the settings cannot be served."""
        raise Refused("EngineRefusedError", "this engine serves no agents")

    @abstractmethod
    async def score(self, request: Score) -> CompletionBuffer:
        """Return the log-probs of `prompt[1:]` at the request's temperature over the whole vocabulary."""

    @abstractmethod
    async def open_slots(self, request: OpenSlots) -> None:
        """Open the slots; on return every worker has opened them."""

    @abstractmethod
    async def check_slot(self, slot: int, num_bytes: int) -> list[int]:
        """Return each worker's CRC-32 of the slot's first bytes."""

    @abstractmethod
    async def begin_update(self, update: UpdateWeights) -> None:
        """Prepare for the buckets from `update.first_bucket` on; weights of earlier buckets stay as they are.

        If the update is in flight, freeze every `generate`; on return none of them makes a token."""

    @abstractmethod
    async def load_buckets(self, update: UpdateWeights) -> None:
        """Load all buckets; on return every worker has copied them out of their slots.

        Raises:
            `Exception`: of any class, if the sender ends before the last bucket.
        """

    @abstractmethod
    async def commit_update(self) -> list[WeightVersion]:
        """Replace the weights, adapters included; return the version that each worker has committed."""

    async def resume(self, version: WeightVersion) -> None:
        """Serve with the committed weights; frozen completions go on, and record the swap at their current length."""

    async def take_kv_use(self) -> float:
        """Return the greatest share of the key-value cache that was in use since the last call; 0: unknown."""
        return 0.0

    @abstractmethod
    async def stop(self) -> None: ...
