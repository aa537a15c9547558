"""Outline of a trainer's model: config and modules without weights, from which engines start before it is loaded."""

import copy
from contextlib import suppress
from typing import Any

import torch
import transformers
from transformers import AutoProcessor, GenerationConfig, PreTrainedConfig

from .call_checks import Call, config_of, loaded_dtype


def outline(args: Any, call: Call) -> tuple[Any, Any]:
    """
    Return the model that TRL will load and wrap, without its weights, and its processor. It opens no weights file.

    The modules are on the meta device: PEFT decides on them which layers get an adapter, and of which rank. It is no
    collective, because no class is built inside DeepSpeed's `zero.Init`, as `from_pretrained` would do.

    Args:
        args ([`~transformers.TrainingArguments`]):
            Training arguments of the trainer.
        call (`Call`):
            All arguments of the trainer, by name.
    """
    model, adapter = call["model"], call.get("peft_config")
    given = dict(args.model_init_kwargs or {})
    if isinstance(model, str):
        name, model = model, _outline_of_name(model, args, given)
    else:
        name = model.config._name_or_path
        if adapter is not None:  # which must not be added to the user's own model now
            model = _outline_of(type(model), copy.deepcopy(model.config), model.generation_config)
    if adapter is not None:
        from peft import get_peft_model

        with torch.device("meta"):
            model = get_peft_model(model, copy.deepcopy(adapter))
    processor = call.get("processing_class")
    if processor is None:
        processor = AutoProcessor.from_pretrained(
            name, revision=given.get("revision"), trust_remote_code=args.trust_remote_code
        )
    return model, processor


def _outline_of_name(name: str, args: Any, given: dict[str, Any]) -> Any:
    """Return the outline of a model that TRL loads with `model_init_kwargs`, by TRL's rules for class and dtype."""
    config = config_of(name, args)
    dtype = loaded_dtype(config, args)
    for part in (config, *(getattr(config, key) for key in config.sub_configs)):
        if part is not None:
            part.dtype = dtype
    generation_config = None
    with suppress(OSError):  # without such a file, it is made from the config
        generation_config = GenerationConfig.from_pretrained(name, **given)
    return _outline_of(getattr(transformers, config.architectures[0]), config, generation_config)


def _outline_of(kind: type[Any], config: PreTrainedConfig, generation_config: Any) -> Any:
    with torch.device("meta"):
        model = kind(config).to(config.dtype)
    model.generation_config = generation_config or model.generation_config
    return model
