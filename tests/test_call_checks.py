"""What cannot be trained in node mode is refused by config alone, with the way out."""

import functools
import os
import re
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from accelerate import ParallelismConfig
from datasets import Dataset
from peft import LoraConfig, PeftModel, PeftType, PromptTuningConfig, get_peft_model
from refusals import refused
from transformers import (
    BitsAndBytesConfig,
)
from trl.rewards import accuracy_reward, get_cosine_scaled_reward

from multinode_kit.models import save_tiny, tiny_qwen2
from trl_multinode import GRPOConfig, call_checks
from trl_multinode.call_checks import check_own_folders, config_of, uneven_evaluations
from trl_multinode.errors import ConfigurationError

FOUR_BIT = BitsAndBytesConfig(load_in_4bit=True)


def args(stage: int | None = None, **fields) -> SimpleNamespace:
    plugin = None if stage is None else SimpleNamespace(zero_stage=stage)
    defaults = {
        "deepspeed_plugin": plugin,
        "model_init_kwargs": None,
        "parallelism_config": None,
        "trust_remote_code": False,
        "vllm_tensor_parallel_size": 1,
    }
    return SimpleNamespace(**defaults | fields)


def check_model(model, given: SimpleNamespace, call: dict) -> None:
    call_checks.check_model(config_of(model, given), given, {"model": model, **call})


def quantized_in_its_config():
    model = tiny_qwen2()
    model.config.quantization_config = FOUR_BIT
    return model


@pytest.mark.feature("Training", "quantized base models (QLoRA)", engine="none", refused=True)
@pytest.mark.parametrize(
    ("model", "fields", "call"),
    [
        (tiny_qwen2, {}, {"quantization_config": FOUR_BIT}),
        (tiny_qwen2, {"model_init_kwargs": {"quantization_config": FOUR_BIT}}, {}),
        (quantized_in_its_config, {}, {}),
    ],
    ids=["argument", "model_init_kwargs", "checkpoint"],
)
def test_quantized_weights_are_refused_wherever_they_are_asked_for(
    model, fields, call, record_property
):
    with refused("quantization_config", "LoRA") as caught:
        check_model(model(), args(**fields), call)
    record_property("message", str(caught.value))


def test_methods_of_peft_are_sent_or_refused_before_a_model_loads():
    """Before, prompt tuning in bfloat16 trained to the end while the engines sampled without the virtual tokens."""
    model, kinds = tiny_qwen2(), set(PeftType) - {PeftType.LORA}
    check_model(model, args(), {"peft_config": LoraConfig()})
    for kind in kinds:
        with refused("peft_config", "LoRA", got=[kind.value]):
            check_model(model, args(), {"peft_config": SimpleNamespace(peft_type=kind)})
    prompts = get_peft_model(
        tiny_qwen2(), PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
    )
    with refused("peft_config", "colocate", got=["PROMPT_TUNING"]):
        check_model(prompts, args(), {})


def frozen(model):
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def with_an_adapter(folder, **loaded):
    get_peft_model(tiny_qwen2(), LoraConfig(target_modules=["q_proj"])).save_pretrained(folder)
    return PeftModel.from_pretrained(tiny_qwen2(), folder, **loaded)


def test_a_model_without_a_trained_parameter_is_refused(tmp_path):
    """Before: a gradient norm of 0 to the end, or an `IndexError` under ZeRO-3 after the engines had started."""
    with refused("model", "is_trainable=True"):
        check_model(with_an_adapter(tmp_path), args(), {})
    with refused("model", "requires_grad"):
        check_model(frozen(tiny_qwen2()), args(), {})
    check_model(with_an_adapter(tmp_path, is_trainable=True), args(), {})
    check_model(
        frozen(tiny_qwen2()), args(), {"peft_config": LoraConfig(target_modules=["q_proj"])}
    )
    check_model(tiny_qwen2(), args(), {})


def test_folders_of_their_own_are_refused_where_other_nodes_would_have_no_weights(tmp_path):
    """Without the check a run under DDP or FSDP2 saves, and does not resume: "Can't find a valid checkpoint"."""
    apart = {"save_on_each_node": True, "save_strategy": "steps"}
    fsdp, lora = {"ACCELERATE_USE_FSDP": "true"}, LoraConfig(target_modules=["q_proj"])

    def check(call=None, num_nodes=2, environ=None, stage=None, **fields):
        with patch.dict(os.environ, environ or {}):
            check_own_folders(
                args(stage, **{**apart, **fields}), {"model": "m"} | (call or {}), num_nodes
            )

    for environ, call in ({}, {}), (fsdp, {}), (fsdp, {"peft_config": lora}):
        with refused("save_on_each_node", "`output_dir`"):
            check(call, environ=environ)
    config = GRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, num_generations=2, save_on_each_node=True
    )
    with refused("save_on_each_node", "`output_dir`", got=True):
        call_checks.check_call(
            SimpleNamespace(topology=SimpleNamespace(num_nodes=2)), config, {"model": "m"}
        )
    check(num_nodes=1)
    check(stage=2)
    check(save_on_each_node=False, environ=fsdp)
    check(save_strategy="no")
    check({"peft_config": lora})
    check({"model": get_peft_model(tiny_qwen2(), lora)})


@pytest.mark.feature("Training", "DoRA under ZeRO-3", engine="none", refused=True)
@pytest.mark.parametrize("wrapped", [False, True])
def test_dora_is_refused_under_zero_3_and_no_other_stage(wrapped, record_property):
    config = LoraConfig(use_dora=True, target_modules=["q_proj"])
    model, call = (
        (get_peft_model(tiny_qwen2(), config), {})
        if wrapped
        else (tiny_qwen2(), {"peft_config": config})
    )
    with refused("peft_config", "ZeRO-2", got="DoRA") as caught:
        check_model(model, args(3), call)
    record_property("message", str(caught.value))
    check_model(model, args(2), call)
    check_model(model, args(), call)


def test_a_models_code_and_revision_are_those_that_trl_would_load(monkeypatch):
    asked = {}
    monkeypatch.setattr(
        call_checks.AutoConfig,
        "from_pretrained",
        lambda name, **how: (asked.update(how, name=name), {}),
    )
    init = {"revision": "v2", "token": "hf_x", "dtype": "float32"}
    call_checks.config_of("me/model", args(model_init_kwargs=init, trust_remote_code=True))
    assert asked == {
        "name": "me/model",
        "revision": "v2",
        "token": "hf_x",
        "trust_remote_code": True,
        "return_unused_kwargs": True,
    }


LAUNCHED = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}
SHARED_ROWS = {
    "`parallelism_config.tp_size=2`": ({"parallelism_config": ParallelismConfig(tp_size=2)}, {}),
    "`parallelism_config.cp_size=2`": ({}, LAUNCHED | {"PARALLELISM_CONFIG_CP_SIZE": "2"}),
    "`parallelism_config.sp_size=4`": ({}, LAUNCHED | {"PARALLELISM_CONFIG_SP_SIZE": "4"}),
    "`tensor_parallel.autotp_size=2`": (
        {"deepspeed_plugin": SimpleNamespace(deepspeed_config={"tensor_parallel": {"autotp_size": 2}})}, {},
    ),
    "`tp_plan` in `model_init_kwargs`": ({"model_init_kwargs": {"tp_plan": "auto"}}, {}),
}  # fmt: skip


@pytest.mark.feature(
    "Training", "tensor, context and sequence parallelism", engine="none", refused=True
)
@pytest.mark.parametrize(
    "found", SHARED_ROWS, ids=["tensor", "context", "sequence", "autotp", "tp_plan"]
)
def test_ranks_that_share_rows_are_refused_wherever_they_are_asked_for(found, record_property):
    fields, environ = SHARED_ROWS[found]
    with refused(found, "`vllm_tensor_parallel_size`") as caught, patch.dict(os.environ, environ):
        call_checks.check_parallelism(args(**fields), "a/model")
    record_property("message", str(caught.value))


def distributed():
    model = tiny_qwen2()
    model.config.distributed_config = SimpleNamespace(ep_size=2)
    return model


def with_experts_on_a_mesh():
    model = tiny_qwen2()
    model.model.norm.weight.device_mesh = SimpleNamespace(mesh_dim_names=("efsdp", "ep"))
    return model


@pytest.mark.feature("Training", "expert parallelism", engine="none", refused=True)
@pytest.mark.parametrize(
    ("model", "given"),
    [("a/model", {"distributed_config": {"ep_size": 2}}), (distributed, {}), (with_experts_on_a_mesh, {})],
    ids=["argument", "config", "mesh"],
)  # fmt: skip
def test_expert_parallelism_is_seen_in_arguments_and_in_objects(model, given, record_property):
    model = model if isinstance(model, str) else model()
    with refused("distributed_config", "accelerate") as caught:
        call_checks.check_parallelism(args(model_init_kwargs=given), model)
    record_property("message", str(caught.value))


def test_ranks_with_rows_of_their_own_are_accepted():
    """Replicas and shards are data parallelism; without the launcher's switch accelerate does not read its sizes."""
    replicas = args(parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2))
    with patch.dict(os.environ, LAUNCHED | {"PARALLELISM_CONFIG_DP_SHARD_SIZE": "4"}):
        call_checks.check_parallelism(replicas, tiny_qwen2())
    with patch.dict(os.environ, {"PARALLELISM_CONFIG_TP_SIZE": "2"}):
        call_checks.check_parallelism(args(3), "a/model")
    sharded = tiny_qwen2()
    sharded.model.norm.weight.device_mesh = SimpleNamespace(mesh_dim_names=None)
    call_checks.check_parallelism(args(), sharded)


def test_fsdp_1_is_refused_before_an_engine_starts():
    fsdp = {"ACCELERATE_USE_FSDP": "true"}
    for environ in (fsdp, fsdp | {"FSDP_VERSION": "1"}):
        with refused("fsdp_version", "`fsdp_version: 2`"), patch.dict(os.environ, environ):
            call_checks.check_fsdp_version()
    with patch.dict(os.environ, fsdp | {"FSDP_VERSION": "2"}):
        call_checks.check_fsdp_version()
    call_checks.check_fsdp_version()


def test_everything_else_passes_by_name_too(tmp_path):
    name = str(save_tiny(tmp_path / "model"))
    check_model(
        name,
        args(3, model_init_kwargs={"dtype": "float32"}),
        {"peft_config": LoraConfig(use_rslora=True)},
    )


# ---- rewards, columns and evaluation


def needs_solution(completions, solution, log_extra=None, **kwargs):
    return [0.0 for _ in completions]


def without_the_rest(prompts, completions):
    return [0.0 for _ in completions]


def positions_only(completions, /, **kwargs):
    return [0.0 for _ in completions]


def without_the_column(completions, prompts, completion_ids, trainer_state, log_extra, log_metric):
    return [0.0 for _ in completions]


def no_columns(completions, **kwargs):
    return [0.0 for _ in completions]


PROMPTS = Dataset.from_dict({"prompt": ["a"], "question": ["b"]})
SOLVED = PROMPTS.rename_column("question", "solution")
TENSOR = ParallelismConfig(tp_size=2)
REFUSED_CALLS = {
    "tensor parallelism": ({}, r"`parallelism_config\.tp_size=2`", {"parallelism_config": TENSOR}),
    "evaluation": (
        {},
        "`eval_strategy` steps .*`eval_dataset`",
        {"eval_strategy": "steps", "eval_steps": 2},
    ),
    "math-verify": ({"reward_funcs": [no_columns, accuracy_reward]}, "math-verify`", {}),
    "a reward's column": (
        {"reward_funcs": needs_solution, "train_dataset": PROMPTS},
        r"\['solution'\].*`train_dataset`.*\['prompt', 'question'\]",
        {},
    ),
    "column of the evaluation": (
        {"reward_funcs": [needs_solution], "eval_dataset": {"hard": PROMPTS}},
        r"\['solution'\].*`eval_dataset\[hard\]`",
        {},
    ),
    "keywords of every call": (
        {"reward_funcs": [without_the_rest], "train_dataset": PROMPTS},
        r"`without_the_rest` does not accept \['completion_ids', 'log_extra', 'log_metric', 'trainer_state'\].*kwargs",
        {},
    ),
    "keywords without a dataset": (
        {"reward_funcs": [without_the_rest], "rollout_func": print},
        "does not accept",
        {},
    ),
    "a column as a keyword": (
        {"reward_funcs": [without_the_column], "train_dataset": PROMPTS},
        r"`without_the_column` does not accept \['question'\]",
        {},
    ),
    "a reward without keywords": (
        {"reward_funcs": [positions_only], "train_dataset": PROMPTS},
        r"`positions_only` (does not accept|requires)",
        {},
    ),
    "a column under the name of a rollout": (
        {
            "reward_funcs": [no_columns],
            "train_dataset": PROMPTS.rename_column("question", "completions"),
        },
        r"columns \['completions'\].*Rename",
        {},
    ),
    "a column that is removed": (
        {"reward_funcs": needs_solution, "train_dataset": SOLVED},
        r"\['solution'\].*`remove_unused_columns`",
        {"remove_unused_columns": True},
    ),
    "a reward that needs the batch": (
        {"reward_funcs": [get_cosine_scaled_reward(max_len=8)], "train_dataset": SOLVED},
        r"`cosine_scaled_reward`.*`dynamic_sampling`",
        {"dynamic_sampling": 8, "score_groups": 0},
    ),
    "prompts": (
        {"reward_funcs": no_columns, "train_dataset": PROMPTS.rename_column("prompt", "text")},
        r"'prompt'.*\['text', 'question'\]",
        {},
    ),
}


@pytest.mark.parametrize(
    ("call", "message", "fields"), REFUSED_CALLS.values(), ids=REFUSED_CALLS.keys()
)
def test_a_call_that_would_fail_later_is_refused_before_the_model(
    call, message, fields, monkeypatch, tmp_path
):
    missing = "math-verify" in message
    monkeypatch.setattr(call_checks, "find_spec", lambda name: None if missing else "installed")
    config = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **fields)
    with pytest.raises(ConfigurationError, match=message):
        call_checks.check_call(
            SimpleNamespace(topology=None), config, {"model": "no/such/model", **call}
        )


def test_a_decorator_may_accept_more_than_the_function_below_it():
    @functools.wraps(without_the_rest)
    def decorated(**given):
        return without_the_rest(given["prompts"], given["completions"])

    call_checks.check_rewards({"reward_funcs": [decorated], "train_dataset": PROMPTS})
    call_checks.check_rewards(
        {"reward_funcs": [functools.partial(no_columns, extra=1)], "train_dataset": PROMPTS}
    )


def test_one_of_several_evaluation_datasets_is_named_and_the_setting_is_the_argument():
    without_prompts = PROMPTS.rename_column("prompt", "text")
    with pytest.raises(ConfigurationError, match=r"`eval_dataset\[hard\]`") as found:
        call_checks.check_rewards(
            {"reward_funcs": [no_columns], "eval_dataset": {"hard": without_prompts}}
        )
    assert found.value.setting == "eval_dataset"


def test_calls_that_supply_what_a_reward_needs_are_accepted(monkeypatch):
    monkeypatch.setattr(
        call_checks, "find_spec", lambda name: "installed" if name == "math_verify" else None
    )
    call_checks.check_rewards(
        {"reward_funcs": [accuracy_reward, "a/reward-model"], "train_dataset": SOLVED}
    )
    # these make prompts or arguments of their own
    call_checks.check_rewards(
        {"reward_funcs": needs_solution, "train_dataset": PROMPTS, "rollout_func": print}
    )
    call_checks.check_rewards(
        {"reward_funcs": [needs_solution], "train_dataset": [{"prompt": "a"}]}
    )


@pytest.mark.parametrize(
    ("prompts", "per_device", "ranks", "says"),
    [
        (6, 8, 1, None),
        (
            6,
            16,
            1,
            r"24 rows \(6 prompts x 4\) in batches of 16: the last batch has 8 rows",
        ),
        (6, 8, 2, r"the last batch is filled up with 8 copies"),
        (7, 8, 2, r"the last batch is filled up with 4 copies"),
        (7, 3, 4, r"the last batch is filled up with 8 copies"),
        (5, 1, 8, r"the last batch is filled up with 4 copies"),
    ],
)
def test_an_evaluation_whose_last_batch_weighs_more_is_named(prompts, per_device, ranks, says):
    given = SimpleNamespace(
        eval_strategy="steps",
        num_generations=4,
        per_device_eval_batch_size=per_device,
        world_size=ranks,
    )
    found = list(uneven_evaluations(given, {"eval_dataset": {"one": [{}] * prompts}}))
    assert re.search(says, *found) if says else not found
    given.num_generations_eval, given.eval_strategy = 1, "no"
    assert not list(uneven_evaluations(given, {"eval_dataset": [{}] * prompts}))


def test_tensor_parallelism_must_divide_the_heads():
    model = tiny_qwen2()
    heads = model.config.num_attention_heads
    with refused("vllm_tensor_parallel_size", got=heads + 1):
        check_model(model, args(vllm_tensor_parallel_size=heads + 1), {})
    check_model(model, args(vllm_tensor_parallel_size=heads), {})


def test_settings_of_a_server_are_named_as_ignored(monkeypatch, tmp_path):
    warned = []
    monkeypatch.setattr(call_checks, "warn", warned.append)
    config = GRPOConfig(
        str(tmp_path), use_cpu=True, bf16=False, vllm_server_port=8001, vllm_enable_sleep_mode=True
    )
    call_checks.check_call(
        SimpleNamespace(
            topology=SimpleNamespace(num_nodes=2, rank=0),
            devices=SimpleNamespace(per_engine=(("7",),)),
        ),
        config,
        {"model": tiny_qwen2()},
    )
    (line,) = warned
    assert "vllm_server_port" in line and "vllm_enable_sleep_mode" in line
