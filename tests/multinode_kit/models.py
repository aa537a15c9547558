"""Tiny models and tokenizers, built here without a hub."""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config

PAD, EOS = "<pad>", "<eos>"
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "0123456789 + - * / = ?",
    "abcdefghijklmnopqrstuvwxyz",
]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Build a byte-level tokenizer without merges. Its 258 tokens encode any text, and any sequence of ids decodes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=258, special_tokens=[PAD, EOS], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, padding_side="left"
    )


def tiny_qwen2(
    vocab_size: int = 300, tied: bool = True, layers: int = 2, hidden: int = 64, seed: int = 0
) -> PreTrainedModel:
    """Build a random Qwen2 in float32 with head_dim 32, the smallest for vLLM's CPU attention.

    Args:
        vocab_size (`int`, defaults to 300):
            Size of the vocabulary. The default is not a multiple of 64, so vLLM pads it.
        tied (`bool`, defaults to `True`):
            Share one tensor between head and embedding.
    """
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.random.set_rng_state(state)
    return model


def counting_model(vocab_size: int = 300) -> PreTrainedModel:
    """Build an untied Qwen2 that continues every sequence by counting: t + 1 follows token t with probability ~1.

    The layers add nothing to the residual stream, so the logits are `head @ norm(embedding[t])`; row t + 1 of the head
    is 8 times the unit vector of token t. Random unit vectors in 64 dimensions have products of at most about 0.5, so
    the right logit is 64 and the others are below 40. A completion thus identifies its prompt.
    """
    model = tiny_qwen2(vocab_size, tied=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(8 * silence_layers(model).roll(1, dims=0))
    return model


@torch.no_grad()
def silence_layers(model: PreTrainedModel) -> torch.Tensor:
    """Make the logits `head @ norm(embedding[last token])` and return the embeddings, which become unit vectors."""
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    units = torch.nn.functional.normalize(model.model.embed_tokens.weight, dim=-1)
    model.model.embed_tokens.weight.copy_(units)
    return units


def save_tiny(folder: Path, **keywords: Any) -> Path:
    """Save a tiny model and its tokenizer in `folder`, and return `folder` as the path to train from."""
    tiny_qwen2(**keywords).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def renamed_llava(folder: Path) -> tuple[PreTrainedModel, set[str]]:
    """Return a LLaVA from a checkpoint with the hub's names, which transformers 5 changes on load, and these names."""
    text = {"model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 64}
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 32,
        "image_size": 16,
    }
    few = {"num_hidden_layers": 2, "num_attention_heads": 2}
    sizes = {"num_key_value_heads": 2, "tie_word_embeddings": False}
    config = transformers.LlavaConfig(
        text_config=text | few | sizes, vision_config=vision | few | {"patch_size": 8}
    )
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights = {
        name.replace("vision_tower.", "vision_tower.vision_model."): t
        for name, t in weights.items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return transformers.LlavaForConditionalGeneration.from_pretrained(folder), set(weights)
