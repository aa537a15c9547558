"""Tiny model of `make demo MODE=agent` and `MODE=harness`, with a tokenizer and a chat template that can call tools.

Usage: `python examples/demo/agent_model.py FOLDER`, without the hub; then `from_pretrained` loads the folder.

A token is a word, and a call of a tool is 6 of them: `<call> open_box color = blue <eos>`. With `--hermes` a call is
text that vLLM's parser `hermes` finds, in 3 tokens: one up to the color, one with the color and the end, and `<eos>`.
The model is warmed up for 20 s, without rewards, on hunts of a careless player, who mostly opens and names random
boxes. It then writes well-formed calls, as a pretrained model would, and plays badly.
"""

import argparse
import random
import re
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast

sys.path.append(str(Path(__file__).resolve().parents[1]))
from agent import COLORS, QUESTION, TreasureHunt, make_datasets

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
SPECIAL = [PAD, EOS, UNKNOWN, "<user>", "<assistant>", "<tool>", "<call>"]
CALL = """\
        {{- '<call> ' + call.function.name }}
        {%- for name, value in call.function.arguments.items() %}{{ ' ' + name + ' = ' + value | string }}{% endfor %}
"""
HERMES_CALL = """\
        {{- '<tool_call>{"name": "' + call.function.name + '", ' }}
        {{- '"arguments": ' + call.function.arguments | tojson + '}</tool_call>' }}
"""
HERMES_TOKENS = [
    '<tool_call>{"name": "open_box", "arguments": {"color":',
    *(f'"{color}"}}}}</tool_call>' for color in COLORS),
]
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<' + message.role + '> ' }}
    {%- for call in message.tool_calls or [] %}
CALL
    {%- endfor %}
    {{- (message.content or '') + ' <eos> ' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif %}
"""
# TRL finds the calls in the text of a turn with it; transformers 5.13 or later
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<call>\s*(?P<name>\w+)",
            "close_pattern": r"<eos>\s*",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"(?P<key>\w+) = (?P<value>\w+)",
                "value_parser": {"name": "text"},
            },
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"close_pattern": r"<eos>\s*", "content": "text"},
    },
}
MAX_CALLS = 3
ATTENTION = 0.3  # share of the careless player's moves that follow the last message
HASTE = 0.3  # share of moves that answer too early
HUNTS_PER_STEP, WARM_UP_ROWS, WARM_UP_RATE = 20, 64, 3e-3  # each hunt is learned about three times
IGNORED = -100  # label that the loss leaves out


def words() -> list[str]:
    """Return all words of the game, from its own texts."""
    hunt = TreasureHunt()
    texts = [
        QUESTION,
        "open_box color = error There is no such box",
        *COLORS,
        hunt.reset(path=COLORS[:3]),
    ]
    texts += [hunt.open_box(color) for color in COLORS]
    return sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]+", text)})


def make_tokenizer(hermes: bool = False) -> PreTrainedTokenizerFast:
    """Build a tokenizer with a token for each word, which can render and parse calls of tools."""
    special = [*SPECIAL, *HERMES_TOKENS] if hermes else SPECIAL
    tokenizer = Tokenizer(
        WordLevel({word: i for i, word in enumerate([*special, *words()])}, unk_token=UNKNOWN)
    )
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
    )
    fast.chat_template = CHAT_TEMPLATE.replace("CALL\n", HERMES_CALL if hermes else CALL)
    if not hermes:
        fast.response_template = RESPONSE_TEMPLATE
    return fast


def make_model(vocab_size: int, seed: int) -> PreTrainedModel:
    """Build a random Llama of about 100 thousand parameters."""
    hidden = 64
    config = LlamaConfig(  # `AutoTokenizer` would read the words of a Qwen2 with a tokenizer class of its own
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=hidden // 32,  # head_dim 32 is the smallest for vLLM's CPU attention
        num_key_value_heads=hidden // 32,
        max_position_embeddings=256,
        initializer_range=0.06,  # 3 times the default: it learns to repeat a word in 100 steps, not in 500
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def careless_hunt(hunt: dict, draw: random.Random) -> list[dict]:
    """Return the messages of a hunt whose player follows the last message only now and then."""
    environment = TreasureHunt()
    last = hunt["prompt"][0]["content"] + environment.reset(**hunt)
    messages = [{"role": "user", "content": last}]
    while True:
        named = re.findall(rf"the ({'|'.join(COLORS)}) box", last)
        color = named[0] if named and draw.random() < ATTENTION else draw.choice(COLORS)
        found = len(messages) > 1 and "treasure" in last
        if found or len(messages) > 2 * MAX_CALLS or draw.random() < HASTE:
            return [*messages, {"role": "assistant", "content": color}]
        call = {"type": "function", "function": {"name": "open_box", "arguments": {"color": color}}}
        last = environment.open_box(color)
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "open_box", "content": last})


def labels_of(ids: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return the tokens of the assistant's turns, and `IGNORED` for the others."""
    labels, inside = ids.clone(), False
    for place, token in enumerate(ids.tolist()):
        if not inside:
            labels[place] = IGNORED
        inside = token == begin or (inside and token != end)
    return labels


def warm_up(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int
) -> float:
    """Train the model on careless hunts, and return the last loss."""
    draw, hunts = random.Random(seed), list(make_datasets()[0])
    begin, end = tokenizer.convert_tokens_to_ids(["<assistant>", EOS])
    chats = [careless_hunt(hunt, draw) for hunt in draw.choices(hunts, k=HUNTS_PER_STEP * steps)]
    rows = [torch.tensor(tokenizer.apply_chat_template(chat, return_dict=False)) for chat in chats]
    ids = pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)
    labels = pad_sequence(
        [labels_of(row, begin, end) for row in rows], batch_first=True, padding_value=IGNORED
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_UP_RATE, weight_decay=0.0)
    for _ in range(steps):
        batch = torch.randint(len(ids), (WARM_UP_ROWS,))
        # padding on the right needs no mask
        loss = model(input_ids=ids[batch], labels=labels[batch]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=200, help="of the warm-up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hermes", action="store_true", help="calls for vLLM's parser hermes")
    options = parser.parse_args()
    tokenizer = make_tokenizer(options.hermes)
    model = make_model(len(tokenizer), options.seed)
    print(f"loss after the warm-up: {warm_up(model, tokenizer, options.steps, options.seed):.3f}")
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)


if __name__ == "__main__":
    main()
