"""Every rule of `trl_multinode.tools.check` names what is wrong and its cure, and the cure works."""

import json
import re

import check_kit
import pytest
from check_kit import TWO_NODES, launched, only_problem
from trl import GRPOConfig

from trl_multinode.tools.check import Batch, check, rules_nodes
from trl_multinode.tools.check.launch import Engines, Problem
from trl_multinode.tools.check.rules_batch import batch_problems

quiet_machine, write = check_kit.quiet_machine, check_kit.write


ZERO_3 = TWO_NODES["deepspeed_config"]
BY_JSON = {"deepspeed_multinode_launcher": "standard", "deepspeed_config_file": "ds.json"}

# ---- the rules: one broken thing each, the whole problem and its cure ----

RULES = {
    "pdsh": (
        {"deepspeed_config": {"zero_stage": 2}},
        "got pdsh, expected standard",
        "`deepspeed_multinode_launcher: standard`",
    ),
    "own launcher": (
        {"deepspeed_config": {"deepspeed_multinode_launcher": "openmpi"}},
        "got openmpi, expected standard",
        "`deepspeed_multinode_launcher: standard`",
    ),
    "floor": ({"num_processes": 15}, "got 15", "14 (7 a node)"),
    "floor below one": ({"num_processes": 1}, "got 1", "2 (1 a node)"),
    "no rank": ({"machine_rank": None}, "`machine_rank`", "`--machine_rank K`"),
    "rank out of range": ({"machine_rank": 2}, "got 2, expected 0 to 1", "`--machine_rank` 0 to 1"),
    "rank without nodes": (
        {"num_machines": 1, "num_processes": 7},
        "got 1, expected 0 to 0",
        "`num_machines`",
    ),
    "no address": ({"main_process_ip": None}, "None", "`--main_process_ip HOST0`"),
    "own ports": ({"main_process_port": 0}, "`main_process_port`", "`main_process_port: 29500`"),
    "hidden GPU": (
        {"gpu_ids": "0,1,2,3,4,5,6"},
        "got 7 visible GPUs for 7 processes, expected 8",
        "`gpu_ids: all`",
    ),
    "number as GPU ids": ({"gpu_ids": 7}, "got YAML's 7, expected a string", "`gpu_ids: all`"),
    "no GPU left": (
        {"num_processes": 16},
        "got 8 processes a node, expected 7 or less",
        "`num_processes: 14`",
    ),
    "bare no": (
        {"mixed_precision": False},
        "got YAML's False, expected a string",
        '`mixed_precision: "no"`',
    ),
    "unknown key": ({"num_procs": 14}, "`num_procs`", "num_processes"),
    "flag as key": ({"max_restarts": 3}, "`max_restarts`", "`--max_restarts`"),
    "section's key": ({"zero_stage": 3}, "`zero_stage`", "`deepspeed_config:`"),
    "ignored key": ({"rdzv_backend": "c10d"}, "'c10d'", "`--rdzv_backend`"),
    "ignored switch": ({"same_network": True}, "`same_network`", "delete"),
    "ignored affinity": (
        {"enable_cpu_affinity": True},
        "`enable_cpu_affinity`",
        "`--enable_cpu_affinity`",
    ),
    "FSDP1": (
        {
            "distributed_type": "FSDP",
            "deepspeed_config": None,
            "fsdp_config": {"fsdp_reshard_after_forward": "true"},
        },
        "got fsdp_version 1, expected 2",
        "`fsdp_version: 2`",
    ),
    "tensor parallelism": (
        {
            "distributed_type": "FSDP",
            "deepspeed_config": None,
            "fsdp_config": {"fsdp_version": 2},
            "parallelism_config": {"parallelism_config_tp_size": 2},
        },
        "got `parallelism_config_tp_size` 2, expected 1",
        "delete `parallelism_config_tp_size`",
    ),  # fmt: skip
    "unread section": ({"fsdp_config": {"fsdp_version": 2}}, "`fsdp_config`", "delete"),
    "unread dynamo": ({"dynamo_backend": "INDUCTOR"}, "`dynamo_backend`", "delete"),
    "unread TPU key": ({"tpu_name": "pod"}, "`tpu_name`", "delete"),
    "typo in a section": (
        {"deepspeed_config": {"zero_stge": 3, "deepspeed_multinode_launcher": "standard"}},
        "`zero_stge` under `deepspeed_config`",
        "zero_stage",
    ),
    "MULTI_CPU": (
        {"distributed_type": "MULTI_CPU", "num_processes": 4, "deepspeed_config": None},
        "`distributed_type: MULTI_CPU`",
        "`distributed_type: DEEPSPEED`",
    ),
    "Megatron": (
        {"distributed_type": "MEGATRON_LM", "deepspeed_config": None},
        "got MEGATRON_LM, expected DEEPSPEED, FSDP or MULTI_GPU",
        "`distributed_type: DEEPSPEED`",
    ),
    "a node's processes": (
        {"num_machines": 4, "machine_rank": 0, "num_processes": 7},
        "got 7, expected 28",
        "`num_processes: 28`",
    ),
    "count as a string": ({"num_processes": "14"}, "`num_processes` (got YAML's '14'", "quotes"),
    "address with a port": (
        {"main_process_ip": "node0:29500"},
        "'node0:29500'",
        "`--main_process_ip node0 --main_process_port 29500`",
    ),
    "shards would be saved": (
        {"deepspeed_config": {**ZERO_3, "zero3_save_16bit_model": False}},
        "`zero3_save_16bit_model`",
        "`zero3_save_16bit_model: true` under `deepspeed_config:`",
    ),
    "init flag is false": (
        {"deepspeed_config": {**ZERO_3, "zero3_init_flag": False}},
        "`zero3_init_flag` False",
        "`zero3_init_flag: true`",
    ),
    "JSON is missing": (
        {"deepspeed_config": BY_JSON},
        "`deepspeed_config_file` `ds.json`",
        "`deepspeed_config_file`",
    ),
    "unknown type": ({"distributed_type": "DEEPSPED"}, "'DEEPSPED'", ""),
}


FAULTS = {
    "a node's processes": pytest.mark.fault("23"),
    "floor": pytest.mark.fault("23"),
    "floor below one": pytest.mark.fault("23"),
    "hidden GPU": pytest.mark.fault("29"),
}
CASES = [pytest.param(*rule, marks=FAULTS.get(name, ()), id=name) for name, rule in RULES.items()]


@pytest.mark.parametrize(("changes", "what", "cure"), CASES)
def test_rule_names_what_and_cure(write, changes, what, cure):
    problem = only_problem(write(**changes))
    assert what in problem.what
    assert cure in problem.cure


@pytest.mark.parametrize("gathers", [True, False])
def test_deepspeeds_json_is_read_and_must_save_whole_weights(write, tmp_path, monkeypatch, gathers):
    name = "stage3_gather_16bit_weights_on_model_save"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 3, name: gathers}})
    )
    launch, problems = check(write(deepspeed_config=BY_JSON), [])
    assert launch.deepspeed.stage == 3
    assert [name in problem.what and "in `ds.json`" in problem.cure for problem in problems] == [
        True
    ] * (not gathers)


def test_ranks_leave_the_gpus_of_a_tensor_parallel_engine(write):
    problem = only_problem(write(), engines=Engines(vllm_tensor_parallel_size=2))
    assert (
        "`vllm_tensor_parallel_size` 2" in problem.what
        and "`num_processes: 12` (6 a node)" in problem.cure
    )


def test_the_rank_under_srun_is_in_the_cure(write, monkeypatch):
    monkeypatch.setenv("SLURM_NODEID", "1")
    problem = only_problem(write(machine_rank=None))
    assert "`machine_rank`" in problem.what and "--machine_rank $SLURM_NODEID" in problem.cure


def test_the_file_that_the_rules_break_is_valid(write):
    assert launched(write()).num_ranks == 14


def test_cpu_flag_starts_one_process_whatever_the_file_says(write):
    problem = only_problem(write(use_cpu=True), "--cpu")
    assert "`--cpu`" in problem.what and "`--cpu`" in problem.cure


@pytest.mark.parametrize(
    "flag", ["--multi_gpu", "--use_fsdp", "--use_megatron_lm", "--cpu", "--multi-gpu"]
)
def test_a_flag_that_replaces_the_strategy_of_the_file_is_the_problem_and_not_the_file(write, flag):
    problem = only_problem(write(), flag)
    name = flag.replace("multi-gpu", "multi_gpu")
    assert (
        f"`{name}` replaces `distributed_type: DEEPSPEED`" in problem.what
        and f"leave `{name}` out" in problem.cure
    )


@pytest.mark.parametrize("text", ["a: b: c", "a: 1\n\tb: 2", "a: [1"])
def test_a_file_that_is_no_yaml_is_named_with_the_line(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    problem = only_problem(str(path))
    assert (
        re.search(r"is no valid YAML: line \d+, column \d+ \(", problem.what)
        and "correct that line" in problem.cure
    )


def test_all_problems_are_reported_not_only_the_first(write):
    path = write(
        num_procs=1, machine_rank=None, num_processes=15, rdzv_backend="c10d", deepspeed_config=None
    )
    _, problems = check(path, ["--gpu_ids", "0,1,2,3,4,5,6"], Batch(num_generations=5))
    keys = [
        "num_procs",
        "pdsh",
        "num_processes",
        "machine_rank",
        "gpu_ids",
        "rdzv_backend",
        "num_generations",
    ]
    assert [
        key for key, problem in zip(keys, problems, strict=True) if key not in problem.what
    ] == []


def test_one_gpu_can_only_be_shared(write):
    problem = only_problem(write(num_machines=1, machine_rank=0, num_processes=1), gpus_per_node=1)
    assert "0 or less" not in problem.what and "`--vllm_devices 0`" in problem.cure
    shared = Engines(vllm_devices=[0])
    launched(
        write(num_machines=1, machine_rank=0, num_processes=1), gpus_per_node=1, engines=shared
    )


@pytest.mark.parametrize(
    ("what", "line"), [("a.", "a: Give b"), ("a?", "a? Give b"), ("a", "a: Give b")]
)
def test_a_problem_and_its_cure_are_one_sentence(what, line):
    assert Problem(what, "Give b").line == line


def test_taken_port_matters_on_node_0_only(write, monkeypatch):
    monkeypatch.setattr(rules_nodes, "is_port_in_use", lambda port: port == 29500)
    assert "29500" in only_problem(write(machine_rank=0)).what
    launched(write(machine_rank=1))
    launched(write(machine_rank=0), "--main_process_port", "29501")


def test_what_accelerate_config_writes_for_others_is_no_problem(write):
    quiet = {
        "downcast_bf16": "no",
        "tpu_env": [],
        "tpu_use_cluster": False,
        "main_training_function": "main",
    }
    launched(
        write(**quiet, rdzv_backend="static", fsdp_config={}, debug=True, enable_cpu_affinity=False)
    )


# ---- batch arithmetic ----


@pytest.mark.parametrize("ranks", [7, 14, 28, 31, 56])
@pytest.mark.parametrize(
    "batch", [Batch(8, 1), Batch(6, 2, 3), Batch(16, 3, 1, 5), Batch(5, 4, 2), Batch(8, 1, 1, 3)]
)
def test_every_value_in_the_cure_works(batch, ranks):
    problems = list(batch_problems(batch, ranks))
    if batch.world(ranks) % batch.num_generations == 0:
        assert problems == []
        return
    offers = re.findall(r"`(\w+)` to ([\d, or]*\d)", problems[0].cure)
    assert {name for name, _ in offers} >= {
        "per_device_train_batch_size",
        "num_generations",
    } and len(offers) == 3
    for name, values in offers:
        for value in map(int, re.findall(r"\d+", values)):
            assert list(batch_problems(Batch(**{**vars(batch), name: value}), ranks)) == []


@pytest.mark.fault("22")
def test_seven_ranks_a_node_do_not_divide_by_eight():
    [problem] = batch_problems(
        Batch(num_generations=8, per_device_train_batch_size=1), num_ranks=28
    )
    assert "got 28 " in problem.what and "multiple of 8" in problem.what
    assert "`per_device_train_batch_size` to 2, 4 or 6" in problem.cure
    assert "`gradient_accumulation_steps` to 2, 4 or 6" in problem.cure
    assert "`num_generations` to 2, 4, 7 or 14" in problem.cure


def test_batches_are_those_of_the_ranks_of_all_nodes_together(write, tmp_path, monkeypatch):
    """8 + 7 + 8 + 8 ranks cut no group of 8; each node alone would."""
    monkeypatch.chdir(tmp_path)
    path = write(num_machines=4)
    uneven = {"table": (8, 7, 8, 8), "gpus_per_node": 9}
    problem = only_problem(path, batch=Batch(8, 1), **uneven)
    assert "got 31 " in problem.what and "x 31 ranks x" in problem.what
    assert "`per_device_train_batch_size` to 8, 16 or 24" in problem.cure
    assert "`num_generations` to 31" in problem.cure
    launched(path, batch=Batch(31, 1), **uneven)
    # DeepSpeed's total is compared with that of 31 ranks
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    for total in (4 * 31, 4 * 28):
        (tmp_path / "ds.json").write_text(
            json.dumps(
                {
                    "zero_optimization": zero,
                    "train_batch_size": total,
                    "gradient_accumulation_steps": "auto",
                }
            )
        )
        path = write(num_machines=4, deepspeed_config=BY_JSON)
        _, problems = check(path, [], Batch(31, 4), **uneven)
        assert [
            "`train_batch_size`" in one.what and "expected 124" in one.what for one in problems
        ] == [True] * (total != 124)


def test_generation_batch_size_must_hold_whole_steps_and_whole_groups():
    [problem] = batch_problems(Batch(8, 2, generation_batch_size=100), num_ranks=14)
    assert "got 100," in problem.what
    assert "`generation_batch_size` to 56, 112 or 168" in problem.cure
    assert list(batch_problems(Batch(8, 2, generation_batch_size=112), num_ranks=14)) == []


def test_batch_rules_of_trl():
    [lonely] = batch_problems(Batch(num_generations=1), num_ranks=7)
    assert "num_generations" in lonely.what
    [both] = batch_problems(
        Batch(8, 8, steps_per_generation=2, generation_batch_size=112), num_ranks=14
    )
    assert "steps_per_generation" in both.what and "generation_batch_size" in both.what


def test_world_batch_counts_the_ranks_that_run(write):
    _, problems = check(
        write(num_processes=15), [], Batch(num_generations=5, per_device_train_batch_size=1)
    )
    assert "1 rows x 14 ranks" in problems[-1].what


def test_accumulation_in_the_file_must_be_the_scripts(write):
    section = {**TWO_NODES["deepspeed_config"], "gradient_accumulation_steps": 1}
    problem = only_problem(
        write(deepspeed_config=section), batch=Batch(gradient_accumulation_steps=4)
    )
    assert "got 1," in problem.what and "4" in problem.what
    launched(write(deepspeed_config=section), batch=Batch())


def test_defaults_are_those_of_trl():
    fields = GRPOConfig.__dataclass_fields__
    for name in ("num_generations", "per_device_train_batch_size", "gradient_accumulation_steps"):
        assert getattr(Batch(), name) == fields[name].default
