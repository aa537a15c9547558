"""Arguments of scripts for TRL that have another name today, or that nothing needs any more.

`trl-multinode migrate` changes a script by these tables, and an unknown argument is answered by them: the most similar
name would be a wrong one, such as `torch_compile` for `torch_dtype`.
"""

import difflib
from collections.abc import Iterable

# Former names in TRL and transformers -> today's
RENAMED = {
    "torch_dtype": "dtype",
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "warmup_ratio": "warmup_steps",
    "use_liger_loss": "use_liger_kernel",
    "wandb_log_unique_prompts": "log_unique_prompts",
    "push_to_hub_model_id": "hub_model_id",
    "tokenizer": "processing_class",
    "vllm_device": "vllm_devices",
    "vllm_max_model_len": "vllm_max_model_length",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
}
# Arguments that no longer exist, or that would keep a script from its node's engines -> the reason to delete them
SERVER = "each node's engines belong to its local main process, so there is no server"
REMOVED = {
    "use_vllm": "it is the default",
    "vllm_mode": "node mode is the default; a server or colocation would leave the reserved GPUs unused",
    "vllm_server_base_url": SERVER,
    "vllm_server_host": SERVER,
    "vllm_server_port": SERVER,
    "vllm_server_timeout": f"{SERVER}; `engine_start_timeout` and `engine_stall_timeout` are the limits",
    "vllm_group_port": SERVER,
    "vllm_enable_sleep_mode": "engines have GPUs of their own",
    "vllm_gpu_memory_utilization": "a reserved GPU gives 0.9 of its memory",
    "vllm_dtype": "the engines take that of the training; another one is `engine_kwargs={'dtype': ...}`",
    "max_prompt_length": "TRL no longer cuts prompts; `vllm_max_model_length` limits prompt and completion together",
    "overwrite_output_dir": "one run per folder; a relaunch resumes",
    "save_safetensors": "weights are always saved so",
    "logging_dir": "`report_to` and the variables of the tracker say where logs go",
    "include_tokens_per_second": "`perf/tokens_per_s` is always logged",
}


def hint(argument: str) -> str:
    """Return what became of an argument, as the end of a message; empty if that is not known."""
    name = argument.lstrip("-").partition("=")[0].replace("-", "_")
    if name in RENAMED:
        return f", which is `{RENAMED[name]}` now"
    return f": {REMOVED[name]}" if name in REMOVED else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return what became of a word, or the most similar known one, as the end of a message; empty without either."""
    return hint(word) or nearest(word, known)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the most similar known word, as the end of a message; empty without one."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {close[0]}?" if close else ""
