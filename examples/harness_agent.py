"""Agent of `harness.py`, a process of its own: it talks to a model at OPENAI_BASE_URL with the key OPENAI_API_KEY.

    python harness_agent.py MODEL    # in a folder with task.txt and boxes/*.txt; it writes result.json

It is the loop of any agent: send the conversation, run the calls of the tool, until the model answers without one.
Nothing here belongs to training, so the same file works with any server of the OpenAI API.
"""

import json
import sys
from pathlib import Path

from openai import OpenAI

MAX_CALLS = 3  # of the tool
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "open_box",
            "description": "Open a box and read what is inside.",
            "parameters": {
                "type": "object",
                "properties": {"color": {"type": "string", "description": "The color of the box."}},
                "required": ["color"],
            },
        },
    }
]


def open_box(arguments: str) -> tuple[str, str]:
    """Return the color that the model asked for, and what the tool answers."""
    try:
        color = json.loads(arguments)["color"]
        boxes = {path.stem: path for path in Path("boxes").iterdir()}
        return color, boxes[color].read_text()
    except (ValueError, KeyError, TypeError):
        # the model reads this
        return "", "error: There is no such box."


def play(client: OpenAI, model: str) -> dict:
    """Play the hunt of the working directory, and return which boxes were opened and the answer."""
    messages: list = [{"role": "user", "content": Path("task.txt").read_text()}]
    opened: list[str] = []
    while True:
        response = client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
        message = response.choices[0].message
        if not message.tool_calls:
            return {"opened": opened, "answer": message.content or ""}
        if len(opened) >= MAX_CALLS:
            return {"opened": opened, "answer": ""}
        # as the endpoint returned it: then it keeps the tokens that were sampled
        messages.append(message)
        for call in message.tool_calls:
            color, note = open_box(call.function.arguments)
            opened.append(color)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": note})


def main() -> None:
    result = play(OpenAI(), model=sys.argv[1])
    Path("result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
