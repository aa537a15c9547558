"""A model that calls tools: after "assistant" it says either a whole tool call or "done", by the toss of a coin."""

from collections.abc import Sequence
from importlib import resources

import torch
from transformers import AddedToken, PreTrainedModel, PreTrainedTokenizerFast

from .models import silence_layers, tiny_qwen2, tiny_tokenizer

TURN_END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
DONE = "done"


def tool_tokenizer(call: str = CALL, done: str = DONE) -> PreTrainedTokenizerFast:
    """Build a tokenizer with Qwen2.5's chat template over bytes; a turn's end, a tool call and "done" are a token
    each."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(
        [AddedToken(text, special=text.startswith("<|")) for text in ("<|im_start|>", TURN_END)]
    )
    tokenizer.add_tokens([AddedToken(call), AddedToken(done)])
    tokenizer.eos_token = TURN_END
    tokenizer.chat_template = (
        resources.files("trl").joinpath("chat_templates/qwen2_5.jinja").read_text()
    )
    return tokenizer


def tool_model(
    calls: float = 8.0,
    words: Sequence[int] = (),
    tokenizer: PreTrainedTokenizerFast | None = None,
    **sizes: int,
) -> PreTrainedModel:
    """
    Build a model like [`counting_model`], with other rows in the head.

    Args:
        calls (`float`):
            Weight of the tool call. With 8 it is as likely as "done", with less "done" is likelier.
        words (`Sequence[int]`):
            Tokens after which all of them, "done" and an end are equally likely.
        tokenizer (`PreTrainedTokenizerFast`, *optional*):
            One of [`tool_tokenizer`] with another call and another "done".
        **sizes:
            Sizes of the model, as in [`tiny_qwen2`].
    """
    tokenizer, model = tokenizer or tool_tokenizer(), tiny_qwen2(tied=False, **sizes)
    newline = tokenizer.encode("\n", add_special_tokens=False)[-1]
    # the last tokens that were added, in this order
    call, done = len(tokenizer) - 2, len(tokenizer) - 1
    end = tokenizer.convert_tokens_to_ids(TURN_END)
    with torch.no_grad():
        units = silence_layers(model)
        if words:
            axes = torch.linalg.qr(units[[newline, call, done, words[0]]].T).Q.T
            units[[newline, call, done]], units[words] = axes[:3], axes[3].repeat(len(words), 1)
            model.model.embed_tokens.weight.copy_(units)
        head = torch.zeros_like(units)
        head[call], head[done] = calls * units[newline], 8 * units[newline]
        head[end] = 8 * (units[call] + units[done])
        if words:
            head[call] -= 8 * axes[3]
        model.lm_head.weight.copy_(head)
    model.config.eos_token_id = model.generation_config.eos_token_id = end
    return model
