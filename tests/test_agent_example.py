"""examples/agent.py, examples/harness.py and the tiny model that plays them in `make demo`; runs are in docs/use."""

import asyncio
import json
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import deepspeed  # noqa: F401  sets a variable when it is imported: let that be before the tests
import psutil
import pytest
import torch
from transformers import AutoTokenizer
from trl.chat_template_utils import (
    is_chat_template_prefix_preserving,
    parse_response,
    supports_tool_calling,
)
from waiting import HANG_S, until

from trl_multinode import (
    GRPOTrainer,  # noqa: F401  sets some more: the example imports it
    Session,
)

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parent.parent
PATH = ["red", "blue", "green"]


@pytest.fixture(scope="module")
def demo():
    with pytest.MonkeyPatch.context() as patch:
        for folder in ("examples", "examples/demo"):
            patch.syspath_prepend(str(ROOT / folder))
        import agent
        import agent_model

        yield agent, agent_model
    for name in (
        *("agent", "agent_model", "forked_agents", "harness", "harness_agent"),
        *("modes", "report", "rows", "task", "train", "train_agent"),
    ):
        sys.modules.pop(name, None)  # short names, which others may use


@pytest.fixture(scope="module")
def tokenizer(demo, tmp_path_factory):
    """The tokenizer as a rank gets it, beside a model: for some models transformers would load another class."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = demo[1].make_tokenizer()
    demo[1].make_model(len(tokenizer), seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


# ---- the game


def rewards(agent, hunts, chats, environments) -> list[float]:
    """The whole reward of each hunt, as the trainer adds it up."""
    logged = {}
    paths = [hunt["path"] for hunt in hunts]
    found = agent.right_box([chat[1:] for chat in chats], path=paths, log_metric=logged.__setitem__)
    assert 0 <= logged["hunt/called_a_tool"] <= 1
    return [
        one + environment.get_reward() for one, environment in zip(found, environments, strict=True)
    ]


def test_two_notes_and_the_right_answer_are_the_whole_reward(demo):
    agent, _ = demo
    hunt = agent.TreasureHunt()
    assert hunt.reset(path=PATH) == " Start with the red box."
    answer = [[{"role": "user", "content": ""}, {"role": "assistant", "content": "The GREEN box."}]]
    assert rewards(agent, [{"path": PATH}], answer, [hunt]) == [0.5]  # a lucky guess
    assert hunt.open_box("red") == "A note: open the blue box." and hunt.get_reward() == 0.25
    assert hunt.open_box("white") == "Nothing." and hunt.get_reward() == 0.25
    assert "in the green box" in hunt.open_box("blue") and hunt.open_box("green") == "The treasure!"
    assert rewards(agent, [{"path": PATH}], answer, [hunt]) == [1.0]
    answer[0].append({"role": "tool", "content": hunt.open_box("blue")})  # names the right box
    assert rewards(agent, [{"path": PATH}], answer, [hunt]) == [0.5]
    answer[0].pop()
    answer[0][-1]["content"] = "green or red"
    assert rewards(agent, [{"path": PATH}], answer, [hunt]) == [0.5]
    with pytest.raises(ValueError, match="no such box"):
        hunt.open_box("pink")
    assert not hunt.reset(path=PATH[::-1]).endswith("red box.") and hunt.get_reward() == 0


def test_held_out_hunts_are_not_trained_on(demo):
    train_set, held_out = demo[0].make_datasets()
    paths = [tuple(row["path"]) for dataset in (train_set, held_out) for row in dataset]
    assert len(held_out) == demo[0].NUM_HELD_OUT and len(set(paths)) == len(paths) == 8 * 7 * 6
    assert all(len(set(path)) == 3 for path in paths)


def played(demo, number: int = 200) -> tuple[list[float], list[list[dict]]]:
    agent, model = demo
    draw, hunts, chats, environments = (
        random.Random(0),
        list(agent.make_datasets()[0])[:number],
        [],
        [],
    )
    for hunt in hunts:
        chats.append(model.careless_hunt(hunt, draw))
        environments.append(agent.TreasureHunt())
        environments[-1].reset(**hunt)
        for message in chats[-1]:
            for call in message.get("tool_calls", ()):
                environments[-1].open_box(**call["function"]["arguments"])
    return rewards(agent, hunts, chats, environments), chats


def test_a_player_who_reads_wins_and_the_careless_one_of_the_warm_up_does_not(demo, monkeypatch):
    careless, chats = played(demo)
    assert 0.1 < sum(careless) / len(careless) < 0.35
    assert {len(chat) for chat in chats} == {2, 4, 6, 8}  # none to three calls
    monkeypatch.setattr(demo[1], "ATTENTION", 1.0)
    monkeypatch.setattr(demo[1], "HASTE", 0.0)
    careful, chats = played(demo)
    assert set(careful) == {1.0} and {len(chat) for chat in chats} == {6}
    monkeypatch.setattr(demo[1], "HASTE", 1.0)
    assert sum(played(demo)[0]) / 200 < 0.1, "without the tool there is nothing to know"


# ---- the tiny model


def test_trl_can_render_and_parse_the_tiny_models_calls(demo, tokenizer):
    assert supports_tool_calling(tokenizer) and is_chat_template_prefix_preserving(tokenizer)
    assert tokenizer.padding_side == "left" and tokenizer.pad_token_id == 0
    _, chats = played(demo, 100)
    calls = 0
    for chat in chats:
        for end, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            before = {"add_generation_prompt": True, "return_dict": False}
            prefix = tokenizer.apply_chat_template(chat[:end], **before)
            ids = tokenizer.apply_chat_template(chat[: end + 1], return_dict=False)
            assert ids[: len(prefix)] == prefix and tokenizer.unk_token_id not in ids
            said = parse_response(tokenizer, ids[len(prefix) :], prefix=prefix, tools=[])
            assert said == {"role": "assistant", **message}
            calls += "tool_calls" in message
    assert calls > 50


def test_only_the_assistants_tokens_are_learned_in_the_warm_up(demo, tokenizer):
    chat = next(chat for chat in played(demo, 20)[1] if len(chat) == 4)
    ids = torch.tensor(tokenizer.apply_chat_template(chat, return_dict=False))
    labels = demo[1].labels_of(ids, *tokenizer.convert_tokens_to_ids(["<assistant>", "<eos>"]))
    color, answer = chat[1]["tool_calls"][0]["function"]["arguments"]["color"], chat[-1]["content"]
    assert (
        tokenizer.decode(labels[labels >= 0])
        == f"<call> open_box color = {color} <eos> {answer} <eos>"
    )
    assert torch.equal(labels[labels >= 0], ids[labels >= 0])


# ---- the agent that owns its loop


def test_hermes_calls_are_the_json_that_the_parser_reads_and_render_alike(demo):
    tokenizer = demo[1].make_tokenizer(hermes=True)
    calls = 0
    for chat in played(demo, 50)[1]:
        ids = tokenizer.apply_chat_template(chat, return_dict=False)
        assert tokenizer.unk_token_id not in ids
        found = tokenizer.decode(ids).split("<tool_call>")[1:]
        made = [call["function"] for message in chat for call in message.get("tool_calls", ())]
        assert [json.loads(text.split("</tool_call>")[0]) for text in found] == made
        calls += len(made)
    assert calls > 25


class Model(BaseHTTPRequestHandler):
    """Server of a player who follows the notes."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert self.headers["authorization"] == "Bearer the key"
        self.server.began.append(body)  # type: ignore[attr-defined]
        if self.server.hangs:  # type: ignore[attr-defined]
            self.rfile.read(1)
            return
        last = body["messages"][-1]
        color = last["content"].rsplit(" box", 1)[0].split()[-1]
        message: dict = {"role": "assistant", "content": color}
        if "treasure is in" not in last["content"]:
            function = {"name": "open_box", "arguments": json.dumps({"color": color})}
            call = {"id": "a call", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        reply = {"id": "a reply", "object": "chat.completion", "created": 0, "model": "policy"}
        reply["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
        answer = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_) -> None:
        pass


@contextmanager
def model_server(hangs: bool = False) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    server.began, server.hangs = [], hangs  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def session_on(server: ThreadingHTTPServer, folder: Path) -> Session:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    folder.mkdir()
    return Session({"path": PATH}, url, "the key", "policy", folder, timeout_s=HANG_S, max_calls=8)


@pytest.mark.parametrize("kind", ["process", "fork"])
def test_an_agent_in_a_process_of_its_own_plays_a_hunt(demo, kind, tmp_path):
    import forked_agents
    import harness

    agents = forked_agents.Agents()
    run_agent = harness.start_agent if kind == "process" else agents.run
    try:
        with model_server() as server:
            session = session_on(server, tmp_path / "session")
            assert asyncio.run(harness.hunt(session, run_agent)) == 1.0
        messages = server.began[-1]["messages"]
        assert [message["role"] for message in messages] == [
            "user", *["assistant", "tool"] * 2
        ]  # fmt: skip
        assert server.began[-1]["tools"][0]["function"]["name"] == "open_box"
    finally:
        agents.close()


@pytest.mark.parametrize("kind", ["process", "fork"])
def test_a_cancelled_agent_ends(demo, kind, tmp_path):
    import forked_agents
    import harness

    agents = forked_agents.Agents()
    run_agent = harness.start_agent if kind == "process" else agents.run

    async def cancel() -> None:
        task = asyncio.create_task(harness.hunt(session, run_agent))
        while not server.began:
            assert not task.done()
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    try:
        with model_server(hangs=True) as server:
            session = session_on(server, tmp_path / "session")
            before = psutil.Process().children(recursive=True)
            asyncio.run(cancel())
            until(
                lambda: psutil.Process().children(recursive=True) == before, "the agent has ended"
            )
    finally:
        agents.close()


def test_the_reward_of_a_hunt_is_that_of_the_environment(demo):
    import harness

    assert harness.reward_of({"opened": ["red", "blue"], "answer": " green"}, PATH) == 1.0
    assert harness.reward_of({"opened": ["red", "red", ""], "answer": "green or red"}, PATH) == 0.25
    assert harness.reward_of({"opened": [], "answer": "GREEN"}, PATH) == 0.5
