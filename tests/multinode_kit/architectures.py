"""Small models of every tested architecture, from the hub if it is reachable and usable, else built here.

A new architecture is one entry of `ARCHITECTURES`. Tests of names, reloads, log-probs, adapters and pages take it from
there; `make models` runs them and writes docs/evidence/models.md.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import transformers
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PreTrainedModel

from .models import tiny_tokenizer

HUB = "trl-internal-testing"
LEAST_HEAD_DIM = 32  # smallest for vLLM's CPU attention; the hub's `tiny-*` models have 2
VOCABULARY = 300  # not a multiple of 64, so vLLM pads it
ROUTERS = ("mlp.gate.weight", "mlp.router.weight", "block_sparse_moe.gate.weight")
ENTROPY, MOST_SCALINGS = 3.5, 24  # nats; Gemma 2 caps its logits and stays above
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
_UNTIED = _TEXT | {"tie_word_embeddings": False}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
# a dense layer, then experts beside one that all tokens share
_ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
# vLLM's CPU kernel of rotary positions expects the whole query, and gets its last part: rows were 0.1 to 0.9 off,
# those of an engine that had loaded a checkpoint too
_PLAIN_POSITIONS = {"compilation_config": {"custom_ops": ["none"]}}
# sizes for which vLLM's CPU build has a kernel
_LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
_WINDOW = {"sliding_window": 16}  # shorter than the tests' sequences
_LOCAL_GLOBAL = {"layer_types": ["sliding_attention", "full_attention"]}
_GEMMA = _TEXT | _WINDOW | {"query_pre_attn_scalar": 32} | _LOCAL_GLOBAL
_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
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
    """Classes, config and hub models of one architecture.

    Args:
        title (`str`):
            Name in pages.
        name (`str`):
            Start of the names of its model and config in transformers: `Qwen3` for `Qwen3ForCausalLM`, `Qwen3Config`.
        config (`dict[str, Any]`):
            Keywords of the config.
        special (`str`, *optional*):
            What another architecture does not have, for pages.
        dtype (`torch.dtype`, *optional*):
            Dtype of trainer and engine: bfloat16 where vLLM's CPU build has no kernel for float32.
        tiny (`str`, *optional*), small (`str`, *optional*):
            Models on the hub, for tests without and with vLLM, whose CPU attention wants a larger `head_dim`.
        model_cls (`str`, *optional*), config_cls (`str`, *optional*):
            Names in transformers that do not follow from `name`.
        adapted (`str`, *optional*):
            Layers that get an adapter, as a regular expression of the ends of their names.
        engine_args (`dict[str, Any]`, *optional*):
            Arguments of vLLM without which its CPU build computes something else than transformers.
        processing_class (`Callable[[], Any]`, *optional*):
            Builds its tokenizer or processor.
    """

    title: str
    name: str
    config: dict[str, Any]
    special: str = ""
    dtype: torch.dtype = torch.float32
    tiny: str | None = None
    small: str | None = None
    model_cls: str = ""
    config_cls: str = ""
    adapted: str = "(q|v|o)_proj"
    engine_args: dict[str, Any] = field(default_factory=dict)
    processing_class: Callable[[], Any] = tiny_tokenizer

    @property
    def dtype_name(self) -> str:
        """Dtype as vLLM's arguments have it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def has_experts(self) -> bool:
        """Whether a token goes through some of several experts."""
        return bool(self.config.get("num_experts_per_tok"))


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
        "Qwen2", "Qwen2", _TEXT | {"tie_word_embeddings": True}, "tied head",
        tiny="tiny-Qwen2ForCausalLM-2.5", small="small-Qwen2ForCausalLM-2.5",
    ),
    "qwen3": Architecture(
        "Qwen3", "Qwen3", _UNTIED, "norms of queries and keys",
        tiny="tiny-Qwen3ForCausalLM", small="small-Qwen3ForCausalLM",
    ),
    "llama": Architecture("Llama", "Llama", _UNTIED, tiny="tiny-LlamaForCausalLM-3.2"),
    "phi3": Architecture(
        "Phi-3", "Phi3", _UNTIED, "queries, keys and values in one matrix", tiny="tiny-Phi3ForCausalLM",
        adapted="(qkv|o)_proj",
    ),
    "olmo3": Architecture("OLMo 3", "Olmo3", _UNTIED | _WINDOW | _LOCAL_GLOBAL, "sliding window"),
    "ministral3": Architecture("Ministral 3", "Ministral3", _UNTIED, "scaled positions"),
    "granite": Architecture("Granite", "Granite", _UNTIED, "four multipliers"),
    "starcoder2": Architecture("Starcoder2", "Starcoder2", _UNTIED, "biases, LayerNorm"),
    # vLLM's window is one token longer than that of transformers
    "cohere2": Architecture(
        "Cohere2", "Cohere2", _TEXT | _WINDOW | _LOCAL_GLOBAL, "attention beside the MLP, layers without positions",
        engine_args={"hf_overrides": {"sliding_window": 15}},
    ),
    "gemma2": Architecture(
        "Gemma 2", "Gemma2", _GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0},
        "scaled embeddings, tied head, norms of 1 + w, sliding window, capped logits and scores",
        tiny="tiny-Gemma2ForCausalLM",
    ),
    "gemma3": Architecture(
        "Gemma 3, text", "Gemma3", _GEMMA, "the same without caps, norms of queries and keys",
        config_cls="Gemma3TextConfig", tiny="tiny-Gemma3ForCausalLM",
    ),
    "gemma4": Architecture(
        "Gemma 4, text", "Gemma4",
        _TEXT | _WINDOW | _LOCAL_GLOBAL
        | {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16},
        "embeddings of each layer, scales of layers",
        config_cls="Gemma4TextConfig",
    ),
    "mixtral": Architecture(
        "Mixtral", "Mixtral", _UNTIED | {"num_local_experts": 4, "num_experts_per_tok": 2}, "loaded expert by expert"
    ),
    "olmoe": Architecture("OLMoE", "Olmoe", _UNTIED | {"num_experts": 4, "num_experts_per_tok": 2}, "experts"),
    "qwen2_moe": Architecture(
        "Qwen2-MoE", "Qwen2Moe", _UNTIED | _EXPERTS | {"shared_expert_intermediate_size": 64},
        "an expert that all tokens share", tiny="tiny-Qwen2MoeForCausalLM",
    ),
    "qwen3_moe": Architecture(
        "Qwen3-MoE", "Qwen3Moe", _UNTIED | _EXPERTS, "experts in fused tensors", tiny="tiny-Qwen3MoeForCausalLM"
    ),
    "glm4_moe": Architecture(
        "GLM-4 MoE", "Glm4Moe", _UNTIED | _ROUTED | {"use_qk_norm": True},
        "float32 bias of the router", tiny="tiny-Glm4MoeForCausalLM",
    ),
    "gpt_oss": Architecture(
        "gpt-oss", "GptOss",
        _UNTIED | _WINDOW | _LOCAL_GLOBAL
        | {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
        "attention sinks, biases of experts; a loader that bypasses the reload", tiny="tiny-GptOssForCausalLM",
    ),
    "deepseek_v2": Architecture(
        "DeepSeek-V2", "DeepseekV2", _UNTIED | _ROUTED | _LATENT | {"q_lora_rank": None, "topk_method": "greedy"},
        "latent attention, a dense layer before the experts", torch.bfloat16, adapted="(q|o)_proj",
        engine_args=_PLAIN_POSITIONS,
    ),
    "deepseek_v3": Architecture(
        "DeepSeek-V3", "DeepseekV3",
        _UNTIED | _ROUTED | _LATENT | {"q_lora_rank": 32, "n_group": 2, "topk_method": "noaux_tc"}
        | {"scoring_func": "sigmoid"},
        "groups of experts, float32 bias of the router", torch.bfloat16, tiny="tiny-DeepseekV3ForCausalLM",
        adapted="(q_b|o)_proj", engine_args=_PLAIN_POSITIONS,
    ),
    "granite_hybrid": Architecture(
        "Granite 4 hybrid", "GraniteMoeHybrid",
        {
            "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "shared_intermediate_size": 128,
            "num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "num_attention_heads": 2,
            "num_key_value_heads": 2, "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 4,
            "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
            "mamba_chunk_size": 16, "max_position_embeddings": 1024, "position_embedding_type": None,
            "tie_word_embeddings": True, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
        },
        "Mamba 2: a view of a weight", torch.bfloat16,
    ),
    "qwen3_next": Architecture(
        "Qwen3-Next", "Qwen3Next",
        _UNTIED | _DELTA_NET | _EXPERTS | {"shared_expert_intermediate_size": 64, "decoder_sparse_step": 1},
        "gated delta net and experts", torch.bfloat16,
    ),
    "qwen3_5": Architecture(
        "Qwen3.5, text", "Qwen3_5", _UNTIED | _DELTA_NET, "gated delta net", torch.bfloat16,
        config_cls="Qwen3_5TextConfig",
    ),
    "idefics3": Architecture(
        "Idefics3", "Idefics3",
        {
            "text_config": _UNTIED | {"model_type": "llama"},
            "vision_config": _VISION,
            "image_token_id": 258,  # the first id after the tiny tokenizer's 258
            "scale_factor": SHUFFLE,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
        },
        "vision tower, images in the prompt", tiny="tiny-Idefics3ForConditionalGeneration",
        model_cls="Idefics3ForConditionalGeneration", adapted=r"text_model\..*(q|v|o)_proj",
        processing_class=tiny_idefics3_processor,
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
    Load a small model of `architecture` from the hub, else build it here; report the choice and its reason.

    Args:
        architecture (`str`):
            A key of `ARCHITECTURES`.
        engine (`bool`, *optional*, defaults to `True`):
            Set it if vLLM runs the model on a CPU, which requires a `head_dim` of 32 or more.
        say (`Callable[[str], None]`, *optional*, defaults to `print`):
            Function that prints a line.
    """
    known = ARCHITECTURES[architecture]
    named = (known.small or known.tiny) if engine else known.tiny
    name = f"{HUB}/{named}"
    reason = _obstacle(name, engine) if named else "the hub has no model of this kind for tests"
    if reason is None:
        say(f"[architectures] {architecture}: {name} from the hub")
        model = model_class(known).from_pretrained(
            name, dtype=known.dtype, attn_implementation="eager"
        )
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


def model_class(known: Architecture) -> type[PreTrainedModel]:
    """Return the class of the model in transformers."""
    return getattr(transformers, known.model_cls or f"{known.name}ForCausalLM")


def config_of(known: Architecture) -> transformers.PreTrainedConfig:
    """Return the config of the model that is built here."""
    return getattr(transformers, known.config_cls or f"{known.name}Config")(**known.config)


def built_here(known: Architecture, seed: int = 0) -> PreTrainedModel:
    """Build a model with random weights, save and load it, because only a load records how a checkpoint names them.

    Its attention is eager, because the other kinds ignore Gemma's cap. With the initial deviation of 0.02 neither
    a position nor a token moves a log-prob visibly, and experts are chosen by rounding.
    """
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    config = config_of(known)
    model = model_class(known)._from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.normal_(std=0.1)
            elif name.endswith(ROUTERS):
                # a smaller deviation gives near ties, a larger one saturates sigmoids
                tensor.normal_(std=0.25)
            elif tensor.ndim > 1 and isinstance(tensor, torch.nn.Parameter):
                tensor.mul_(4)
        for _ in range(MOST_SCALINGS):
            if entropy(model) < ENTROPY:
                break
            model.get_output_embeddings().weight.mul_(1.25)
    torch.random.set_rng_state(state)
    with tempfile.TemporaryDirectory() as folder:
        # each rank has a folder of its own, and transformers would write on rank 0 alone
        with mock.patch.object(model, "should_save_on_this_rank", return_value=True):
            model.to(known.dtype).save_pretrained(folder)
        return (
            type(model)
            .from_pretrained(folder, dtype=known.dtype, attn_implementation="eager")
            .eval()
        )


def entropy(model: PreTrainedModel) -> float:
    """Return the mean entropy of the next token, in nats; an untrained model has log(300) = 5.7."""
    logprobs = model(torch.arange(2, 34)[None]).logits[0].float().log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1).mean().item()
