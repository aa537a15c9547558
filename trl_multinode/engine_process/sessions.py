"""Sessions of agents on an engine: limits, seeds, the record of their calls, and the ids of messages that come back.

This module does not import vLLM: the fake engine of the test kit has the same sessions.
"""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

from ..wire.marked import kill_processes_of
from ..wire.messages import (
    Call,
    Calls,
    CloseSession,
    Completions,
    Generate,
    OpenSession,
    pack_ids,
    unpack_ids,
)
from .backend import AgentApp, Growing, Refused

# Fields of a message by which it is found again. Agents drop others, such as its reasoning, or add some of their own
COMPARED = ("role", "content", "tool_calls", "tool_call_id", "name")
MOST_AFTER = 16  # tokens of a template from the end of a reply on; further ahead is another message
CALL: ContextVar["AgentCall"] = ContextVar("call")  # the call that the app answers in this task


class AgentSession:
    """Session of one agent: its limits, and the record of its calls.

    Args:
        opened ([`OpenSession`]):
            Request of the rank.
        owner (`object`):
            Connection of the rank; the session ends with it.
    """

    def __init__(self, opened: OpenSession, owner: object):
        self.opened = opened
        self.owner = owner
        self.calls: list[Call] = []
        self.num_begun = self.num_refused = self.num_cancelled = 0
        self.overridden: set[str] = set()
        self.under_way: set[asyncio.Task] = set()  # each answers one HTTP request
        self._turns: dict[bytes, Call] = {}  # by the digest of their messages, the reply included
        self._asked = Counter[bytes]()  # calls by their prompts

    def seed(self, prompt: bytes) -> int | None:
        """Return the seed of the next call with this prompt, whatever other calls the session has made before."""
        if self.opened.seed is None:
            return None
        self._asked[prompt] += 1
        source = hashlib.blake2b(prompt, digest_size=7)  # the seed fits into vLLM's int64
        source.update(f"{self.opened.seed} {self._asked[prompt]}".encode())
        return int.from_bytes(source.digest(), "big")

    def remember(self, body: Mapping[str, Any], reply: Mapping[str, Any], call: Call) -> None:
        """Keep a call by its conversation, which ends with the reply."""
        *_, digest = digests({**body, "messages": [*body["messages"], reply]})
        self._turns[digest] = call

    def longest_turn(self, body: Mapping[str, Any]) -> tuple[int, Call] | None:
        """Return the longest beginning of a chat request that ends with a recorded reply: messages, and the call."""
        for index, digest in reversed(list(enumerate(digests(body)))):
            if call := self._turns.get(digest):
                return index + 1, call
        return None

    async def close(self) -> Calls:
        """Cancel what is under way, and return the record."""
        for task in self.under_way:
            task.cancel()
        if self.under_way:
            await asyncio.wait(self.under_way)
        return Calls(
            calls=tuple(self.calls),
            num_refused=self.num_refused,
            num_cancelled=self.num_cancelled,
            overridden=tuple(sorted(self.overridden)),
        )


class AgentCall:
    """One call of an agent that the app answers.

    Args:
        session ([`AgentSession`]):
            Session of the call.
        body (`Mapping`):
            Checked body of the request, as the app gets it.
        limits (`Sequence[int]`):
            Limits of the tokens of the completion.
        sessions ([`AgentSessions`]):
            Sessions of the engine.

    Attributes:
        error ([`Refused`], *optional*):
            Reason why the call has no completion.
        made (`Call`, *optional*):
            The record of the call, once its completion is whole.
    """

    def __init__(
        self,
        session: AgentSession,
        body: Mapping[str, Any],
        limits: Sequence[int],
        sessions: "AgentSessions",
    ):
        self.session = session
        self.body = body
        self.error: Refused | None = None
        self.made: Call | None = None
        self._limits = limits
        self._sessions = sessions
        self._has_ended = False
        self._task: asyncio.Task | None = None

    async def outputs(self, rendered: Sequence[int], text: Mapping[str, Any]) -> AsyncIterator[Any]:
        """Generate the completion, and yield the backend's outputs; without a stream only the last one.

        The last output follows the record of the call, so that an agent that has read it finds its call recorded.

        Args:
            rendered (`Sequence[int]`):
                Token ids of the prompt as the app has made them.
            text (`Mapping`):
                The backend's keywords for the texts of the outputs.
        """
        if self._has_ended:  # vLLM's handler goes on when the agent has left before it generates
            raise Refused("EngineRefusedError", "the agent has left, or its session has ended")
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        last: list[Any] = []

        def take(output: Any) -> None:
            if last and self.body.get("stream"):
                outputs.put_nowait(last[0])
            last[:] = [output]

        def end(task: asyncio.Task) -> None:
            outputs.put_nowait(None)
            if not task.cancelled():
                task.exception()  # asyncio would log it once the agent has left

        growing = Growing(on_output=take, text=text)
        self._task = asyncio.create_task(self._complete(list(rendered), growing))
        self._task.add_done_callback(end)
        try:
            while (output := await outputs.get()) is not None:
                yield output
            await self._task
        except Refused as refused:
            self.error = refused
            raise
        finally:
            self._task.cancel()
        yield last[0]

    async def _complete(self, rendered: list[int], growing: Growing) -> None:
        opened = self.session.opened
        prompt, replaced = await self._with_recorded_ids(rendered)
        context = self._sessions.context()
        if len(prompt) >= context:
            raise Refused(
                "EngineRefusedError",
                f"the prompt has {len(prompt)} tokens, the context length is {context}",
            )
        packed = pack_ids(prompt)
        request = Generate(
            prompt=packed,
            num_completions=1,
            max_tokens=min(*self._limits, opened.max_tokens, context - len(prompt)),
            sampling=opened.sampling,
            seed=self.session.seed(packed),
            min_update=opened.min_update,
        )
        (completion,) = (await self._sessions.rows(request, growing)).rows
        self.made = Call(packed, completion, replaced)
        self.session.calls.append(self.made)

    async def _with_recorded_ids(self, rendered: list[int]) -> tuple[list[int], int]:
        """Return the prompt with the recorded ids of the replies that have come back, and their number.

        The messages up to the last such reply are rendered alone. If the prompt begins with them, the recorded ids
        take their place; the template's tokens after the end of the reply stay.
        """
        app = self._sessions.app
        found = self.session.longest_turn(self.body) if "messages" in self.body else None
        if found is None:
            return rendered, 0
        num_messages, call = found
        ids = ids_of(call)
        if rendered[: len(ids)] == ids:
            return rendered, 0
        try:
            before = await app.render(
                {**self.body, "messages": self.body["messages"][:num_messages]}
            )
        except Exception:  # a template may refuse a conversation that ends with a reply
            return rendered, 0
        end = after_the_reply(before, ids[-1], app.end_tokens)
        if end is None or rendered[: len(before)] != before:
            return rendered, 0
        return ids + rendered[end:], call.replaced + 1

    async def end(self) -> None:
        """Stop the generation, if it still runs, or let none begin; it counts as cancelled then."""
        self._has_ended = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})


class AgentSessions:
    """Sessions of an engine by their keys.

    Args:
        rows (`Callable[[Generate, Growing], Awaitable[Completions]]`):
            Function that generates as for a rank.
        context (`Callable[[], int]`):
            Function that returns the tokens that prompt and completion may have together.
        settle (`Callable[[], Awaitable[None]]`):
            Function that waits whether this process ends, before a failure is told.

    Attributes:
        app ([`AgentApp`]):
            App that answers the calls; it is there once a session is.
    """

    app: AgentApp

    def __init__(
        self,
        rows: Callable[[Generate, Growing], Awaitable[Completions]],
        context: Callable[[], int],
        settle: Callable[[], Awaitable[None]],
    ):
        self.rows = rows
        self.context = context
        self.settle = settle
        self._by_key: dict[str, AgentSession] = {}

    def find(self, key: str) -> AgentSession | None:
        """Return the open session with this key, if there is one."""
        return self._by_key.get(key)

    def open(self, request: OpenSession, owner: object) -> None:
        """Serve an agent from now on; raise `Refused` if the key is in use."""
        if request.key in self._by_key:
            raise Refused("EngineRefusedError", "a session with this key is open")
        self._by_key[request.key] = AgentSession(request, owner)

    async def close(self, request: CloseSession) -> Calls:
        """Close a session and return its record; raise `Refused` if it is not open."""
        session = self._by_key.pop(request.key, None)
        if session is None:
            raise Refused("EngineRefusedError", "no session with this key is open")
        return await session.close()

    async def close_all(self, owner: object = None) -> None:
        """Close the sessions of a connection that has ended, or all sessions, and kill what their agents have left: a
        rank does so itself, unless it was killed."""
        found = [key for key, one in self._by_key.items() if owner is None or one.owner is owner]
        for key in found:
            with suppress(Refused):  # another task has closed it
                await self.close(CloseSession(key=key))
        if found:
            await asyncio.to_thread(kill_processes_of, *found)

    def kill_processes(self) -> None:
        """Kill the processes of all open sessions, before this process ends at once."""
        kill_processes_of(*self._by_key)


def ids_of(call: Call) -> list[int]:
    """Return the token ids of a call's prompt and of what was sampled after it."""
    return [*unpack_ids(call.prompt).tolist(), *unpack_ids(call.completion.tokens).tolist()]


def digests(body: Mapping[str, Any]) -> list[bytes]:
    """Return a digest of each beginning of a chat request's messages, with the tools and what its template gets."""
    settings = [body.get("tools") or [], body.get("chat_template_kwargs") or {}]
    found = []
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16)
    for message in body["messages"]:
        digest.update(json.dumps(comparable(message), sort_keys=True).encode())
        found.append(digest.digest())
    return found


def comparable(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a message that identify it, in one form for all ways in which agents send them."""
    found = {key: message[key] for key in COMPARED if message.get(key)}
    content = found.get("content")
    if isinstance(content, list):
        found["content"] = "".join(part["text"] for part in content)
    if "tool_calls" in found:
        found["tool_calls"] = [comparable_tool_call(call) for call in found["tool_calls"]]
    return found


def comparable_tool_call(call: Mapping[str, Any]) -> list[Any]:
    """Return id, function and arguments of a tool call; agents may write its JSON anew."""
    function = call.get("function") or {}
    arguments: Any = function.get("arguments")
    with suppress(TypeError, ValueError, RecursionError):  # a model may write what is no JSON
        arguments = json.loads(arguments)
    return [call.get("id"), function.get("name"), arguments]


def after_the_reply(rendered: Sequence[int], last: int, stop: frozenset[int]) -> int | None:
    """Return the index in rendered messages after the text of their last reply; `None` if the template ends it with
    no token that ends a completion.

    Args:
        rendered (`Sequence[int]`):
            Token ids of messages that end with the reply.
        last (`int`):
            Last token that was sampled. If it ended the completion, the index is after this token; otherwise it is
            that of the token with which the template ends the reply.
        stop (`frozenset[int]`):
            Tokens that end a completion.
    """
    ends = {last} if last in stop else stop
    for index in reversed(range(max(0, len(rendered) - MOST_AFTER), len(rendered))):
        if rendered[index] in ends:
            return index + (last in stop)
    return None


async def why_forks(app: AgentApp) -> str:
    """Return why replies that come back do not get their recorded ids, as two turns show; empty if they do."""
    user = {"role": "user", "content": "1"}
    reply = {"role": "assistant", "content": "2"}
    try:
        first = await app.render({"messages": [user, reply]})
        second = await app.render({"messages": [user, reply, user]})
    except Exception as error:  # a template raises what it likes
        return f"the chat template fails ({type(error).__name__})"
    if second[: len(first)] != first:
        return "the chat template changes a reply when another message follows it"
    if not app.end_tokens & set(first):
        return "the chat template ends a reply with no token that ends a completion"
    return ""
