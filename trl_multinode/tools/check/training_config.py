"""Build the script's training config as a rank does, and run the checks that need no model and no device."""

import json
import warnings
from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import patch_environment

from ...call_checks import (
    check_dora,
    check_own_folders,
    check_parallelism,
    check_quantization,
)
from ...libraries import replaced
from ...node_settings import check_settings
from ...saving.hub import check_push
from ...settings import check_values
from .deepspeed import FIELDS
from .launch import Launch, Problem, problem_of
from .rules_batch import batch_problems

MAY_BE_FILES = ("accelerator_config", "deepspeed", "fsdp_config")


def config_problems(config: Any, launch: Launch) -> Iterator[Problem]:
    """Complete a training config in place, and yield what itself, TRL and node mode refuse.

    Args:
        config (`~transformers.TrainingArguments`):
            Config with the parsed arguments, whose `__post_init__` was not called.
        launch ([`Launch`]):
            Launch of this node, with the script's arguments.
    """
    if invalid := list(_invalid_json(config)):
        yield from invalid
        return
    script = launch.script
    with _as_rank(config, launch):
        try:
            if script.batch and any(batch_problems(script.batch, launch.num_ranks)):
                # `world_problems` reports the batch, for which TRL would raise first
                check_values(config, script.node_mode)
                return
            config.__post_init__()
            if hasattr(config, "vllm_mode"):
                check_settings(config)
            if script.node_mode:
                _check_call(config, launch)
            _check_tracker(config)
            _check_precision(config, launch)
        except ValueError as error:  # a `ConfigurationError`, or one of TRL or transformers
            yield problem_of(error)


def _invalid_json(config: Any) -> Iterator[Problem]:
    """Yield the dictionaries of a config whose text is none; transformers would read its characters as keys."""
    # not those of its fields, which transformers' parser changes to `str`
    hints = ChainMap(*(vars(kind).get("__annotations__", {}) for kind in type(config).__mro__))
    for name, text in vars(config).items():
        is_path = name in MAY_BE_FILES and not str(text).startswith("{")
        if not isinstance(text, str) or is_path or "dict" not in str(hints.get(name)):
            continue
        try:
            dict(json.loads(text))
        except (TypeError, ValueError) as error:
            yield Problem(
                f"`{name}` must be JSON of a dictionary, got {text!r} ({error})",
                "write names and texts in double quotes, and the whole in single quotes",
            )


@contextmanager
def _as_rank(config: Any, launch: Launch) -> Iterator[None]:
    """Let a config see the environment and the number of ranks, but no device: a login node may have no GPU."""
    from transformers import TrainingArguments

    # these two ask for a device
    vars(config).update(use_cpu=True, tf32=None)
    environment = {
        name: value
        for name, value in launch.environment.items()
        if name.startswith(("ACCELERATE_", "FSDP_")) and "PARALLELISM" not in name
    }
    environment[FIELDS] = ""
    if launch.deepspeed is None:  # `read_deepspeed` reports a config that cannot be built
        environment["ACCELERATE_USE_DEEPSPEED"] = "false"
    with (
        patch_environment(**environment),
        warnings.catch_warnings(action="ignore"),
        replaced(TrainingArguments, "device", torch.device("cpu")),
        replaced(TrainingArguments, "world_size", launch.num_ranks),
    ):
        yield


def _check_call(config: Any, launch: Launch) -> None:
    """Run the trainer's checks of its arguments, as far as file, flags and arguments decide them."""
    values = launch.script.values
    adapter = SimpleNamespace(use_dora=values.get("use_dora")) if values.get("use_peft") else None
    bits = next((name for name in ("load_in_4bit", "load_in_8bit") if values.get(name)), None)
    call = {
        "model": launch.script.model or "",
        "peft_config": adapter,
        "quantization_config": bits,
    }
    if config.fsdp and launch.args.use_deepspeed:
        raise ValueError(
            f"`fsdp` cannot work under DeepSpeed, which the file selects (got {config.fsdp!r}, expected none)"
        )
    check_parallelism(config, call["model"])
    check_own_folders(config, call, launch.num_nodes)
    check_quantization(SimpleNamespace(), config, call)
    check_dora(config, call)
    if launch.args.use_fsdp:  # `zero_problems` reports the key that a push needs under ZeRO-3
        check_push(config, call)


def _check_precision(config: Any, launch: Launch) -> None:
    """Refuse a file for another half precision than the script's arguments choose, which would win without a word."""
    chosen = next((name for name in ("bf16", "fp16") if getattr(config, name)), "no")
    given = launch.args.mixed_precision
    if given in ("bf16", "fp16") and chosen not in ("no", given):
        raise ValueError(
            f"`mixed_precision: {given}` of the file has no effect: the script's arguments choose {chosen} (TRL's "
            f"default is bf16). Write `mixed_precision: {chosen}` in the file, or pass `--{given} true` to the script"
        )


def _check_tracker(config: Any) -> None:
    from transformers.integrations import get_reporting_integration_callbacks

    try:
        get_reporting_integration_callbacks(config.report_to)
    except ValueError as error:
        raise ValueError(f"`report_to`: {error}") from error
