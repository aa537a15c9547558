"""Launches that `trl-multinode check` once misread: what it says now, the cure, and the facts that it shows."""

import importlib.util
import json
import re
from dataclasses import dataclass, field
from typing import Any

import check_kit
import pytest
from check_kit import ROOT, TWO_NODES

from trl_multinode.tools.check import main

# The rules that a launch breaks most often decide in test_check_rules.py
pytestmark = pytest.mark.nightly

quiet_machine, write = check_kit.quiet_machine, check_kit.write

ZERO_3 = TWO_NODES["deepspeed_config"]
FOUR = {"num_machines": 4, "machine_rank": 0}
NO_RANK: dict[str, Any] = {"machine_rank": None, "main_process_ip": None}
WITH_JSON = {"deepspeed_multinode_launcher": "standard", "deepspeed_config_file": "ds.json"}
JSON = {
    "bf16": {"enabled": True},
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}
GRPO = [
    str(ROOT / "examples" / "grpo.py"),
    "--dataset_name",
    "d.json",
    "--reward_funcs",
    "think_format_reward",
]


@dataclass
class Row:
    what: str = ""  # of the only problem; empty: there is none
    cure: str = ""
    file: dict[str, Any] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    script: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)  # JSON files in the folder of the launch
    shows: list[str] = field(default_factory=list)  # rows and notes of the report
    hides: list[str] = field(default_factory=list)  # what it no longer says


def zero(**keys: Any) -> dict[str, Any]:
    """The section of ZeRO-3 with changes; `None` leaves a key out."""
    section = {key: value for key, value in {**ZERO_3, **keys}.items() if value is not None}
    return {"deepspeed_config": section}


def by_json(**keys: Any) -> dict[str, Any]:
    return {"file": {"deepspeed_config": WITH_JSON}, "files": {"ds.json": {**JSON, **keys}}}


TABLE = {
    # ---- DeepSpeed's config
    "JSON is read": Row(**by_json(), shows=["ZeRO-3 of ds.json", "bf16"]),
    "JSON without a precision": Row(
        **by_json(bf16={"enabled": "auto"}), shows=["precision of the script"]
    ),
    "JSON without ZeRO": Row(
        "`zero_optimization`", '"stage": 3', **by_json(zero_optimization=None)
    ),
    "JSON and keys of accelerate": Row(
        "zero_stage, mixed_precision",
        "`ds.json`",
        file={"mixed_precision": "bf16", "deepspeed_config": {"zero_stage": 3, **WITH_JSON}},
        files={"ds.json": JSON},
    ),
    "JSON without accumulation": Row(
        "`gradient_accumulation_steps`",
        "1",
        file={"deepspeed_config": WITH_JSON},
        files={
            "ds.json": {
                key: value for key, value in JSON.items() if key != "gradient_accumulation_steps"
            }
        },
        flags=["--gradient_accumulation_steps", "4"],
    ),
    "ZeRO-0": Row(file=zero(zero_stage=0), shows=["DeepSpeed ZeRO-0,"]),
    "no init flag": Row(file=zero(zero3_init_flag=None), shows=["note: `zero3_init_flag`"]),
    "nvme without a path": Row(
        "`offload_param` to `nvme`",
        "`offload_param_nvme_path: /local_nvme`",
        file=zero(offload_param_device="nvme"),
    ),
    "nvme for the optimizer": Row(
        "`offload_optimizer` to `nvme`",
        "`offload_optimizer_nvme_path: /local_nvme`",
        file=zero(offload_optimizer_device="nvme"),
    ),
    # ---- numbers
    "a node's GPUs": Row("got 8, expected 28", "`num_engines`", {**FOUR, "num_processes": 8}),
    "2 + 6 on purpose": Row(
        file={**FOUR, "num_processes": 8},
        flags=["--num_engines", "6"],
        shows=["reserved devices   │ GPU 2, 3, 4, 5, 6, 7"],
    ),
    "count as a variable": Row(
        "variable", "`--num_processes`", {"num_processes": "$N"}, ["--num_processes", "14"]
    ),
    "rank as a string": Row(file={"machine_rank": "1"}, shows=["7 to 13 of 14"]),
    "no count": Row(
        "(got None, expected 14: 7 a node)",
        "`num_processes: 14`",
        {"num_processes": None},
        shows=["of 14"],
    ),
    # ---- the meeting of the nodes
    "empty address": Row("`main_process_ip`", "shell", flags=["--main_process_ip", ""]),
    "list of hosts": Row(
        "got 'node[0-1]'", "--main_process_ip HOST0", flags=["--main_process_ip", "node[0-1]"]
    ),
    "c10d needs no rank": Row(
        file={"machine_rank": None},
        flags=["--rdzv_backend", "c10d"],
        shows=["of 14", "c10d, node0:29500"],
    ),
    "rank and address of a TrainJob": Row(
        "`machine_rank`",
        "--machine_rank $PET_NODE_RANK",
        {"machine_rank": None},
        environ={"PET_NODE_RANK": "1", "PET_NNODES": "2"},
    ),
    "address of a TrainJob": Row(
        "`main_process_ip`",
        "--main_process_ip $PET_MASTER_ADDR",
        {"main_process_ip": None},
        environ={"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "node0"},
    ),
    "one machine in a TrainJob": Row(
        "(got `num_machines` 1, expected PET_NNODES=4)",
        "`num_machines: 4` and `num_processes: 28`",
        {"num_machines": 1, "num_processes": 7, "machine_rank": 0},
        environ={"PET_NNODES": "4", "PET_NODE_RANK": "2"},
    ),
    "address under srun": Row(
        "`main_process_ip`",
        "scontrol show hostnames",
        {"main_process_ip": None},
        environ={"SLURM_NODEID": "1"},
    ),
    "other nodes under srun": Row(
        "(got `num_machines` 2, expected SLURM_STEP_NUM_NODES=4)",
        "`num_machines: 4` and `num_processes: 28`",
        environ={"SLURM_STEP_NUM_NODES": "4", "SLURM_NODEID": "1"},
    ),
    "another node's rank": Row(
        "(got 0, expected SLURM_NODEID=1)",
        "quotes",
        flags=["--machine_rank", "0"],
        environ={"SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"},
    ),
    # ---- GPUs and engines
    "no visible GPU": Row(
        "CUDA_VISIBLE_DEVICES of this shell (``)",
        "unset CUDA_VISIBLE_DEVICES",
        environ={"CUDA_VISIBLE_DEVICES": ""},
    ),
    "no GPU by number": Row(
        "(`-1`)", "CUDA_VISIBLE_DEVICES", environ={"CUDA_VISIBLE_DEVICES": "-1"}
    ),
    "GPUs of an AMD node": Row(
        environ={"HIP_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
        shows=["GPU 0, 1, 2, 3, 4, 5, 6", "reserved devices   │ GPU 7"],
    ),
    "hidden by HIP": Row(
        "HIP_VISIBLE_DEVICES",
        "unset HIP_VISIBLE_DEVICES",
        environ={"HIP_VISIBLE_DEVICES": "0,1,2,3,4,5,6"},
    ),
    "an idle GPU": Row(flags=["--vllm_devices", "0"], shows=["note: GPU 7 would be idle"]),
    "no idle GPU": Row(flags=["--vllm_devices", "7"], hides=["idle"]),
    "too many engines": Row(
        "2 engines with `vllm_tensor_parallel_size` 2",
        "`num_processes: 8` (4 a node)",
        {"num_processes": 12},
        ["--num_engines", "2", "--vllm_tensor_parallel_size", "2"],
    ),
    "a shared GPU": Row(
        file={"num_machines": 1, "num_processes": 1, "machine_rank": 0},
        flags=["--gpus_per_node", "1", "--vllm_devices", "0"],
    ),
    "heads for TP": Row(
        "got 4, expected a divisor of 14",
        "--vllm_tensor_parallel_size` 1 or 2",
        {"num_processes": 8},
        script=[*GRPO, "--model_name_or_path", "model", "--vllm_tensor_parallel_size", "4"],
        files={"model/config.json": {"num_attention_heads": 14}},
    ),
    # ---- arguments of the script
    "unknown argument": Row("--reward_funcs", "--help", script=[*GRPO, "--reward_func", "a"]),
    "refused setting": Row("`max_staleness`", script=[*GRPO, "--max_staleness", "9"]),
    "CPU in file and script": Row(
        file={"use_cpu": True},
        script=[*GRPO, "--use_cpu", "true"],
        hides=["does not reach the ranks"],
    ),
    "settings of a server": Row(
        script=[*GRPO, "--vllm_server_port", "8001", "--vllm_enable_sleep_mode", "true"],
        shows=["`vllm_enable_sleep_mode`, `vllm_server_port`"],
    ),
    "misspelled reward": Row(
        "think_format_reward",
        "--help",
        script=[*GRPO[:3], "--reward_funcs", "think_format_rewards"],
    ),
    "reward without its package": Row(
        "`pip install math-verify`",
        "--help",
        script=[*GRPO[:3], "--reward_funcs", "accuracy_reward"],
    ),
    "no script": Row("`train.py`", "path", script=["train.py"]),
}


find_spec = importlib.util.find_spec


def without_math_verify(name: str, package: str | None = None):
    return None if name == "math_verify" else find_spec(name, package)


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_launch_is_read_right(row, write, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("importlib.util.find_spec", without_math_verify)
    for name, value in row.environ.items():
        monkeypatch.setenv(name, value)
    for name, content in row.files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            json.dumps({key: value for key, value in content.items() if value is not None})
        )
    status = main([write(**row.file), *row.flags, *row.script])
    out = capsys.readouterr().out
    problems = re.findall(r"^problem \d+: (.*)\n +cure: (.*)$", out, re.MULTILINE)
    assert status == len(problems) == bool(row.what), out
    assert all(row.what in what and row.cure in cure for what, cure in problems), out
    assert [text for text in row.shows if text not in out] == [], out
    assert [text for text in row.hides if text in out] == [], out


def test_empty_variable_before_the_script_is_named(write, capsys):
    """Unquoted, an empty `$HOST0` makes the next word the address."""
    with pytest.raises(SystemExit) as stop:
        main([write(), "--main_process_ip", "train.py", "--output_dir", "out"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "--main_process_ip" in error and "train.py" in error
    with pytest.raises(SystemExit, match="2"):
        main([write(), "--main_process_ip"])
    assert "--main_process_ip" in capsys.readouterr().err
