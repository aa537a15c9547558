"""What node mode cannot train, said before a weights file is opened."""

from typing import Any

from transformers import AutoConfig

from .errors import ConfigurationError


def check_model(model, args, call: dict[str, Any]) -> None:
    """
    Args:
        model (`str` or `PreTrainedModel`):
            The trainer's; of a name only the config is read.
        args ([`~transformers.TrainingArguments`]):
            The trainer's.
        call (`dict[str, Any]`):
            All its arguments, by name.

    Raises:
        `ConfigurationError`: with the way out.
    """
    check_quantization(config_of(model), args, call)
    check_dora(model, args, call.get("peft_config"))


def config_of(model):
    return AutoConfig.from_pretrained(model) if isinstance(model, str) else model.config


def check_quantization(config, args, call: dict[str, Any]) -> None:
    """A quantized base has packed weights under the names of whole ones: an engine would load them, or fail late."""
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


def check_dora(model, args, peft_config) -> None:
    """PEFT's DoRA (0.21) reads weights outside of their layer's forward, where ZeRO-3 has only shards of them."""
    configs = [peft_config] if peft_config else list(getattr(model, "peft_config", {}).values())
    plugin = getattr(args, "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage == 3 and any(getattr(one, "use_dora", False) for one in configs):
        raise ConfigurationError(
            "PEFT's DoRA cannot be trained under ZeRO-3 (`IndexError: tuple index out of range` in its forward). Use "
            "ZeRO-2 (`zero_stage: 2` in the accelerate config), or rsLoRA (`use_rslora=True`)."
        )
