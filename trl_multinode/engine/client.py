"""A rank's client for one engine of its node: requests, replies, and the time of the engine's last message."""

import itertools
import os
import select
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from ..errors import EngineDiedError, EngineError, EngineStalledError, WeightVersionError
from ..wire.connection import Connection
from ..wire.messages import (
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
    unpack_spans,
)
from ..wire.process_end import ProcessReference


@dataclass(frozen=True)
class Rollout:
    """One completion, as an engine returned it."""

    tokens: np.ndarray  # int32 (T,)
    logprobs: np.ndarray  # float32 (T,), of the sampled tokens at their temperature, over the whole vocabulary
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
        connection (`Connection`):
            Connection to the engine's socket.
        index (`int`):
            Index of the engine on its node.
        rank (`int`), node (`int`):
            Numbers of the calling rank and its node.
        stall_timeout_s (`float`):
            Seconds without a token after which an engine with work counts as stalled. The total time has no limit.
        sent (`dict[int, int]`, *optional*):
            Optimizer step of every weight update that was sent to the engines of this rank, by the update's number;
            its owner adds to it. If it is empty, the client cannot check which versions exist.

    Raises:
        `EngineError`: if the engine does not answer.
    """

    def __init__(
        self,
        connection: Connection,
        index: int,
        rank: int,
        node: int,
        stall_timeout_s: float,
        sent: dict[int, int] | None = None,
    ):
        self._sent = {} if sent is None else sent
        self.index = index
        self.name = connection.name
        self.unanswered: dict[int, Message] = {}  # by request id
        self.last_work = time.monotonic()  # time of the last message from the engine, or of the first open request
        self._connection = connection
        self._where = f"Rank {rank} (node {node})"
        self._stall_timeout_s = stall_timeout_s
        self._ids = itertools.count(1)
        self._early: dict[int, Message] = {}  # replies that arrived before they were waited for
        ready = self.ask(Hello(rank=rank))
        assert isinstance(ready, Ready), ready
        self.ready = ready
        self.lost: EngineError | None = None  # why this engine serves this connection no more
        self._process = ProcessReference(ready.pid)  # a later process with the same pid must not be killed

    def lose(self, error: EngineError) -> None:
        """Give this engine up. A stalled one is killed, so that its owner starts it again; its owner gets the reason.

        All requests of this rank to it are lost.
        """
        if self.lost is not None:
            return
        self.lost = error
        self.unanswered.clear()
        self._early.clear()
        if isinstance(error, EngineStalledError) and self.ready.pid != os.getpid():  # else a thread of a test
            self._connection.explain_end(f"it stalled and was killed. {error}")
            self._process.kill()

    @property
    def has_ended(self) -> bool:
        """Return whether this engine is lost, or has closed the connection; without waiting."""
        if self.lost is not None:
            return True
        poll = select.poll()
        poll.register(self, select.POLLIN)
        return bool(poll.poll(0)) and self._connection.at_end()

    def fileno(self) -> int:
        """Return the connection's file descriptor, so that a selector can wait for the engine."""
        return self._connection.fileno()

    def post(self, message: Message) -> int:
        """Send a request without waiting for the reply, and return the request's id."""
        request_id = next(self._ids)
        if not self.unanswered:  # otherwise a rank that keeps posting would hide a stall
            self.last_work = time.monotonic()
        request = replace(message, request_id=request_id)
        self.unanswered[request_id] = request
        self._connection.send(request, self._stall_timeout_s)
        return request_id

    def receive(self) -> Message | None:
        """Wait for the next message; return it if it is a reply, and `None` if it only reports progress."""
        message = self._connection.receive(self._stall_timeout_s)
        self.last_work = time.monotonic()
        if isinstance(message, Progress):
            return None
        self.unanswered.pop(message.request_id, None)
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
        if reply.error is EngineDiedError:
            raise self._connection.ended(reply.message)
        raise reply.error(f"{self._where}: {self.name}: {reply.message}. Log: {self._connection.log_path}")

    def check_stall(self) -> None:
        """Raise `EngineStalledError` if the engine has work and has sent no message for too long."""
        if self.unanswered and time.monotonic() - self.last_work > self._stall_timeout_s:
            raise EngineStalledError(
                f"{self._where}: {self.name} made no token for {self._stall_timeout_s:.0f} s with "
                f"{len(self.unanswered)} requests open. Raise `engine_stall_timeout`, or see its log: "
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

    def post_score(self, tokens: Sequence[int], temperature: float = 1.0, images: tuple[Image, ...] = ()) -> int:
        """Request a score without waiting for it, and return the request's id."""
        return self.post(Score(prompt=pack_ids(tokens), temperature=temperature, images=images))

    def scored(self, request_id: int) -> Rollout:
        """Wait for the score that `post_score` requested, and return it."""
        return self.rows(self.wait(request_id))[0]

    def rows(self, reply: Message) -> list[Rollout]:
        """Return the completions of a reply.

        Raises:
            `WeightVersionError`: if their version spans are not those of updates that were sent.
        """
        assert isinstance(reply, Completions), reply
        ends = np.cumsum(unpack_ids(reply.lengths)).tolist()
        tokens, logprobs = unpack_ids(reply.tokens), unpack_floats(reply.logprobs)
        spans = unpack_spans(reply.span_counts, reply.spans)
        return [
            self._row(tokens[start:end], logprobs[start:end], versions)
            for (start, end), versions in zip(itertools.pairwise([0, *ends]), spans, strict=True)
        ]

    def _row(self, tokens: np.ndarray, logprobs: np.ndarray, versions: tuple[VersionSpan, ...]) -> Rollout:
        if wrong := wrong_spans(versions, len(tokens), self._sent):
            found = [(span.update, span.step, span.end) for span in versions]
            raise WeightVersionError(
                f"{self._where}: {self.name} returned {len(tokens)} tokens with the version spans {found} "
                f"(update, step, end): {wrong}. A run that "
                f"continued would correct for weights that did not sample the tokens. Log: {self._connection.log_path}"
            )
        return Rollout(tokens, logprobs, WeightVersion(versions[0].update, versions[0].step), self.index, versions)

    def shutdown(self, timeout_s: float) -> None:
        """Send `Shutdown` without waiting for the reply: the engine's owner waits for the process."""
        self._connection.send(Shutdown(request_id=next(self._ids)), timeout_s)

    def close(self) -> None:
        self._connection.close()
        self._process.close()


def wrong_spans(versions: Sequence[VersionSpan], num_tokens: int, sent: Mapping[int, int]) -> str | None:
    """Return what is wrong with a completion's version spans, `None` if nothing is.

    Args:
        sent (`Mapping[int, int]`):
            Optimizer step of every update that was sent, by its number; if empty, any version is accepted.
    """
    ends, updates = [span.end for span in versions], [span.update for span in versions]
    if not ends or ends[-1] != num_tokens:
        return "they do not cover the tokens"
    starts = [0, *ends[:-1]]
    if num_tokens and any(start >= end for start, end in zip(starts, ends, strict=True)):
        return "their ends do not rise"
    if any(later <= earlier for earlier, later in itertools.pairwise(updates)):
        return "their updates do not rise"
    if sent and (unknown := [span.update for span in versions if sent.get(span.update) != span.step]):
        return f"no update {unknown[0]} with that step was sent; the last one is {max(sent)} (step {sent[max(sent)]})"
    return None
