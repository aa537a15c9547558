"""Pre-flight checks of a trainer's arguments, before any weights file is opened."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, TrainingArguments

from .errors import ConfigurationError
from .node_settings import NodeSettings, check_settings
from .run.reporter import warn
from .saving.hub import check_push


def check_call(host: Any, args: TrainingArguments, call: dict[str, Any]) -> None:
    """
    Check that node mode supports a trainer's arguments.

    Args:
        host ([`NodeHost`]):
            Host of this rank.
        args ([`~transformers.TrainingArguments`]):
            Training arguments of the trainer.
        call (`dict[str, Any]`):
            All arguments of the trainer, by name. If `model` is a name, only its config is loaded.

    Raises:
        `ConfigurationError`: if an argument is not supported; the message names the cure.
    """
    check_settings(args)
    check_parallelism(args, call["model"])
    check_dataset(call.get("train_dataset"), args)
    check_foreseeable(args, call)
    check_in_flight(args, call.get("train_dataset"))
    check_fsdp_version()
    check_push(args, call)
    check_model(call["model"], args, call)
    if call.get("tools") or call.get("environment_factory"):
        context = getattr(config_of(call["model"], args).get_text_config(), "max_position_embeddings", 0)
        host.check_context(context)
    if getattr(args, "vllm_enable_sleep_mode", False):
        warn("vllm_enable_sleep_mode does nothing in node mode: any rank may send a request at any time.")


def check_fsdp_version(environ: Mapping[str, str] = os.environ) -> None:
    """Reject FSDP1, accelerate's default: its flat parameters lack the names and shapes that an engine loads."""
    if environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" and environ.get("FSDP_VERSION", "1") == "1":
        raise ConfigurationError("Node mode sends weights of FSDP2, not of FSDP1. Write `fsdp_version: 2` under "
                                 "`fsdp_config` in the accelerate config.")  # fmt: skip


def check_parallelism(
    args: TrainingArguments, model: str | PreTrainedModel, environ: Mapping[str, str] = os.environ
) -> None:
    """Reject tensor, context and sequence parallelism: all ranks of a group train the same rows, and in node mode each
    rank would generate other completions for them."""
    if found := [*group_sizes(args, model, environ), *parallel_loading(args)]:
        raise ConfigurationError(
            f"In node mode every rank has rows of its own, and with {found[0]} ranks would share rows but not their "
            "completions. Leave it out: ZeRO-3 or FSDP2 shards the model over all ranks, and "
            "`vllm_tensor_parallel_size` splits it over an engine's GPUs."
        )


def group_sizes(args: TrainingArguments, model: str | PreTrainedModel, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the settings, with their values, that make groups of ranks train the same rows."""
    config = getattr(args, "parallelism_config", None)
    launched = config is None and environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() == "true"
    deepspeed = getattr(getattr(args, "deepspeed_plugin", None), "deepspeed_config", None) or {}
    sizes = {
        "tensor_parallel.autotp_size": deepspeed.get("tensor_parallel", {}).get("autotp_size"),
        "model.tp_size": getattr(model, "tp_size", None),
    }
    for name in ("tp_size", "cp_size", "sp_size"):
        of_launch = environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1") if launched else "1"
        sizes[f"parallelism_config.{name}"] = getattr(config, name, None) or int(of_launch)
    return (f"`{name}={size}`" for name, size in sizes.items() if (size or 1) > 1)


def parallel_loading(args: TrainingArguments) -> Iterator[str]:
    """Yield the arguments with which transformers loads a model under tensor or expert parallelism."""
    init = getattr(args, "model_init_kwargs", None) or {}
    return (
        f"`{name}` in `model_init_kwargs`" for name in ("tp_plan", "tp_size", "distributed_config") if name in init
    )


def check_foreseeable(args: TrainingArguments, kwargs: dict[str, Any]) -> None:
    """Raise `ConfigurationError` if engines generate ahead but completions depend on more than the dataset row."""
    settings = NodeSettings.of(args)
    ahead = "weight_update='in_flight'" if settings.in_flight else "max_staleness=1"
    instead = "weight_update='drain'" if settings.in_flight else "max_staleness=0"
    for name in ("rollout_func", "environment_factory"):
        if kwargs.get(name) and (settings.max_staleness or settings.in_flight):
            raise ConfigurationError(
                f"`{ahead}` generates from the dataset's prompts before `{name}` is called. Use `{instead}` with it."
            )


def check_in_flight(args: TrainingArguments, dataset: Any) -> None:
    """Raise `ConfigurationError` if `weight_update='in_flight'` cannot work with the training dataset."""
    if dataset is None or not NodeSettings.of(args).in_flight:
        return
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ConfigurationError(
            f"`weight_update='in_flight'` needs a dataset with an index, got a stream ({type(dataset).__name__}): a "
            "resumed run must find the rows of its open groups again. Use a `Dataset`, or `weight_update='drain'`."
        )
    if images := {"image", "images"}.intersection(getattr(dataset, "column_names", None) or ()):
        raise ConfigurationError(
            f"`weight_update='in_flight'` generates from token ids, and TRL builds prompts with images (column "
            f"{min(images)!r}) only while it scores them. Use `weight_update='drain'`."
        )


def check_dataset(dataset: Any, args: TrainingArguments) -> None:
    """Raise `ConfigurationError` if the dataset is empty or has fewer prompts than a generation batch takes."""
    if dataset is None or not hasattr(dataset, "__len__"):
        return
    per_prompt = getattr(args, "num_generations", 1)
    rows, how, lower = rows_per_round(args)
    if len(dataset) < rows // per_prompt:
        raise ConfigurationError(
            f"The training dataset has {len(dataset)} rows, one generation batch takes {rows // per_prompt} prompts "
            f"({how} {rows} / num_generations {per_prompt}). "
            f"Use more data, or lower `per_device_train_batch_size` or `{lower}`."
        )


def rows_per_round(args: TrainingArguments) -> tuple[int, str, str]:
    """Return the completions per generation batch over all ranks, a label for them, and the field that lowers them."""
    if hasattr(args, "steps_per_generation"):
        return args.generation_batch_size, "generation_batch_size", "steps_per_generation"
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    return rows, "rows of an optimizer step", "gradient_accumulation_steps"


def check_model(model: str | PreTrainedModel, args: TrainingArguments, call: dict[str, Any]) -> None:
    """Raise `ConfigurationError` if the weights cannot be sent or cannot be trained."""
    check_quantization(config_of(model, args), args, call)
    check_dora(model, args, call.get("peft_config"))


def config_of(model: str | PreTrainedModel, args: TrainingArguments) -> PreTrainedConfig:
    """Return the model's config; for a model name, load it with the arguments that TRL would use."""
    if not isinstance(model, str):
        return model.config
    given = getattr(args, "model_init_kwargs", None) or {}
    trusted = given.get("trust_remote_code", getattr(args, "trust_remote_code", False))
    of_the_hub = {name: given[name] for name in ("revision", "token", "cache_dir", "subfolder") if name in given}
    return AutoConfig.from_pretrained(model, trust_remote_code=trusted, **of_the_hub)


def check_quantization(config: PreTrainedConfig, args: TrainingArguments, call: dict[str, Any]) -> None:
    """Reject a quantized base: an engine would load its packed weights as unpacked ones, or fail late."""
    wanted = [
        call.get("quantization_config"),
        (getattr(args, "model_init_kwargs", None) or {}).get("quantization_config"),
        getattr(config, "quantization_config", None),
    ]
    if found := next((one for one in wanted if one), None):
        raise ConfigurationError(
            f"Node mode sends weights in the engine's dtype, and not quantized ones ({type(found).__name__}). Leave "
            "`quantization_config` out: with LoRA the base is frozen, and ZeRO-3 shards it over all ranks."
        )


def check_dora(model: str | PreTrainedModel, args: TrainingArguments, peft_config: Any) -> None:
    """Reject DoRA under ZeRO-3: PEFT 0.21 reads weights outside of their layer's forward, where they are sharded."""
    configs = [peft_config] if peft_config else list(getattr(model, "peft_config", {}).values())
    plugin = getattr(args, "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage == 3 and any(getattr(one, "use_dora", False) for one in configs):
        raise ConfigurationError(
            "PEFT's DoRA cannot be trained under ZeRO-3 (`IndexError: tuple index out of range` in its forward). Use "
            "ZeRO-2 (`zero_stage: 2` in the accelerate config), or rsLoRA (`use_rslora=True`)."
        )
