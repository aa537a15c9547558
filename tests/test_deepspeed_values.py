"""Values that DeepSpeed's config and the trainer's arguments both have are compared before a model loads."""

import gc
import inspect
import json
import re
from types import SimpleNamespace

import check_kit
import pytest
import torch
from check_kit import TWO_NODES, launched, only_problem
from refusals import refused
from transformers.integrations import deepspeed, is_deepspeed_zero3_enabled
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from trl_multinode.deepspeed_values import (
    COMPARED,
    OF_SCHEDULER,
    check_deepspeed_values,
    check_zero_groups,
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


def node_of(ranks: tuple[int, ...], node: int) -> SimpleNamespace:
    return SimpleNamespace(
        local_world_size=ranks[node], world_size=sum(ranks), node=node, num_nodes=len(ranks)
    )


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
    args = SimpleNamespace(**ARGUMENTS, world_size=7, deepspeed_plugin=plugin, use_cpu=True)
    topology = node_of((7,), 0)
    with refused("deepspeed", "`auto`"):
        check_deepspeed_values(args, topology)
    args.deepspeed_plugin = None
    check_deepspeed_values(args, topology)
    assert config["gradient_clipping"] == 0.5 and "auto" not in str(config)  # compared on a copy


UNEVEN, EVEN = (7, 8, 8, 8), (8, 8, 8, 8)
HPZ, MICS, QUANTIZED = "zero_hpz_partition_size", "mics_shard_size", "zero_quantized_gradients"


@pytest.mark.parametrize(
    ("name", "value", "ranks", "node", "fields"),
    [
        (HPZ, 4, UNEVEN, 0, {"got": 4, "expected": "a divisor of 7"}),
        (MICS, 4, UNEVEN, 0, {"got": 4, "expected": "a divisor of 7"}),
        # even nodes, whose groups would span two of them
        (HPZ, 4, (6, 6), 1, {"got": 4, "expected": "a divisor of 6"}),
        (HPZ, 16, EVEN, 1, {"got": 16, "expected": "a divisor of 8"}),
        # nodes of 8 visible GPUs, of which some train on 7
        (QUANTIZED, True, UNEVEN, 0, {"got": 31, "expected": 32}),
        (QUANTIZED, True, UNEVEN, 1, {"got": 31, "expected": 32}),
        (QUANTIZED, True, (7, 7), 1, {"got": 14, "expected": 16}),
    ],
)
def test_groups_that_do_not_fit_a_node_are_refused_on_it_before_a_model_loads(
    monkeypatch, name, value, ranks, node, fields
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    config = {"zero_optimization": {"stage": 3, name: value}}
    plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(config=config))
    args = SimpleNamespace(**ARGUMENTS, deepspeed_plugin=plugin, use_cpu=False)
    with refused(name, "eave it out", node=node, **fields):
        check_deepspeed_values(args, node_of(ranks, node))
    config["zero_optimization"]["stage"] = 2  # which has no such groups
    check_deepspeed_values(
        SimpleNamespace(**vars(args), world_size=sum(ranks)), node_of(ranks, node)
    )


@pytest.mark.parametrize(
    ("keys", "ranks", "node", "gpus"),
    [
        ({HPZ: 4}, UNEVEN, 1, 8),
        ({HPZ: 7}, UNEVEN, 0, 8),
        ({HPZ: 1, MICS: -1}, UNEVEN, 0, 8),
        # a single node is one group, however large the number
        ({HPZ: 8}, (7,), 0, 8),
        ({QUANTIZED: True}, (7,), 0, 8),
        ({QUANTIZED: True}, EVEN, 0, 8),
        ({QUANTIZED: False}, UNEVEN, 0, 8),
        # on a CPU no GPU counts
        ({QUANTIZED: True}, (2, 1), 0, 0),
    ],
)
def test_groups_that_fit_are_accepted(keys, ranks, node, gpus):
    check_zero_groups({"zero_optimization": {"stage": 3, **keys}}, node_of(ranks, node), gpus)


def test_quantized_gradients_are_refused_on_a_node_whose_gpus_are_not_those_of_the_others():
    """Both nodes train on all GPUs that they see, 7 and 8."""
    for node, gpus in enumerate((7, 8)):
        with refused(QUANTIZED, node=node, got=15, expected=2 * gpus):
            check_zero_groups(
                {"zero_optimization": {"stage": 3, QUANTIZED: True}}, node_of((7, 8), node), gpus
            )


def test_the_check_of_one_node_names_another_on_which_a_group_does_not_fit(
    write, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True, HPZ: 2}
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": zero, "gradient_accumulation_steps": "auto"})
    )
    section = {"deepspeed_multinode_launcher": "standard", "deepspeed_config_file": "ds.json"}
    path = write(deepspeed_config=section)
    problem = only_problem(path, table=(7, 6))
    assert "node 0:" in problem.what and f"`{HPZ}` 2" in problem.what and "7 ranks" in problem.what
    launched(path, table=(4, 6))


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
