"""Every `ConfigurationError` is seen by `check`, or its row here names what it needs besides file and arguments."""

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import check_kit
import pytest
from check_kit import ROOT, TWO_NODES

from trl_multinode.tools.check import check

quiet_machine, write = check_kit.quiet_machine, check_kit.write

PACKAGE = ROOT / "trl_multinode"
SCRIPT = """
from trl_multinode import {kind}, {trainer}, ModelConfig, ScriptArguments, TrlParser

parser = TrlParser((ScriptArguments, {kind}, ModelConfig))
arguments, config, model = parser.parse_args_and_config()
"""
ZERO_3 = TWO_NODES["deepspeed_config"]
JSON = {"deepspeed_multinode_launcher": "standard", "deepspeed_config_file": "ds.json"}
FSDP: dict[str, Any] = {"distributed_type": "FSDP", "deepspeed_config": None}
FSDP2 = FSDP | {"fsdp_config": {"fsdp_version": 2}}
AHEAD = ["--max_staleness", "2"]
SCORED = ["--score_groups", "0"]


def zero_3(**keys: Any) -> dict[str, Any]:
    """DeepSpeed's file for ZeRO-3, with further keys of its section."""
    section = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True, **keys}
    return {"zero_optimization": section, "gradient_accumulation_steps": "auto"}


@dataclass
class Row:
    """Launch in which `check` sees an error, and a name in the only problem's text."""

    names: str
    words: list[str] = field(default_factory=list)
    file: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    kind: str = "GRPO"


CHECKED: dict[str, list[Row]] = {
    "call_checks.py: check_fsdp_version": [Row("fsdp_version", file=FSDP)],
    "call_checks.py: check_own_folders": [
        Row("save_on_each_node", ["--save_on_each_node", "true"], FSDP2)
    ],
    "call_checks.py: check_parallelism": [
        Row("tp_plan", ["--model_init_kwargs", '{"tp_plan": "auto"}']),
        Row("ep_size", ["--model_init_kwargs", '{"distributed_config": {"ep_size": 2}}']),
        Row("tp_size", file=FSDP2 | {"parallelism_config": {"parallelism_config_tp_size": 2}}),
    ],
    "call_checks.py: check_heads": [
        Row(
            "vllm_tensor_parallel_size",
            ["--vllm_tensor_parallel_size", "4", "--model_name_or_path", "model"],
            {"num_processes": 8},
            files={"model/config.json": {"num_attention_heads": 14}},
        )
    ],
    "call_checks.py: check_quantization": [
        Row("load_in_4bit", ["--load_in_4bit", "true"]),
        Row("quantiz", ["--model_init_kwargs", '{"quantization_config": {"load_in_8bit": true}}']),
    ],
    "call_checks.py: check_dora": [Row("DoRA", ["--use_peft", "true", "--use_dora", "true"])],
    "config.py: __post_init__": [Row("num_generations", ["--num_generations", "5"])],
    "deepspeed_values.py: check_deepspeed_values": [
        Row(
            "gradient_accumulation_steps",
            ["--gradient_accumulation_steps", "4"],
            {"deepspeed_config": JSON},
            files={
                "ds.json": zero_3() | {"gradient_accumulation_steps": 2},
            },
        )
    ],
    "deepspeed_values.py: check_zero_groups": [
        Row(name, file={"deepspeed_config": JSON}, files={"ds.json": zero_3(**{name: value})})
        for name, value in {
            "zero_hpz_partition_size": 4,
            "mics_shard_size": 2,
            "zero_quantized_gradients": True,
        }.items()
    ],
    "engine_keys.py: check_keys": [
        Row("generation_kwargs", ["--generation_kwargs", '{"n": 2}']),
        Row("dtype", ["--engine_kwargs", '{"dtype": "half"}']),
        Row("engine_kwargs", ["--engine_kwargs", '{"seed": 2}']),
    ],
    "experimental/self_distillation.py: __post_init__": [
        Row("use_teacher_server", ["--use_teacher_server", "true"], kind="SDFT")
    ],
    "node_settings.py: _parsed": [Row("engine_kwargs", ["--engine_kwargs", "notjson"])],
    "node_settings.py: check_settings": [
        Row("save_minutes", ["--save_minutes", "5", "--vllm_mode", "server"]),
        Row("enable_jit_checkpoint", ["--enable_jit_checkpoint", "true"]),
        Row("vllm_mode", ["--vllm_mode", "nodes"]),
        Row(
            "weight_transport",
            ["--min_engines", "1", "--weight_transport", "nccl"],
            environ={"TRL_MULTINODE_SECRET": "secret of these tests"},
        ),
    ],
    "node_settings.py: check_supported": [
        Row("max_staleness", ["--max_staleness", "1"], kind="RLOO")
    ],
    "node_settings.py: _check_staleness": [
        Row(
            "vllm_importance_sampling_correction",
            ["--max_staleness", "1", "--vllm_importance_sampling_correction", "false"],
        ),
        Row("max_age", ["--max_age", "3"]),
    ],
    "node_settings.py: _check_in_flight": [
        Row("max_age", [*AHEAD, "--max_age", "1"]),
        Row(
            "vllm_importance_sampling_mode",
            [*AHEAD, "--vllm_importance_sampling_mode", "sequence_truncate"],
        ),
    ],
    "node_settings.py: _check_scoring": [Row("score_with_batch", ["--score_with_batch", "mine"])],
    "node_settings.py: _check_node_mode": [Row("score_groups", [*SCORED, "--vllm_mode", "server"])],
    "node_settings.py: _check_dynamic_sampling": [
        Row("score_groups", ["--dynamic_sampling", "8"]),
        Row("score_with_batch", [*SCORED, "--dynamic_sampling", "8", "--score_with_batch", "a"]),
    ],
    "node_settings.py: _check_whole_groups": [
        Row("per_device_train_batch_size", [*SCORED, "--per_device_train_batch_size", "12"])
    ],
    "node_settings.py: _check_length": [
        Row("micro_batch_tokens", ["--micro_batch_tokens", "8"]),
        Row(
            "max_completion_length",
            ["--loss_type", "dr_grpo", "--config", "run.yaml"],
            files={"run.yaml": {"max_completion_length": None}},
        ),
    ],
    "run/topology.py: from_environment": [
        Row(
            "deepspeed_multinode_launcher",
            file={"deepspeed_config": ZERO_3 | {"deepspeed_multinode_launcher": "pdsh"}},
        )
    ],
    "run/topology.py: _check_counts": [
        Row("num_engines", ["--num_engines", "2"]),
        Row("vllm_tensor_parallel_size", ["--vllm_tensor_parallel_size", "2"]),
    ],
    "run/topology.py: _check_chosen": [Row("vllm_devices", ["--vllm_devices", "8"])],
    "saving/hub.py: check_push": [
        Row("fsdp_state_dict_type", ["--push_to_hub", "true"], FSDP2),
        Row(
            "zero3_save_16bit_model",
            ["--push_to_hub", "true"],
            {"deepspeed_config": ZERO_3 | {"zero3_save_16bit_model": False}},
        ),
    ],
    "settings.py: _refusal": [Row("sync_bucket_mb", ["--sync_bucket_mb", "0"])],
    "wire/stop_signals.py: check_preempt_signal": [
        Row("TRL_MULTINODE_PREEMPT_SIGNAL", environ={"TRL_MULTINODE_PREEMPT_SIGNAL": "INT"})
    ],
}

# what decides an error besides file, flags and arguments
ELSEWHERE = {
    "the trainer's class, its functions or its data, which only the script makes": [
        "batches/microbatches.py: __init__",
        "batches/own_loss.py: check",
        "batches/own_loss.py: reason_of_loss",
        "batches/session_rows.py: check_session_loss",
        "batches/shares.py: _check",
        "call_checks.py: check_accepts",
        "call_checks.py: check_columns",
        "call_checks.py: check_harness",
        "sessions/harness.py: __post_init__",
        "trainer.py: with_harness",
        "call_checks.py: check_dataset",
        "call_checks.py: check_dynamic_sampling",
        "call_checks.py: check_evaluation",
        "call_checks.py: check_in_flight",
        "call_checks.py: check_math_verify",
        "images.py: check_images",
        "libraries.py: check_trl",
        "rollouts/generation.py: __init__",
        "rollouts/generation.py: __setattr__",
        "rollouts/one_prompt.py: check_one_prompt",
        "rollouts/scoring.py: _arguments",
        "rollouts/scoring.py: _check_settings",
        "rollouts/scoring_pool.py: _check",
        "trainer.py: _check_call",
    ],
    "the model, its config or its adapter": [
        "call_checks.py: check_adapters",
        "call_checks.py: check_context",
        "call_checks.py: check_trained",
        "weights/building.py: build_sync",
        "weights/building.py: merged",
        "weights/peft_source.py: _check_owners",
        "weights/peft_source.py: check_layer",
        "weights/tying.py: check_tied_head",
    ],
    "agents of this machine, a cluster of Ray and its nodes": [
        "agent/leaving.py: ask_to_leave",
        "agent/leaving.py: record",
        "agent/ray_cluster.py: __init__",
        "agent/ray_engines.py: _join",
        "agent/ray_engines.py: _scale",
    ],
    "devices, packages or engines of a node, which `doctor` examines": [
        "engine/settings.py: check_vllm",
        "rollouts/requests.py: check_logprobs",
        "run/gpu_variables.py: _no_gpu",
        "run/gpu_variables.py: check_accelerator",
        "weights/transport.py: choose",
    ],
    "other ranks, runs or servers": [
        "examples/grpo.py: unreachable",
        "experimental/server_distillation.py: check_teacher",
        "must_agree.py: refuse",
        "run/owner.py: _refusal",
        "host/rank.py: check_engines",
        "run/topology.py: check_engines",
        "wire/handshake.py: _prove",
        "wire/secret.py: pool_secret",
    ],
    "`output_dir` and its checkpoints": [
        "run/begin.py: check_writable",
        "saving/checkpoint_files.py: no_resume",
        "saving/checkpoints.py: _check_without_common",
        "saving/checkpoints.py: ranks_of_zero",
        "saving/open_groups.py: _index_of",
        "saving/open_groups.py: _row_of",
        "saving/open_groups.py: check_same_way",
        "saving/open_groups.py: restore_from",
        "saving/conversion.py: _check_files",
        "saving/conversion.py: make",
        "saving/resume.py: _check_stream",
        "saving/resume.py: _move",
        "saving/resume.py: _resolved",
    ],
}


def raised_in(tree: ast.AST, function: str = "") -> Iterator[str]:
    """Yield the functions that make a `ConfigurationError`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ConfigurationError":
            yield function
        yield from raised_in(node, node.name if isinstance(node, ast.FunctionDef) else function)


def test_each_error_is_checked_or_needs_more_than_file_and_arguments():
    found = {
        f"{path.relative_to(PACKAGE)}: {function}"
        for path in PACKAGE.rglob("*.py")
        if "tools" not in path.relative_to(PACKAGE).parts
        for function in raised_in(ast.parse(path.read_text()))
    }
    listed = [*CHECKED, *(name for names in ELSEWHERE.values() for name in names)]
    assert sorted(listed) == sorted(found)


ROWS = [(name, row) for name, rows in CHECKED.items() for row in rows]
OF_LIBRARIES = [
    Row("wandbb", ["--report_to", "wandbb"]),
    Row("trackio,tensorboard", ["--report_to", "trackio,tensorboard"]),
    Row("nofile.json", ["--deepspeed", "nofile.json"]),
    Row("`fsdp`", ["--fsdp", "full_shard"]),
    Row("both", ["--bf16", "true", "--fp16", "true"]),
    Row("mixed_precision: bf16", ["--fp16", "true"], {"mixed_precision": "bf16"}),
    Row("mixed_precision: fp16", file={"mixed_precision": "fp16"}),
    Row("model_init_kwargs", ["--model_init_kwargs", "notjson"]),
    Row("auto_find_batch_size", ["--auto_find_batch_size", "true"]),
]
ROWS += [("TRL or transformers", row) for row in OF_LIBRARIES]


@pytest.mark.parametrize(
    ("where", "row"), ROWS, ids=[f"{where} {row.names}" for where, row in ROWS]
)
def test_what_file_and_arguments_decide_is_a_problem(where, row, write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in row.environ.items():
        monkeypatch.setenv(name, value)
    for name, content in row.files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    script = Path("train.py")
    script.write_text(SCRIPT.format(kind=f"{row.kind}Config", trainer=f"{row.kind}Trainer"))
    given = ["--dataset_name", "d.json", "--model_name_or_path", "m"]
    launch, problems = check(write(**row.file), [str(script), *given, *row.words])
    assert launch.script.notes == () and len(problems) == 1, (problems, launch.script.notes)
    assert row.names in f"{problems[0].what} {problems[0].cure}", problems
