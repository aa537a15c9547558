"""Outline of a trainer's model: config and modules without weights, from which engines start before it is loaded."""

import copy
from contextlib import suppress
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoProcessor, GenerationConfig, PreTrainedModel

HUB_ARGUMENTS = ("revision", "token", "cache_dir", "subfolder")


def outline(args: Any, call: dict[str, Any]) -> tuple[Any, Any]:
    """
    Return the model that TRL will load and wrap, without its weights, and its processor. It opens no weights file.

    The modules are on the meta device, because PEFT decides on them which layers get an adapter of which rank.
    No collective: the class is called directly, and not inside DeepSpeed's `zero.Init`, as `from_pretrained` would.

    Args:
        args ([`~transformers.TrainingArguments`]):
            Training arguments of the trainer.
        call (`dict[str, Any]`):
            All arguments of the trainer, by name.
    """
    model, adapter = call["model"], call.get("peft_config")
    given = dict(getattr(args, "model_init_kwargs", None) or {})
    revision = None
    if isinstance(model, str):
        given.setdefault("trust_remote_code", args.trust_remote_code)
        revision = given.get("revision")
        name, model = model, _named(model, given)
    else:
        name = model.config._name_or_path
        if adapter is not None:
            model = _rebuilt(model)
    if adapter is not None:
        from peft import get_peft_model

        with torch.device("meta"):
            model = get_peft_model(model, copy.deepcopy(adapter))
    processor = call.get("processing_class")
    if processor is None:
        processor = AutoProcessor.from_pretrained(
            name,
            revision=revision,
            truncation_side="left",
            padding_side="left",
            trust_remote_code=args.trust_remote_code,
        )
    return model, processor


def _named(name: str, given: dict[str, Any]) -> PreTrainedModel:
    """Return the outline of a model that TRL loads by name, with `model_init_kwargs`."""
    dtype = given.pop("dtype", "float32")  # TRL's default
    config, _ = AutoConfig.from_pretrained(name, return_unused_kwargs=True, **given)
    if dtype in ("auto", None):
        dtype = config.dtype
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    for part in (config, *(getattr(config, key) for key in config.sub_configs)):
        if part is not None:
            part.dtype = dtype
    model = _built(getattr(transformers, config.architectures[0]), config, dtype)
    of_the_hub = {key: given[key] for key in HUB_ARGUMENTS if key in given}
    with suppress(OSError):  # without such a file, the one made from the config stays
        model.generation_config = GenerationConfig.from_pretrained(name, **of_the_hub)
    return model


def _rebuilt(model: PreTrainedModel) -> PreTrainedModel:
    """Return the outline of a loaded model, into which PEFT may put its layers."""
    outlined = _built(type(model), copy.deepcopy(model.config), model.dtype)
    outlined.generation_config = model.generation_config
    return outlined


def _built(kind: type[Any], config: Any, dtype: torch.dtype) -> Any:
    with torch.device("meta"):
        return kind(config).to(dtype)
