"""Layers of a language model as its config describes them: caches, windows, recurrent states, experts.

It reads the keys of transformers' configs and has no list of models, so a new family needs no entry.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "top_k_experts", "moe_k")
# parts of the kinds of layers whose memory of a row is one state, whatever its length
RECURRENT = ("linear", "mamba", "conv", "recurrent", "hybrid")
# parts of the kinds of layers without attention; a "hybrid" layer has attention and a state
NO_ATTENTION = (*RECURRENT[:-1], "mlp", "moe")
LIMITED = ("sliding", "chunked")


@dataclass(frozen=True)
class AttentionLayers:
    """Attention layers that are equal; sizes are tensor elements."""

    heads: int
    kv_heads: int
    key_size: int  # of a head
    value_size: int  # of a head
    latent: int  # of multi-head latent attention: cached per token, once for all heads; else 0
    window: int  # tokens that a layer keeps and reads; 0: all of a row
    number: int = 1

    def cache_elements(self, tokens: float, tensor_parallel: int) -> float:
        """Return the elements that these layers keep of a row on one of an engine's GPUs, which split the heads."""
        kept = min(tokens, self.window or tokens)
        split = max(1, self.kv_heads // tensor_parallel) * (self.key_size + self.value_size)
        return self.number * kept * (self.latent or split)

    @property
    def width(self) -> int:
        """Return the elements of a token's queries, keys, values and outputs."""
        return (self.heads + self.kv_heads) * (self.key_size + self.value_size)


@dataclass(frozen=True)
class ModelLayers:
    """Layers of a model by what they keep of a row."""

    attention: tuple[AttentionLayers, ...]
    recurrent: int  # layers with a state
    state: int  # elements of 2 bytes that such a layer keeps of a row

    def cache_elements(self, tokens: float, tensor_parallel: int = 1) -> float:
        """Return the elements that an engine keeps of a row with so many tokens, on one of its GPUs."""
        states = self.recurrent * self.state / tensor_parallel
        return states + sum(each.cache_elements(tokens, tensor_parallel) for each in self.attention)

    def splits_into(self, tensor_parallel: int) -> bool:
        """Return whether vLLM divides the attention heads between so many GPUs."""
        for each in self.attention:
            shared = each.latent or not each.kv_heads % tensor_parallel
            if each.heads % tensor_parallel or not (shared or not tensor_parallel % each.kv_heads):
                return False
        return True


def first_of(text: Any, *names: str) -> Any:
    """Return the first entry of a config that is there and not 0; else 0."""
    return next((value for name in names if (value := getattr(text, name, None))), 0)


def layers_of(text: Any) -> ModelLayers:
    """
    Read the layers of a language model.

    Args:
        text (`~transformers.PreTrainedConfig`):
            Config of the language model, `get_text_config()` of a model of texts and images.

    Raises:
        `AttributeError`, `RuntimeError` or `TypeError`: if the config lacks a number, or has others for each layer.
    """
    count = text.num_hidden_layers
    limit = first_of(text, "sliding_window", "attention_chunk_size")
    # without kinds, all layers have the window
    kinds = (
        first_of(text, "layer_types", "layers_block_type") or ["sliding" if limit else ""] * count
    )
    # the last ones read the caches of layers before them
    own = count - first_of(text, "num_kv_shared_layers")
    # sizes may differ, as in Gemma 4
    configs = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text] * count
    found = Counter(
        _attention(each, limit * any(word in kind for word in LIMITED))
        for kind, each in zip(kinds[:own], configs, strict=False)
        if not any(word in kind for word in NO_ATTENTION)
    )
    recurrent = sum(any(word in kind for word in RECURRENT) for kind in kinds)
    return ModelLayers(
        tuple(replace(each, number=number) for each, number in found.items()),
        recurrent,
        _state(text) if recurrent else 0,
    )


def experts_of(text: Any) -> tuple[int, int]:
    """Return the experts of a layer and those of a token, without shared ones; zeros for a dense model."""
    number = first_of(text, *EXPERT_COUNTS)
    return number, number and (first_of(text, *EXPERTS_OF_A_TOKEN) or number)


def _attention(layer: Any, window: int) -> AttentionLayers:
    heads = layer.num_attention_heads
    latent = first_of(layer, "kv_lora_rank")
    size = first_of(layer, "head_dim") or layer.hidden_size // heads
    return AttentionLayers(
        heads=heads,
        kv_heads=first_of(layer, "num_key_value_heads") or heads,
        # `head_dim` of such a config is that of the rotary part
        key_size=layer.qk_nope_head_dim + layer.qk_rope_head_dim if latent else size,
        value_size=layer.v_head_dim if latent else size,
        latent=latent and latent + layer.qk_rope_head_dim,
        window=window,
    )


def _state(text: Any) -> int:
    """Return the elements that a recurrent layer keeps of a row: a matrix per head, and inputs of its convolution.

    Gated delta nets and Mamba 2 have heads, and groups with keys of their own; Mamba 1 has one value a channel, and a
    convolution alone has no matrix.
    """
    heads = first_of(
        text, "linear_num_value_heads", "linear_num_heads", "mamba_n_heads", "mamba_num_heads"
    )
    size = first_of(
        text, "linear_value_head_dim", "linear_head_dim", "mamba_d_head", "mamba_head_dim"
    )
    channels = heads * size or (first_of(text, "mamba_expand") or 1) * text.hidden_size
    depth = first_of(
        text, "linear_key_head_dim", "linear_head_dim", "mamba_d_state", "ssm_state_size"
    )
    groups = first_of(
        text, "linear_num_key_heads", "linear_num_heads", "mamba_n_groups", "n_groups"
    )
    inputs = first_of(text, "linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", "conv_L_cache")
    # elements of 4 bytes count twice
    of_two = 2 if first_of(text, "mamba_ssm_dtype", "mamba_ssm_cache_dtype") == "float32" else 1
    return of_two * channels * depth + max(0, inputs - 1) * (channels + 2 * groups * depth)
