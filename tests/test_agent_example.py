"""examples/agent.py and the tiny model that plays it in `make demo MODE=agent`; docs/use/agents.md has a run of it."""

import random
import sys
from pathlib import Path

import deepspeed  # noqa: F401  sets a variable when it is imported: let that be before the tests
import pytest
import torch
from transformers import AutoTokenizer
from trl.chat_template_utils import (
    is_chat_template_prefix_preserving,
    parse_response,
    supports_tool_calling,
)

from trl_multinode import GRPOTrainer  # noqa: F401  sets some more: the example imports it

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
    for name in ("agent", "agent_model", "modes", "report", "rows", "task", "train", "train_agent"):
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
