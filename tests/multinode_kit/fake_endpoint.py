"""App for agents of the fake engine: chats by the tokenizer's own template, without vLLM."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from trl_multinode.engine_process.agent_calls import CHAT
from trl_multinode.engine_process.backend import AgentApp
from trl_multinode.engine_process.sessions import CALL
from trl_multinode.wire.messages import Serving

MODEL = "policy"
TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def fake_agent_app(folder: str, serving: Serving, end_tokens: set[int]) -> AgentApp:
    """Build the app: what an OpenAI client needs, a stream of one chunk, and tool calls in the form of Hermes."""
    tokenizer = AutoTokenizer.from_pretrained(Path(folder))

    def ids_of(body: Mapping[str, Any], begins_reply: bool) -> list[int]:
        settings = dict(serving.chat_template_kwargs) | body.get("chat_template_kwargs", {})
        return tokenizer.apply_chat_template(
            body["messages"],
            tools=body.get("tools"),
            add_generation_prompt=begins_reply,
            return_dict=False,
            **settings,
        )

    async def render(body: Mapping[str, Any]) -> list[int]:
        return ids_of(body, False)

    async def asgi(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if scope["path"] == "/v1/models":
            await respond(send, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
            return
        body = json.loads((await receive())["body"])
        is_chat = scope["path"] == CHAT
        prompt = body.get("prompt")
        if is_chat:
            prompt = ids_of(body, True)
        elif isinstance(prompt, str):
            prompt = tokenizer(prompt)["input_ids"]
        *_, row = [row async for row in CALL.get().outputs(prompt, {})]
        ended = row.tokens[-1] in end_tokens
        text = tokenizer.decode(row.tokens, skip_special_tokens=True)
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "stop" if ended else "length",
            "logprobs": None,
        }
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(row.tokens),
            "total_tokens": len(prompt) + len(row.tokens),
        }
        reply = {"id": "call", "created": 0, "model": MODEL, "usage": usage}
        if not is_chat:
            await respond(
                send, reply | {"object": "text_completion", "choices": [choice | {"text": text}]}
            )
            return
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if serving.tool_call_parser and body.get("tools"):
            message |= parsed(text)
        if not body.get("stream"):
            choice["message"] = message
            await respond(send, reply | {"object": "chat.completion", "choices": [choice]})
            return
        for index, call in enumerate(message.get("tool_calls", ())):
            call["index"] = index
        chunk = reply | {
            "object": "chat.completion.chunk",
            "choices": [choice | {"delta": message}],
        }
        data = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()
        await start(send, b"text/event-stream")
        await send({"type": "http.response.body", "body": data})

    return AgentApp(asgi, MODEL, render, frozenset(end_tokens))


def parsed(text: str) -> dict[str, Any]:
    """Return content and tool calls of a message that calls tools; nothing otherwise."""
    found = []
    for number, match in enumerate(TOOL_CALL.findall(text)):
        try:
            call = json.loads(match)
            name, arguments = call["name"], json.dumps(call["arguments"])
        except (ValueError, LookupError, TypeError):
            continue
        function = {"name": name, "arguments": arguments}
        found.append({"id": f"call_{number}", "type": "function", "function": function})
    return {"content": TOOL_CALL.sub("", text).strip(), "tool_calls": found} if found else {}


async def start(send: Any, kind: bytes) -> None:
    headers = [(b"content-type", kind)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def respond(send: Any, body: Mapping[str, Any]) -> None:
    await start(send, b"application/json")
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
