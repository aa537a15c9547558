"""HTTP calls of agents: the server on the loopback address, keys, limits, and the settings that a call may have."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Generator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

from ..wire.messages import Endpoint, ErrorName, OpenSession, Serving
from .backend import Backend, Refused
from .sessions import CALL, AgentCall, AgentSession, AgentSessions, why_forks

Send = Callable[[Mapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

CHAT = "/v1/chat/completions"
ROUTES = {CHAT: "POST", "/v1/completions": "POST", "/v1/models": "GET"}
MAX_BODY_BYTES = 16 * 2**20
STOP_S = 5.0  # longest wait for the server's end
KEEP_ALIVE_S = 3600  # an agent's connection, which ends with its process
STATUS: dict[ErrorName, int] = {"EngineLeavingError": 503, "EngineRefusedError": 400}  # else 500

LIMITS = ("max_tokens", "max_completion_tokens")
PASSED = {
    *("model", "stream", "stream_options", *LIMITS),
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"),
    *("prompt", "logprobs", "top_logprobs"),
}
IGNORED = {"user", "metadata", "store"}
OVERRIDDEN = {
    *("temperature", "top_p", "top_k", "min_p", "seed", "reasoning_effort"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
}
# values of other settings that change nothing, besides `None`
NEUTRAL: dict[str, tuple] = {
    "n": (1,),
    "best_of": (1,),
    "stop": ([], ""),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "echo": (False,),
    "suffix": ("",),
}


class CallError(Exception):
    """Error of a call, as OpenAI's clients read it.

    Args:
        status (`int`):
            HTTP status.
        message (`str`):
            Cause and cure.
        param (`str`, *optional*):
            Key of the body that is wrong.
    """

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status = status
        self.param = param


def checked_body(raw: bytes, is_chat: bool, model: str) -> tuple[dict[str, Any], set[str]]:
    """Return the body of a call with the settings that the endpoint serves, and the names of those that it overrides.

    Args:
        raw (`bytes`):
            Body as the agent sent it.
        is_chat (`bool`):
            The call is for a chat completion.
        model (`str`):
            Name of the model that is served; agents may use any.

    Raises:
        `CallError`: if the body is no JSON object, or has a setting that would change what is sampled.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise CallError(400, "the body must be a JSON object")
    passed, overridden = settings_of(body)
    if passed.get("tool_choice", "auto") not in ("auto", "none"):
        raise CallError(400, "tool_choice must be auto or none", "tool_choice")
    check_numbers(passed)
    if is_chat:
        check_messages(passed.get("messages"))
    else:
        check_prompt(passed.get("prompt"))
        passed.setdefault("max_tokens", 16)  # as of OpenAI's API
    return passed | {"model": model}, overridden


def check_numbers(passed: dict[str, Any]) -> None:
    """Check the numbers of tokens and of log-probs."""
    for key in passed.keys() & {"logprobs", "top_logprobs"}:
        if passed[key] not in (0, 1):  # `True` is one
            raise CallError(400, f"{key} must be at most 1: only sampled tokens have one", key)
        if passed[key] is not True:
            passed[key] = 0
    for key in passed.keys() & LIMITS:
        if type(passed[key]) is not int or passed[key] < 1:
            raise CallError(400, f"{key} must be an integer above 0", key)


def settings_of(body: Mapping[str, Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the settings of a call that pass, and the names of those that the trainer's replace; refuse others."""
    passed = {}
    overridden = set()
    for key, value in body.items():
        if value is None or key in IGNORED or value in NEUTRAL.get(key, ()):
            continue
        if key in OVERRIDDEN:
            overridden.add(key)
        elif key in PASSED:
            passed[key] = value
        else:
            reason = "the trainer samples from the model as it is, one completion a call"
            raise CallError(400, f"this endpoint does not serve {key}: {reason}", key)
    return passed, overridden


def check_messages(messages: Any) -> None:
    """Check that the messages of a chat hold only text; a URL in them is never opened."""
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise CallError(400, "messages must be a list of objects", "messages")
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            is_text = isinstance(part, dict) and part.get("type") == "text"
            if not is_text or set(part) != {"type", "text"} or not isinstance(part["text"], str):
                raise CallError(400, "this endpoint serves only parts of type text", "messages")


def check_prompt(prompt: Any) -> None:
    """Check that a completion has one prompt."""
    is_ids = isinstance(prompt, list) and all(
        type(token) is int and 0 <= token < 2**31 for token in prompt
    )
    if not prompt or not (isinstance(prompt, str) or is_ids):
        raise CallError(400, "prompt must be one string, or one list of token ids", "prompt")


class Reply:
    """Response of one call on its way to the agent.

    It is held back until its first bytes, so that an error of the generation becomes one of HTTP.

    Args:
        session ([`AgentSession`], *optional*):
            Session that counts refusals.
        receive (`Callable`), send (`Callable`):
            ASGI's functions.

    Attributes:
        call ([`AgentCall`], *optional*):
            Call that it answers.
        was_cut (`bool`):
            The agent has left, or its session has ended, before the app was done.
    """

    def __init__(self, session: AgentSession | None, receive: Receive, send: Send):
        self.call: AgentCall | None = None
        self.was_cut = False
        self.receive = receive
        self._session = session
        self._send = send
        self._start: Mapping[str, Any] | None = None  # held back
        self._has_started = False
        self._message = ReplyMessage()

    async def send(self, message: Mapping[str, Any]) -> None:
        """Send on what the app sends, and keep the reply of a chat."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        call = self.call
        if self._start is not None:
            if call is not None and call.error is not None:
                return  # `fail` sends it
            if 400 <= self._start["status"] < 500 and self._session is not None:
                self._session.num_refused += 1
            self._has_started = True
            await self._send(self._start)
            self._start = None
        if call is not None and "messages" in call.body:
            found = self._message.add(message.get("body", b""))
            if found is not None and call.made is not None:
                call.session.remember(call.body, found, call.made)
        await self._send(message)

    async def fail(self, error: CallError) -> None:
        """Send an error, unless the response has begun; OpenAI's clients do not repeat such a call."""
        from starlette.responses import JSONResponse

        if self._has_started:
            return
        text = {
            "message": str(error),
            "type": "invalid_request_error" if error.status < 500 else "server_error",
            "param": error.param,
            "code": error.status,
        }
        self.call = None  # which would hold the response back
        response = JSONResponse({"error": text}, error.status, {"x-should-retry": "false"})
        await response({"type": "http"}, self.receive, self.send)


class ReplyMessage:
    """Message of a chat completion, read from the bytes of the response."""

    def __init__(self) -> None:
        self._bytes = b""
        self._stream: Any = None

    def add(self, data: bytes) -> dict[str, Any] | None:
        """Read further bytes of the response, a JSON object or events that each have one; return a whole message."""
        self._bytes += data
        if self._bytes.startswith((b"data:", b":")):
            return self._add_events()
        with suppress(ValueError, LookupError):  # incomplete, or an error
            return json.loads(self._bytes)["choices"][0]["message"]
        return None

    def _add_events(self) -> dict[str, Any] | None:
        from openai.lib.streaming.chat import ChatCompletionStreamState
        from openai.types.chat import ChatCompletionChunk

        self._stream = self._stream or ChatCompletionStreamState()
        *events, self._bytes = self._bytes.split(b"\n\n")
        for event in events:
            with suppress(ValueError, LookupError):  # the end of the stream, or a comment
                chunk = ChatCompletionChunk.model_validate_json(event.removeprefix(b"data:"))
                self._stream.handle_chunk(chunk)
                choice = self._stream.current_completion_snapshot.choices[0]
                if choice.finish_reason is not None:
                    return choice.message.to_dict()
        return None


class AgentCalls:
    """ASGI application in front of the backend's: it maps keys to sessions, and checks what a call asks for.

    Args:
        sessions ([`AgentSessions`]):
            Sessions with their app.
    """

    def __init__(self, sessions: AgentSessions):
        self._sessions = sessions

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        key = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        session = self._sessions.find(key.removeprefix("Bearer "))
        reply = Reply(session, receive, send)
        if session is None:
            await reply.fail(CallError(401, "the API key is not that of an open session"))
            return
        work = asyncio.create_task(self._answer(session, scope, reply))
        session.under_way.add(work)
        try:
            await asyncio.wait({work})
            if work.cancelled():
                raise CallError(503, "the session has ended")
            work.result()
        except CallError as error:
            await reply.fail(error)
        except Exception as error:
            await self._sessions.settle()
            print(f"a call of an agent failed: {type(error).__name__}", flush=True)
            await reply.fail(CallError(500, "the engine failed to answer"))
        finally:
            work.cancel()
            session.under_way.discard(work)

    async def _answer(self, session: AgentSession, scope: Mapping[str, Any], reply: Reply) -> None:
        path = scope["path"]
        if path not in ROUTES:
            raise CallError(404, f"this endpoint serves {', '.join(ROUTES)}")
        if scope["method"] != ROUTES[path]:
            raise CallError(405, f"{path} wants {ROUTES[path]}")
        if scope["method"] == "GET":
            await self._run_app(scope, b"", reply)
            return
        body, overridden = checked_body(
            await read_body(reply.receive), path == CHAT, self._sessions.app.model
        )
        if session.num_begun >= session.opened.max_calls:
            # not 429, after which many clients would try again for minutes
            raise CallError(403, f"the session has made its {session.num_begun} calls")
        session.num_begun += 1
        session.overridden |= overridden
        limits = [body.pop(key) for key in LIMITS if key in body]
        body["max_tokens"] = 1  # the app would refuse what exceeds the rest of the context
        reply.call = call = AgentCall(session, body, limits, self._sessions)
        CALL.set(call)
        try:
            await self._run_app(scope, json.dumps(body).encode(), reply)
        except Exception:
            if call.error is None:  # else the app only passes it on
                raise
        finally:
            await call.end()
            if reply.was_cut and call.made is None:
                session.num_cancelled += 1
        if call.error is not None:
            raise CallError(STATUS.get(call.error.error, 500), str(call.error))

    async def _run_app(self, scope: Mapping[str, Any], body: bytes, reply: Reply) -> None:
        """Let the app answer; end it if the agent disconnects."""
        # vLLM reads headers for priorities, ids and traces, which are none of an agent's business
        headers = [(b"content-type", b"application/json")]
        inner = {**scope, "headers": headers, "query_string": b""}
        bodies = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.create_task(disconnected(reply.receive))

        async def receive_once() -> MutableMapping[str, Any]:
            if bodies:
                return bodies.pop()
            await asyncio.wait({gone})
            return {"type": "http.disconnect"}

        app = asyncio.ensure_future(self._sessions.app.asgi(inner, receive_once, reply.send))
        try:
            await asyncio.wait({app, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reply.was_cut = not app.done()
            gone.cancel()
            app.cancel()
            await asyncio.wait({app, gone})
        if not app.cancelled():
            app.result()


async def read_body(receive: Receive) -> bytes:
    """Return the body of a request; raise `CallError` if it is too long."""
    body = bytearray()
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_BODY_BYTES:
            raise CallError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


async def disconnected(receive: Receive) -> None:
    """Return when the agent has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


class AgentEndpoint:
    """HTTP server of an engine for agents; it listens from the first session on.

    Args:
        sessions ([`AgentSessions`]):
            Sessions that it serves.
        backend ([`Backend`]):
            Backend that has the app.
    """

    def __init__(self, sessions: AgentSessions, backend: Backend):
        self._sessions = sessions
        self._backend = backend
        self._starting = asyncio.Lock()
        self._serving: Serving | None = None
        self._endpoint = Endpoint(port=0, model="")
        self._server: Any = None
        self._task: asyncio.Task | None = None

    async def open(self, request: OpenSession, owner: object) -> Endpoint:
        """Open a session; raise `Refused` if its settings are not those of the sessions before."""
        async with self._starting:
            if self._serving is None:
                await self._start(request.serving)
            elif request.serving != self._serving:
                raise Refused(
                    "EngineRefusedError",
                    f"the endpoint serves with {self._serving}; a session wants {request.serving}",
                )
        self._sessions.open(request, owner)
        return self._endpoint

    async def _start(self, serving: Serving) -> None:
        import uvicorn

        class Server(uvicorn.Server):
            @contextmanager
            def capture_signals(self) -> Generator[None, None, None]:
                yield  # signals are the engine's

        app = self._sessions.app = await self._backend.agent_app(serving)
        listener = socket.create_server(("127.0.0.1", 0))
        settings = uvicorn.Config(
            AgentCalls(self._sessions),
            http="h11",
            # by default 5 s, as in httpx: a call after a tool of 5 s would meet a connection that is being closed
            timeout_keep_alive=KEEP_ALIVE_S,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
        )
        self._server = Server(settings)
        self._task = asyncio.create_task(self._server.serve([listener]))
        self._endpoint = Endpoint(
            port=listener.getsockname()[1], model=app.model, forks_because=await why_forks(app)
        )
        self._serving = serving

    async def stop(self) -> None:
        """Close all sessions, and stop to listen."""
        await self._sessions.close_all()
        if self._task is not None:
            self._server.should_exit = self._server.force_exit = True
            await asyncio.wait({self._task}, timeout=STOP_S)
