"""A rank's client for one engine: requests, replies, and the time of the engine's last message."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import psutil
from msgspec.structs import replace

from .. import errors
from ..errors import EngineDiedError, EngineError, EngineStalledError, WeightVersionError
from ..wire.connection import Connection
from ..wire.messages import (
    Completion,
    Completions,
    Failure,
    Hello,
    Image,
    Message,
    Progress,
    Ready,
    Score,
    Shutdown,
    VersionSpan,
    WeightVersion,
    pack_ids,
    unpack_floats,
    unpack_ids,
)

LOSSES = (EngineDiedError, EngineStalledError)  # errors after which an engine can be started again


@dataclass(frozen=True)
class EnginePlace:
    """Place of an engine.

    Args:
        node (`int`), index (`int`):
            Its node, and its index there.
        connect (`Callable[[float], Connection]`):
            Function that connects to it within a number of seconds.
        is_of_agent (`bool`, *optional*, defaults to `False`):
            An agent owns it, so that its loss is no loss of the run.
    """

    node: int
    index: int
    connect: Callable[[float], Connection]
    is_of_agent: bool = False


@dataclass(frozen=True)
class Rollout:
    """One completion, as an engine returned it."""

    tokens: np.ndarray  # int32 (T,)
    # float32 (T,), of the sampled tokens at their temperature, over the whole vocabulary
    logprobs: np.ndarray
    version: WeightVersion  # the weights that generated its first token
    engine: int  # index on the node
    versions: tuple[VersionSpan, ...] = ()  # the weights of all its tokens; by default `version`

    def __post_init__(self) -> None:
        if not self.versions:
            only = VersionSpan(self.version.update, self.version.step, len(self.tokens))
            object.__setattr__(self, "versions", (only,))


class EngineClient:
    """One rank's connection to one engine. Only one thread may use it at a time.

    ```python
    request = client.post(message)     # returns at once
    reply = client.wait(request)       # raises the error if the request failed; `ask` does both
    ```

    Args:
        place ([`EnginePlace`]):
            Place of the engine.
        index (`int`):
            Index among the engines of the rank, which for those of its node is the one there.
        rank (`int`), node (`int`):
            Numbers of the calling rank and its node.
        stall_timeout_s (`float`):
            Seconds without a token after which an engine with work counts as stalled. The total time has no limit.
        sent (`dict[int, int]`):
            Optimizer step of every weight update that was sent to the engines of this rank, by the update's number;
            its owner adds to it. If it is empty, the client cannot check which versions exist.
        tolerant (`bool`):
            Give an engine up that died or stalled, instead of raising its error: its owner starts it again. The
            engines of agents are always given up.
        timeout_s (`float`, *optional*, defaults to 30.0):
            Deadline for connecting, in seconds.

    Attributes:
        is_near (`bool`):
            The engine is one of the rank's node, where its pid names its process.

    Raises:
        `EngineError`: if the engine does not answer.
    """

    def __init__(
        self,
        place: EnginePlace,
        index: int,
        rank: int,
        node: int,
        stall_timeout_s: float,
        sent: dict[int, int],
        tolerant: bool,
        timeout_s: float = 30.0,
    ):
        self._sent = sent
        self.place = place
        self.is_near = place.node == node
        self.tolerant = tolerant or place.is_of_agent
        self.index = index
        self._connection = place.connect(timeout_s)
        self.name = self._connection.name
        self.unanswered: set[int] = set()  # request ids
        # time of the last message from the engine, or of the first open request
        self.last_work = time.monotonic()
        self._where = f"Rank {rank} (node {node})"
        self._stall_timeout_s = stall_timeout_s
        self._ids = itertools.count(1)
        self._early: dict[int, Message] = {}  # replies that arrived before they were waited for
        ready = self.ask(Hello())
        assert isinstance(ready, Ready), ready
        self.ready = ready
        self.lost: EngineError | None = None  # why this engine serves this connection no more
        self.leaves = False  # it gets no new rows
        self._process: psutil.Process | None = None
        if self.is_near:  # elsewhere the pid is that of another process
            with suppress(psutil.NoSuchProcess):  # it has ended since it answered
                # refuses to kill a later process with the same pid
                self._process = psutil.Process(ready.pid)

    def lose(self, error: EngineError) -> None:
        """Give this engine up. All requests of this rank to it are lost.

        A stalled one of this node is killed, so that its owner starts it again; its owner gets the reason. To one of
        another node the connection is closed, so that it cancels the requests.
        """
        if self.lost is not None:
            return
        self.lost = error
        self.unanswered.clear()
        self._early.clear()
        if not self.is_near:
            self._connection.close()
        elif isinstance(error, EngineStalledError):
            self._connection.explain_end(f"it stalled and was killed. {error}")
            with suppress(psutil.NoSuchProcess):
                if self._process is not None:
                    self._process.kill()

    @contextmanager
    def loss_accepted(self) -> Iterator[None]:
        """Give this engine up if it dies or stalls inside; raise its error if it is not started again."""
        try:
            yield
        except LOSSES as error:
            if not self.tolerant:
                raise
            self.lose(error)

    @property
    def has_ended(self) -> bool:
        """Return whether this engine is lost, or has closed the connection; without waiting."""
        return self.lost is not None or self._connection.at_end()

    def fileno(self) -> int:
        """Return the connection's file descriptor, so that a selector can wait for the engine."""
        return self._connection.fileno()

    def post(self, message: Message) -> int:
        """Send a request without waiting for the reply, and return the request's id."""
        request_id = next(self._ids)
        if not self.unanswered:  # otherwise a rank that keeps posting would hide a stall
            self.last_work = time.monotonic()
        self.unanswered.add(request_id)
        self._connection.send(replace(message, request_id=request_id), self._stall_timeout_s)
        return request_id

    def receive(self) -> Message | None:
        """Wait for the next message; return it if it is a reply, and `None` if it only reports progress."""
        message = self._connection.receive(self._stall_timeout_s)
        self.last_work = time.monotonic()
        if isinstance(message, Progress):
            return None
        self.unanswered.discard(message.request_id)
        return message

    def keep(self, reply: Message) -> None:
        """Store a reply that arrived early."""
        self._early[reply.request_id] = reply

    def wait(self, request_id: int) -> Message:
        """Wait for the reply to `request_id` and return it.

        Raises:
            `EngineError` (or the class that the engine names): if the request failed.
        """
        while (reply := self._early.pop(request_id, None)) is None:
            if (message := self.receive()) is not None:
                self.keep(message)
        return self.checked(reply)

    def ask(self, message: Message) -> Message:
        return self.wait(self.post(message))

    def checked(self, reply: Message) -> Message:
        """Return a reply; raise the error if it is a `Failure`."""
        if not isinstance(reply, Failure):
            return reply
        if reply.error == "EngineDiedError":
            raise self._connection.ended(reply.message)
        raise getattr(errors, reply.error)(
            f"{self._where}: {self.name}: {reply.message}. Log: {self._connection.log_path}"
        )

    def check_stall(self) -> None:
        """Raise `EngineStalledError` if the engine has work and has sent no message for too long."""
        if self.unanswered:
            self.check_progress(self.last_work, len(self.unanswered))

    def check_progress(self, since: float, num_open: int) -> None:
        """Raise `EngineStalledError` if the engine has made no progress since a time, with so many requests open."""
        if time.monotonic() - since > self._stall_timeout_s:
            raise EngineStalledError(
                f"{self._where}: {self.name} made no progress for {self._stall_timeout_s:.0f} s with "
                f"{num_open} requests open. Raise `engine_stall_timeout`, or see its log: "
                f"{self._connection.log_path}"
            )

    def check_version(self, got: WeightVersion, expected: WeightVersion) -> None:
        """Raise `WeightVersionError` unless the engine's reply comes from exactly the expected weights."""
        if got.update != expected.update:
            raise WeightVersionError(
                f"{self.name} has the weights of {got}, expected {expected}: its workers did not load the last "
                "update. See the engine's log; a run that continued would train on completions of an older policy."
            )

    def score(self, tokens: Sequence[int], temperature: float = 1.0) -> Rollout:
        """Return the log-probs of `tokens[1:]` under the engine's current weights, of logits / `temperature`."""
        return self.scored(self.post_score(tokens, temperature))

    def post_score(
        self,
        tokens: Sequence[int],
        temperature: float = 1.0,
        images: tuple[Image, ...] = (),
        min_update: int = 0,
    ) -> int:
        """Request a score without waiting for it, and return the request's id."""
        return self.post(
            Score(
                prompt=pack_ids(tokens),
                temperature=temperature,
                images=images,
                min_update=min_update,
            )
        )

    def scored(self, request_id: int) -> Rollout:
        """Wait for the score that `post_score` requested, and return it."""
        return self.rows(self.wait(request_id))[0]

    def rows(self, reply: Message) -> list[Rollout]:
        """Return the completions of a reply.

        Raises:
            `WeightVersionError`: if their version spans are not those of updates that were sent.
        """
        assert isinstance(reply, Completions), reply
        return [self.row(completion) for completion in reply.rows]

    def row(self, completion: Completion) -> Rollout:
        """Return a completion; raise `WeightVersionError` if its version spans are wrong."""
        tokens = unpack_ids(completion.tokens)
        versions = completion.versions
        if wrong := wrong_spans(versions, len(tokens), self._sent):
            found = [(span.update, span.step, span.end) for span in versions]
            raise WeightVersionError(
                f"{self._where}: {self.name} returned {len(tokens)} tokens with the version spans {found} "
                f"(update, step, end): {wrong}. A run that "
                f"continued would correct for weights that did not sample the tokens. Log: {self._connection.log_path}"
            )
        first = WeightVersion(versions[0].update, versions[0].step)
        return Rollout(tokens, unpack_floats(completion.logprobs), first, self.index, versions)

    def shutdown(self, timeout_s: float) -> None:
        """Send `Shutdown` without waiting for the reply: the engine's owner waits for the process."""
        self._connection.send(Shutdown(request_id=next(self._ids)), timeout_s)

    def close(self) -> None:
        self._connection.close()


def wrong_spans(
    versions: Sequence[VersionSpan], num_tokens: int, sent: Mapping[int, int]
) -> str | None:
    """Return what is wrong with a completion's version spans, `None` if nothing is.

    Args:
        sent (`Mapping[int, int]`):
            Optimizer step of every update that was sent, by its number; if empty, any version is accepted.
    """
    if not versions or versions[-1].end != num_tokens:
        return "they do not cover the tokens"
    if num_tokens and not _rises([0, *(span.end for span in versions)]):
        return "their ends do not rise"
    if not _rises(span.update for span in versions):
        return "their updates do not rise"
    return _never_sent(versions, sent) if sent else None


def _never_sent(versions: Sequence[VersionSpan], sent: Mapping[int, int]) -> str | None:
    for span in versions:
        if sent.get(span.update) != span.step:
            last = max(sent)
            return f"no update {span.update} with that step was sent; the last one is {last} (step {sent[last]})"
    return None


def _rises(numbers: Iterable[int]) -> bool:
    return all(earlier < later for earlier, later in itertools.pairwise(numbers))
