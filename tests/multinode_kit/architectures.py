"""A small model of every tested architecture: from the hub if it is reachable and usable, else built here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PreTrainedModel

from .models import tiny_tokenizer

HUB = "trl-internal-testing"
LEAST_HEAD_DIM = 32  # smallest for vLLM's CPU attention; the hub's `tiny-*` models have 2
VOCABULARY = 300  # not a multiple of 64, so vLLM pads it
IMAGE_TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
# pixels, pixels, patches: an image is (32 / 8 / 2)^2 = 4 tokens
IMAGE_SIZE, PATCH_SIZE, SHUFFLE = (
    32,
    8,
    2,
)

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
_WINDOW = {"sliding_window": 16, "query_pre_attn_scalar": 32}  # shorter than the tests' sequences
_LOCAL_GLOBAL = {"layer_types": ["sliding_attention", "full_attention"]}
_VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH_SIZE,
}


@dataclass(frozen=True)
class Architecture:
    """Classes, config and hub models of one architecture."""

    model_cls: str  # name in transformers, like `config_cls`
    config_cls: str
    config: dict[str, Any]
    tiny: str  # name on the hub; for tests without vLLM
    small: str | None = (
        None  # name on the hub; its head_dim is large enough for vLLM's CPU attention
    )
    processing_class: Callable[[], Any] = tiny_tokenizer


def tiny_idefics3_processor() -> "transformers.Idefics3Processor":
    """Build a processor that accepts images of any size and makes one tile of each."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": IMAGE_TOKENS})
    size = {"longest_edge": IMAGE_SIZE}
    images = transformers.Idefics3ImageProcessor(
        size=size, max_image_size=size, do_image_splitting=False
    )
    return transformers.Idefics3Processor(
        images, tokenizer, (IMAGE_SIZE // PATCH_SIZE // SHUFFLE) ** 2
    )


ARCHITECTURES = {
    "qwen2": Architecture(
        "Qwen2ForCausalLM", "Qwen2Config", _TEXT | {"tie_word_embeddings": True},
        "tiny-Qwen2ForCausalLM-2.5", "small-Qwen2ForCausalLM-2.5",
    ),
    "qwen3": Architecture(
        "Qwen3ForCausalLM", "Qwen3Config", _TEXT | {"tie_word_embeddings": False},
        "tiny-Qwen3ForCausalLM", "small-Qwen3ForCausalLM",
    ),
    "llama": Architecture(
        "LlamaForCausalLM", "LlamaConfig", _TEXT | {"tie_word_embeddings": False}, "tiny-LlamaForCausalLM-3.2"
    ),
    # Gemma: scaled embeddings, tied head, norms of 1 + w, sliding window. Gemma 2 caps logits and attention scores too
    "gemma2": Architecture(
        "Gemma2ForCausalLM", "Gemma2Config",
        _TEXT | _WINDOW | _LOCAL_GLOBAL | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0},
        "tiny-Gemma2ForCausalLM",
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", "Gemma3TextConfig", _TEXT | _WINDOW | _LOCAL_GLOBAL, "tiny-Gemma3ForCausalLM"
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", _TEXT | _EXPERTS | {"tie_word_embeddings": False},
        "tiny-Qwen3MoeForCausalLM",
    ),
    # an expert that all tokens share, beside the others
    "qwen2_moe": Architecture(
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig",
        _TEXT | _EXPERTS | {"shared_expert_intermediate_size": 64, "tie_word_embeddings": False},
        "tiny-Qwen2MoeForCausalLM",
    ),
    "idefics3": Architecture(
        "Idefics3ForConditionalGeneration", "Idefics3Config",
        {
            "text_config": _TEXT | {"model_type": "llama", "tie_word_embeddings": False},
            "vision_config": _VISION,
            "image_token_id": 258,  # the first id after the tiny tokenizer's 258
            "scale_factor": SHUFFLE,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
        },
        "tiny-Idefics3ForConditionalGeneration", processing_class=tiny_idefics3_processor,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """A model, its processing class, and the source of both."""

    model: PreTrainedModel
    processing_class: Any
    source: str  # name on the hub, or "built here"


def model_for(architecture: str, engine: bool = True, say: Callable[[str], None] = print) -> Found:
    """
    Load a small float32 model of `architecture` from the hub, else build it here; report the choice and its reason.

    Args:
        architecture (`str`):
            A key of `ARCHITECTURES`.
        engine (`bool`, *optional*, defaults to `True`):
            Set it if vLLM runs the model on a CPU, which requires a `head_dim` of 32 or more.
        say (`Callable[[str], None]`, *optional*, defaults to `print`):
            Function that prints a line.
    """
    known = ARCHITECTURES[architecture]
    name = f"{HUB}/{(known.small or known.tiny) if engine else known.tiny}"
    reason = _obstacle(name, engine)
    if reason is None:
        say(f"[architectures] {architecture}: {name} from the hub")
        model_cls = getattr(transformers, known.model_cls)
        model = model_cls.from_pretrained(name, dtype=torch.float32, attn_implementation="eager")
        processing_cls = (
            AutoTokenizer if known.processing_class is tiny_tokenizer else AutoProcessor
        )
        return Found(model, processing_cls.from_pretrained(name), name)
    say(f"[architectures] {architecture}: built here, because {reason}")
    return Found(built_here(known), known.processing_class(), "built here")


def _obstacle(name: str, engine: bool) -> str | None:
    """Return why the hub's model cannot be used, or `None` if it can."""
    try:
        config = AutoConfig.from_pretrained(name).get_text_config()
    except OSError as error:
        return f"the hub's {name} cannot be had: {str(error).strip().splitlines()[0]}"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if engine and head_dim < LEAST_HEAD_DIM:
        return (
            f"the hub's {name} has a head_dim of {head_dim}, and vLLM's CPU attention takes "
            f"{LEAST_HEAD_DIM} or more"
        )
    return None


def built_here(known: Architecture, seed: int = 0) -> PreTrainedModel:
    """Build a model with random float32 weights and eager attention, because the other kinds ignore Gemma's cap."""
    config = getattr(transformers, known.config_cls)(**known.config)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = getattr(transformers, known.model_cls)._from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    torch.random.set_rng_state(state)
    return model.eval()
