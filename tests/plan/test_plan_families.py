"""Hybrids, windows, mixtures of experts and latent attention: parameters, those of a token, and the cache of a row.

Parameters are the published ones; the others are calculated here by hand from the published sizes.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from plan_kit import task
from transformers import AutoConfig

from trl_multinode.model_layers import layers_of
from trl_multinode.tools.plan.engine_memory import engine_memory
from trl_multinode.tools.plan.model_size import ModelSize, _build, size_of
from trl_multinode.tools.plan.rounds import Decoder, generate

ROW = 8192  # tokens
HYBRID = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32}
SMALL = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip
CONFIGS: dict[str, dict] = {
    # Mixtral-8x7B
    "mixtral": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    # gpt-oss-20b
    "gpt_oss": {
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128,
    },
    # DeepSeek-V2-Lite
    "deepseek_v2": {
        "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
    },
    # GLM-4.5-Air without its layer for speculation
    "glm4_moe": {
        "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
        "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
        "attention_bias": True,
    },
    # Gemma 3 27B, its text part
    "gemma3_text": {
        "vocab_size": 262208, "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
    },
    # Qwen3-Next-80B-A3B without its layer for speculation
    "qwen3_next": {
        "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    },
    # Granite-4.0-H-Tiny
    "granitemoehybrid": {
        "vocab_size": 100352, "hidden_size": 1536, "intermediate_size": 512, "shared_intermediate_size": 1024,
        "num_hidden_layers": 40, "num_attention_heads": 12, "num_key_value_heads": 4, "num_local_experts": 64,
        "num_experts_per_tok": 6, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128,
        "tie_word_embeddings": True,
        "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    },
    # sizes of our own: all layers have the window
    "mistral": SMALL | {"sliding_window": 100},
    # a window in three of four layers, twice the size of a head in the other
    "gemma4_text": SMALL
    | {"sliding_window": 100, "global_head_dim": 64, "hidden_size_per_layer_input": 0}
    | {"layer_types": 3 * ["sliding_attention"] + ["full_attention"]},
    # the text part of a model with a vision tower, whose states are float32
    "qwen3_5": {
        "text_config": SMALL | HYBRID | {"linear_value_head_dim": 32, "mamba_ssm_dtype": "float32"}
    },
}  # fmt: skip
PUBLISHED = {
    "mixtral": 46.70e9, "gpt_oss": 20.91e9, "deepseek_v2": 15.71e9, "glm4_moe": 106.85e9,
    "gemma3_text": 27.01e9, "qwen3_next": 79.67e9, "granitemoehybrid": 6.94e9,
}  # fmt: skip


@cache
def size(kind: str) -> ModelSize:
    return size_of(_build(AutoConfig.for_model(kind, **CONFIGS[kind]), kind, False))


@pytest.mark.parametrize("kind", PUBLISHED)
def test_parameters_are_those_that_were_published(kind):
    assert size(kind).parameters == pytest.approx(PUBLISHED[kind], rel=0.001)


def experts(hidden: int, width: int, used: int, of: int) -> int:
    """Parameters of a mixture that a token uses: three matrices of each expert, and the router."""
    return 3 * hidden * width * used + hidden * of


ACTIVE = {
    "mixtral": 32 * (4096 * (2 * 4096 + 2 * 1024) + experts(4096, 14336, 2, 8)) + 32000 * 4096,
    "gpt_oss": 24 * (2880 * (2 * 4096 + 2 * 512) + experts(2880, 2880, 4, 32)) + 201088 * 2880,
    # queries, the latent, keys and values from it, output; one dense layer; two shared experts
    "deepseek_v2": 27 * (2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048)
    + 3 * 2048 * 10944 + 26 * (experts(2048, 1408, 6 + 2, 64)) + 102400 * 2048,
    "glm4_moe": 46 * 4096 * 128 * (2 * 96 + 2 * 8)
    + 3 * 4096 * 10944 + 45 * experts(4096, 1408, 8 + 1, 128) + 151552 * 4096,
    # queries with a gate, keys, values, output; queries, keys, values, gate, output and steps of a delta net
    "qwen3_next": 12 * 2048 * 256 * (2 * 16 + 2 * 2 + 16) + 36 * 2048 * (2 * 2048 + 3 * 4096 + 2 * 32)
    + 48 * experts(2048, 512, 10 + 1, 512) + 151936 * 2048,
    # input (inner, gate, two groups of states, steps) and output of Mamba; the embedding is also the head
    "granitemoehybrid": 4 * 1536 * 128 * (2 * 12 + 2 * 4) + 36 * 1536 * (3 * 3072 + 2 * 128 + 48)
    + 40 * (experts(1536, 512, 6, 64) + 3 * 1536 * 1024) + 100352 * 1536,
}  # fmt: skip


@pytest.mark.parametrize("kind", ACTIVE)
def test_a_token_uses_the_parameters_of_its_experts_and_of_the_head(kind):
    # norms, biases and convolutions are left out here
    assert size(kind).active == pytest.approx(ACTIVE[kind], rel=0.001)


def test_a_vision_tower_is_counted_in_the_weights_and_not_in_the_operations_of_a_token():
    text = AutoConfig.for_model("gemma3_text", **SMALL)
    whole = AutoConfig.for_model(
        "gemma3", text_config=text.to_dict(), vision_config={"num_hidden_layers": 1}
    )
    alone, beside = (size_of(_build(each, "a", False)) for each in (text, whole))
    assert beside.parameters > 2 * alone.parameters and beside.active == alone.active


# Bytes in bfloat16 of a row of 8192 tokens: layers x bytes of a token x tokens, and states
CACHE = {
    "mixtral": 32 * 2 * 8 * 128 * 2 * ROW,
    "gpt_oss": 12 * 2 * 8 * 64 * 2 * (ROW + 128),
    # one latent and one rotary key of all heads
    "deepseek_v2": 27 * (512 + 64) * 2 * ROW,
    "glm4_moe": 46 * 2 * 8 * 128 * 2 * ROW,
    "gemma3_text": 2 * 16 * 128 * 2 * (10 * ROW + 52 * 1024),
    # states of 32 heads, and three inputs of the convolution
    "qwen3_next": 12 * 2 * 2 * 256 * 2 * ROW
    + 36 * 2 * (32 * 128 * 128 + 3 * (32 * 128 + 2 * 16 * 128)),
    "granitemoehybrid": 4 * 2 * 4 * 128 * 2 * ROW
    + 36 * 2 * (48 * 64 * 128 + 3 * (48 * 64 + 2 * 128)),
    "mistral": 4 * 2 * 2 * 32 * 2 * 100,
    "gemma4_text": 2 * 2 * 2 * (3 * 32 * 100 + 64 * ROW),
    "qwen3_5": 1 * 2 * 2 * 32 * 2 * ROW
    + 3 * (4 * (4 * 32 * 32) + 2 * 3 * (4 * 32 + 2 * 2 * 32)),
}  # fmt: skip


@pytest.mark.parametrize("kind", CACHE)
def test_a_row_takes_the_cache_of_its_layers(kind):
    assert 2 * size(kind).cache.cache_elements(ROW) == CACHE[kind]


def test_gpus_of_an_engine_split_heads_and_states_but_no_latent():
    for kind, share in {"mixtral": 4, "qwen3_5": 2, "deepseek_v2": 1}.items():
        found = size(kind).cache
        assert found.cache_elements(ROW, share if share > 1 else 4) == pytest.approx(
            found.cache_elements(ROW) / share
        )
    assert size("deepseek_v2").cache.splits_into(16) and not size("mixtral").cache.splits_into(3)


def test_layers_with_sizes_of_their_own_are_counted_one_by_one():
    text = AutoConfig.for_model("llama", **SMALL)
    text.per_layer_config = {0: {"num_key_value_heads": 4, "head_dim": 64}}
    assert layers_of(text).cache_elements(1) == 2 * (4 * 64 + 3 * 2 * 32)
    # transformers refuses to name one number for all layers
    text = AutoConfig.for_model("mistral", **CONFIGS["mistral"])
    text.per_layer_config = {0: {"sliding_window": 8}}
    with pytest.raises(RuntimeError):
        layers_of(text)


def test_layers_that_read_the_cache_of_others_have_none():
    text = AutoConfig.for_model("gemma4_text", **CONFIGS["gemma4_text"], num_kv_shared_layers=2)
    assert [(each.number, each.window) for each in layers_of(text).attention] == [(2, 100)]


def test_attention_with_a_window_costs_no_more_for_tokens_beyond_it():
    flops = size("mistral").flops
    assert flops.window == 100 and flops.limited == 1.0
    # layers, heads, keys and values; pairs without those that are more than a window apart
    assert flops.per_square == 6 * 4 * 4 * (32 + 32)
    lengths = torch.tensor([60.0, 100.0, 1000.0])
    assert flops.squares(lengths).tolist() == [3600, 10000, 1000**2 - 900**2]
    assert size("gpt_oss").flops.limited == 0.5 and size("mixtral").flops.limited == 0.0
    assert size("deepseek_v2").flops.per_square == 6 * 27 * 16 * (192 + 128)
    assert size("qwen3_next").flops.per_square == 6 * 12 * 16 * (256 + 256)


def test_an_engine_holds_more_and_longer_rows_of_a_model_with_windows_or_states():
    """With the cache of 8192 tokens a row in all layers it would hold 1 / 4 of them."""
    plan = task("7B", f"--nodes 1x8 --completion {ROW - 1024} --prompt 1024 --rows 64")
    found = {}
    for kind in ("qwen3_next", "gemma3_text"):
        model = size(kind)
        layers = model.cache.attention
        full = replace(layers[0], window=0, number=model.layers)
        everywhere = replace(model.cache, attention=(full,), recurrent=0)
        for name, each in {"its own": model, "full": replace(model, cache=everywhere)}.items():
            memory = engine_memory(replace(plan, model=each), 8, 8)
            decoder = Decoder(each, plan.cluster.gpu, 8)
            found[kind, name] = (
                memory.rows(plan.row_tokens),
                generate(replace(plan.rows, number=5000), memory, decoder).seconds,
            )
        (rows, seconds), (rows_full, seconds_full) = found[kind, "its own"], found[kind, "full"]
        assert rows > 3 * rows_full and seconds < 0.7 * seconds_full, found
