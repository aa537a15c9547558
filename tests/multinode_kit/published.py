"""Configs with the published sizes of models, for the plan and for the page of tested models."""

import tempfile

from transformers import AutoConfig

from trl_multinode.tools.plan.command_line import own_parser, task_of
from trl_multinode.tools.plan.training import nodes_needed

FLAGS = "--nodes 1x8 --completion 1024 --rows 256"
RANKS = 4  # of the eight GPUs of a node; the others generate

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
# architecture of `architectures.ARCHITECTURES` -> name of the model, key of `CONFIGS`
PUBLISHED = {
    "mixtral": ("Mixtral-8x7B", "mixtral"),
    "gpt_oss": ("gpt-oss-20b", "gpt_oss"),
    "deepseek_v2": ("DeepSeek-V2-Lite", "deepseek_v2"),
    "glm4_moe": ("GLM-4.5-Air", "glm4_moe"),
    "gemma3": ("Gemma 3 27B", "gemma3_text"),
    "qwen3_next": ("Qwen3-Next-80B-A3B", "qwen3_next"),
    "granite_hybrid": ("Granite-4.0-H-Tiny", "granitemoehybrid"),
}


def nodes_that_fit(kind: str) -> int | None:
    """Return the fewest nodes of eight GPUs with 80 GB on which `trl-multinode plan` fits a model of `CONFIGS`."""
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model(kind, **CONFIGS[kind]).save_pretrained(folder)
        task, _ = task_of(own_parser().parse_args([folder, *FLAGS.split()]))
    return nodes_needed(task, (RANKS,))
