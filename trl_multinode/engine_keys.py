"""Keys of `generation_kwargs` and `engine_kwargs` that are refused, with the reason and the setting to use instead."""

import ast
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from .errors import ConfigurationError

REFUSED_GENERATION_KEYS = {
    "n": "the number of completions is `num_generations`",
    "seed": "use `rollout_seed`, which gives every row its own seed",
    "logprobs": "the trainer needs exactly the sampled token's log-prob",
} | dict.fromkeys(
    ("detokenize", "flat_logprobs", "output_kind"), "node mode sets it for every request"
)
NO_BEAMS = "vLLM's sampling has no beam search; leave it out"
# names of transformers and of older versions of vLLM that vLLM's `SamplingParams` lacks
FOREIGN_GENERATION_KEYS = {
    "do_sample": "vLLM always samples at a `temperature` above 0, and the trainer needs one; leave it out",
    "max_new_tokens": "use `max_completion_length`",
    "max_length": "use `max_completion_length`",
    "min_new_tokens": "use `min_tokens`",
    "min_length": "use `min_tokens`",
    "num_return_sequences": "the number of completions is `num_generations`",
    "stop_strings": "use `stop`",
    "eos_token_id": "an engine has the model's; use `stop_token_ids` for further ones",
    "pad_token_id": "engines do not pad; leave it out",
    "use_cache": "engines always have a cache; leave it out",
    "bad_words_ids": "use `bad_words`, a list of words",
    "suppress_tokens": "use `logit_bias`",
    "no_repeat_ngram_size": "vLLM has no such setting; `repetition_penalty` is the nearest",
    "guided_decoding": "use `structured_outputs`",
} | dict.fromkeys(
    ("num_beams", "num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping"),
    NO_BEAMS,
)
DTYPES = ("auto", "float32", "bfloat16", "float16")  # of an engine's weights
REFUSED_ENGINE_KEYS = {
    "model": "the engines serve the trainer's model",
    "tensor_parallel_size": "use `vllm_tensor_parallel_size`",
    "pipeline_parallel_size": "an engine's GPUs are `vllm_tensor_parallel_size`",
    "data_parallel_size": "use `num_engines`",
    "seed": "use the `seed` of the config, or `rollout_seed`, which gives every row its own seed",
    "enable_lora": "use `lora_sync`",
    "max_loras": "use `lora_sync`",
    "max_lora_rank": "it is that of the trained adapter",
    "load_format": "the trainer is the only source of weights",
    "logprobs_mode": "TRL's correction needs processed log-probs",
    "weight_transfer_config": "weights arrive by `weight_transport`",
    "worker_extension_cls": "weights arrive through the one of this library",
    **dict.fromkeys(
        ("kv_transfer_config", "kv_offloading_size", "kv_offloading_backend", "ec_transfer_config"),
        "after a sync this cache would still serve what older weights computed; leave it out, because a sync empties "
        "only the engine's own prefix cache",
    ),
}


def check_keys(generation_kwargs: dict | None, engine_kwargs: dict, node_mode: bool) -> None:
    """Raise `ConfigurationError` for a key that an engine would refuse, or that node mode sets itself.

    Args:
        generation_kwargs (`dict`, *optional*):
            Keywords of vLLM's `SamplingParams`, checked in node mode only.
        engine_kwargs (`dict`):
            Keywords of vLLM's `EngineArgs`.
        node_mode (`bool`):
            Whether the config selects node mode.
    """
    for key in (generation_kwargs or {}) if node_mode else ():
        if (reason := _no_sampling_key(key)) is not None:
            raise ConfigurationError(
                f"`generation_kwargs` may not contain {key!r} in node mode:",
                setting="generation_kwargs",
                got=key,
                cure=f"{reason}.",
            )
    if (dtype := engine_kwargs.get("dtype", "auto")) not in DTYPES:
        raise ConfigurationError(
            f"`dtype` in `engine_kwargs` must be one of {DTYPES}, got {dtype!r}.",
            setting="dtype",
            got=dtype,
            expected=DTYPES,
        )
    for key in engine_kwargs:
        reason = REFUSED_ENGINE_KEYS.get(key)
        if reason is None and node_mode:
            known = fields_in_vllm("engine/arg_utils.py", "EngineArgs", "AsyncEngineArgs")
            reason = _unknown_to("EngineArgs", key, known)
        if reason is not None:
            raise ConfigurationError(
                f"`engine_kwargs` may not contain {key!r}:",
                setting="engine_kwargs",
                got=key,
                cure=f"{reason}.",
            )


def _no_sampling_key(key: str) -> str | None:
    """Return the reason why an engine would refuse `key` in its sampling settings; `None` if it would not."""
    known = fields_in_vllm("sampling_params.py", "SamplingParams")
    if key in REFUSED_GENERATION_KEYS or key in known:
        return REFUSED_GENERATION_KEYS.get(key)
    return FOREIGN_GENERATION_KEYS.get(key) or _unknown_to("SamplingParams", key, known)


def _unknown_to(kind: str, key: str, known: frozenset[str]) -> str | None:
    """Return the reason why vLLM would refuse a key; `None` if it would not, or if its keys are not known."""
    if key in known or not known:
        return None
    near = get_close_matches(key, known, n=1)
    return f"vLLM's `{kind}` has no such setting" + (
        f"; the nearest is {near[0]!r}" if near else ""
    )


@cache
def fields_in_vllm(file: str, *kinds: str) -> frozenset[str]:
    """Read the fields of classes from vLLM's source, because an import of vLLM takes 7 to 13 s.

    Returns:
        `frozenset[str]`: the names of the installed version; empty if they cannot be found.
    """
    package = find_spec("vllm")
    if package is None or package.origin is None:
        return frozenset()
    source = Path(package.origin).parent / file
    tree = ast.parse(source.read_text() if source.is_file() else "")
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in kinds:
            fields = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
            names.update(map(ast.unparse, fields))
    return frozenset(name for name in names if not name.startswith("_"))
