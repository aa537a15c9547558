"""Values that DeepSpeed's config and the trainer's arguments both have are compared before a model loads."""

import gc
import inspect
import json
import re
from types import SimpleNamespace

import check_kit
import pytest
from check_kit import TWO_NODES, launched, only_problem
from refusals import refused
from transformers.integrations import deepspeed, is_deepspeed_zero3_enabled
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from trl_multinode.deepspeed_values import (
    COMPARED,
    OF_SCHEDULER,
    check_deepspeed_values,
    differences,
)

quiet_machine, write = check_kit.quiet_machine, check_kit.write

ARGUMENTS = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0, "learning_rate": 1e-6,
    "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0, "save_on_each_node": False,
    "fp16": False, "fp16_full_eval": False, "bf16": True, "bf16_full_eval": False, "max_steps": 100,
    "warmup_steps": 10,
}  # fmt: skip
# Key -> value of the file that differs, one that does not, and the argument
PAIRS = {
    "train_micro_batch_size_per_gpu": (2, 4, "per_device_train_batch_size"),
    "gradient_accumulation_steps": (1, 2, "gradient_accumulation_steps"),
    "train_batch_size": (100, 4 * 2 * 7, "train_batch_size (calculated)"),
    "gradient_clipping": (0.5, 1.0, "max_grad_norm"),
    "optimizer.params.lr": (1e-5, 1e-6, "learning_rate"),
    "optimizer.params.betas": ([0.9, 0.95], [0.9, 0.999], "adam_beta1+adam_beta2"),
    "optimizer.params.eps": (1e-6, 1e-8, "adam_epsilon"),
    "optimizer.params.weight_decay": (0.1, 0.0, "weight_decay"),
    "scheduler.params.warmup_max_lr": (1e-5, 1e-6, "learning_rate"),
    "scheduler.params.total_num_steps": (50, 100, "max_steps"),
    "scheduler.params.warmup_num_steps": (5, 10, "warmup_steps"),
    "fp16.enabled": (True, False, "fp16|fp16_full_eval"),
    "bf16.enabled": (False, True, "bf16|bf16_full_eval"),
}


def config_with(key: str, value: object) -> dict:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def test_these_are_all_pairs_that_transformers_compares():
    source = inspect.getsource(HfTrainerDeepSpeedConfig)
    compared = set(re.findall(r"self\.fill_match\(\s*\"([\w.]+)\"", source))
    assert compared == PAIRS.keys() and {key.split(".")[0] for key in compared} == set(COMPARED)
    assert OF_SCHEDULER.keys() <= compared


@pytest.mark.parametrize("key", PAIRS)
def test_each_pair_is_compared_and_auto_or_an_unknown_argument_differs_from_nothing(key):
    differing, equal, argument = PAIRS[key]
    (found,) = differences(config_with(key, differing), ARGUMENTS, world_size=7)
    assert (found.key, found.value, found.argument) == (key, differing, argument)
    for config in (config_with(key, equal), config_with(key, "auto"), {}):
        assert differences(config, ARGUMENTS, world_size=7) == []
    assert differences(config_with(key, differing), {}, world_size=7) == []


def test_the_config_under_which_models_are_loaded_stays_that_of_the_launch():
    """transformers keeps the newest one: ZeRO-3 would load models with the compared one, or without any."""
    of_the_launch = HfTrainerDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    differences(
        config_with("train_batch_size", "auto") | {"gradient_clipping": 0.5},
        ARGUMENTS,
        world_size=7,
    )
    gc.collect()
    try:
        assert (
            deepspeed._hf_deepspeed_config_weak_ref() is of_the_launch
            and is_deepspeed_zero3_enabled()
        )
    finally:
        deepspeed.unset_hf_deepspeed_config()


def test_a_trainer_names_all_differences_before_a_model_loads():
    config = config_with("optimizer.params.lr", 1e-5) | {"gradient_clipping": 0.5}
    plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(config=config))
    args = SimpleNamespace(**ARGUMENTS, world_size=7, deepspeed_plugin=plugin)
    with refused("deepspeed", "`auto`"):
        check_deepspeed_values(args)
    args.deepspeed_plugin = None
    check_deepspeed_values(args)
    assert config["gradient_clipping"] == 0.5 and "auto" not in str(config)  # compared on a copy


def test_a_check_of_the_launch_finds_them_too(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    section = {"deepspeed_multinode_launcher": "standard", "deepspeed_config_file": "ds.json"}
    script = tmp_path / "train.py"
    script.write_text(
        "from trl import ModelConfig, ScriptArguments, TrlParser\n"
        "from trl_multinode import GRPOConfig\n"
        "parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))\n"
        "script_args, args, model_args = parser.parse_args_and_config()\n"
    )
    words = [str(script), "--output_dir", "o", "--dataset_name", "d", "--learning_rate", "1e-6"]
    for rate in (1e-5, "auto", 1e-6):
        optimizer = {"type": "AdamW", "params": {"lr": rate}}
        (tmp_path / "ds.json").write_text(
            json.dumps({"zero_optimization": zero, "optimizer": optimizer})
        )
        path = write(deepspeed_config=section)
        if rate == 1e-5:
            problem = only_problem(path, *words)
            assert (
                "`optimizer.params.lr`" in problem.what
                and "`learning_rate` (got 1e-05, expected 1e-06" in problem.what
            )
            assert '"lr": "auto"' in problem.cure
        else:
            launched(path, *words)
    launched(write(deepspeed_config=TWO_NODES["deepspeed_config"]), *words)
