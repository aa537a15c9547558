"""Tiny vision-language models with their processors, built here: images of different sizes have 4 to 9 tokens."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, ProcessorMixin

from .architectures import model_for
from .models import tiny_tokenizer

# Their ids are those after the tiny tokenizer's 258. The third one stands for each token of an image
SPECIAL = [
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|im_start|>", "<|im_end|>",
]  # fmt: skip
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"  # in a text, before its expansion
VOCABULARY = 300  # not a multiple of 64, so vLLM pads it
PATCH, MERGED = 8, 2  # pixels; patches of a token, in each direction
PIXELS = {"shortest_edge": 32**2, "longest_edge": 48**2}  # pixels of an image, not of an edge

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 2048,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "patch_size": PATCH,
    "spatial_merge_size": MERGED, "temporal_patch_size": 2, "out_hidden_size": 64, "num_position_embeddings": 16,
}  # fmt: skip
_IDS = {
    "vision_start_token_id": 258, "vision_end_token_id": 259, "image_token_id": 260, "video_token_id": 261
}  # fmt: skip
# an interleaved part of the rotary frequencies for each of time, height and width
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_interleaved": True}

TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ IMAGE if part['type'] == 'image' else part['text'] }}{% endfor %}"
    "{% endif %}{% endfor %}"
)


def template(image: str) -> str:
    """Return a chat template without roles that writes `image` for each image."""
    return TEMPLATE.replace("IMAGE", repr(image))


def qwen_processor() -> "transformers.Qwen3VLProcessor":
    """Build the processor of Qwen3-VL and Qwen3.5."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    sizes = {"patch_size": PATCH, "merge_size": MERGED, "temporal_patch_size": 2, "size": PIXELS}
    return transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(**sizes),
        tokenizer,
        transformers.Qwen3VLVideoProcessor(**sizes),
        chat_template=template(QWEN_IMAGE),
    )


def qwen3_vl() -> tuple[PreTrainedModel, ProcessorMixin]:
    """Build Qwen3-VL in float32. Its first text layer also gets features of the first vision layer (deepstack)."""
    config = transformers.Qwen3VLConfig(
        text_config=_TEXT | {"rope_parameters": _ROPE | {"mrope_section": [6, 5, 5]}},
        vision_config=_VISION | {"deepstack_visual_indexes": [0]},
        tie_word_embeddings=False,
        **_IDS,
    )
    return _model("Qwen3VLForConditionalGeneration", config), qwen_processor()


def qwen3_5() -> tuple[PreTrainedModel, ProcessorMixin]:
    """Build Qwen3.5 with images: a layer with a gated delta net, whose convolution vLLM's CPU build has in bfloat16
    only, and one of full attention."""
    rope = _ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]}
    linear = {"key_head_dim": 64, "value_head_dim": 64, "num_key_heads": 2, "num_value_heads": 2}
    config = transformers.Qwen3_5Config(
        text_config=_TEXT
        | {"layer_types": ["linear_attention", "full_attention"], "rope_parameters": rope}
        | {f"linear_{name}": value for name, value in linear.items()},
        vision_config=_VISION,
        tie_word_embeddings=False,
        **_IDS,
    )
    return _model("Qwen3_5ForConditionalGeneration", config), qwen_processor()


def _model(name: str, config: transformers.PreTrainedConfig) -> PreTrainedModel:
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, name)._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                # with the initial 0.02, neither an image nor a position moves a log-prob visibly
                parameter.mul_(4)
        model.lm_head.weight.mul_(3)  # an entropy of 4 nats
    torch.random.set_rng_state(state)
    return model.eval()


def idefics3() -> tuple[PreTrainedModel, ProcessorMixin]:
    """Build Idefics3 in float32, whose images have 4 tokens each."""
    found = model_for("idefics3")
    found.processing_class.chat_template = template("<image>")
    return found.model, found.processing_class


VISION_MODELS: dict[str, Callable[[], tuple[PreTrainedModel, ProcessorMixin]]] = {
    "idefics3": idefics3,
    "qwen3_vl": qwen3_vl,
    "qwen3_5": qwen3_5,
}
