"""`python -m trl_multinode.check`: the shipped configs pass it, every rule names its cure, nothing is started."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.run as torchrun
import yaml

from trl_multinode import check as check_module
from trl_multinode.check import Batch, Launch, Problem, batch_problems, check, main

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "accelerate_configs"
NODES = {"1node": 1, "2node": 2, "4node": 4, "8node": 8}
# Valid for node 1 of two; the tests of the rules break one thing each.
TWO_NODES = {
    "distributed_type": "DEEPSPEED",
    "num_machines": 2,
    "num_processes": 14,
    "machine_rank": 1,
    "main_process_ip": "node0",
    "main_process_port": 29500,
    "deepspeed_config": {"zero_stage": 3, "deepspeed_multinode_launcher": "standard"},
}


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    """No test depends on the GPUs that this shell hides, or on ports that something else uses."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(check_module, "is_port_in_use", lambda port: False)


@pytest.fixture
def write(tmp_path):
    """Writes `TWO_NODES` with changes, a `None` leaving the key out, and returns the path."""

    def write(**changes) -> str:
        path = tmp_path / "config.yaml"
        file = {key: value for key, value in {**TWO_NODES, **changes}.items() if value is not None}
        path.write_text(yaml.safe_dump(file))
        return str(path)

    return write


def launched(path: str | Path, *flags: str, **options) -> Launch:
    launch, problems = check(str(path), list(flags), **options)
    assert problems == [] and launch is not None
    return launch


def only_problem(path: str, *flags: str, **options) -> Problem:
    _, problems = check(path, list(flags), **options)
    assert len(problems) == 1, problems
    return problems[0]


# ---- the shipped configs ----


@pytest.mark.parametrize("name, nodes", NODES.items())
def test_shipped_gpu_config_trains_on_seven_gpus_of_every_node_and_leaves_the_last(name, nodes):
    for node in range(nodes):
        flags = ["--machine_rank", str(node), "--main_process_ip", "node0"] if nodes > 1 else []
        launch = launched(CONFIGS / f"{name}.yaml", *flags)
        assert (launch.num_nodes, launch.started, launch.num_ranks) == (nodes, 7, 7 * nodes)
        assert launch.args.machine_rank == node
        assert launch.visible[launch.started :] == ["7"]
        assert launch.endpoint == ("static, node0:29500" if nodes > 1 else "static, 127.0.0.1:29500")
        assert launch.launcher == "deepspeed_launcher" and launch.own_launcher is None
        assert (launch.args.zero_stage, launch.args.mixed_precision) == (3, "bf16")


@pytest.mark.parametrize("node", ["0", "1"])
def test_shipped_cpu_config_is_two_nodes_of_two_ranks_on_this_machine(node):
    launch = launched(CONFIGS / "2node_cpu.yaml", "--machine_rank", node)
    assert (launch.num_nodes, launch.started, launch.visible) == (2, 2, None)
    assert launch.endpoint == "static, 127.0.0.1:29500"


def test_no_config_is_shipped_without_a_test():
    assert {path.stem for path in CONFIGS.iterdir()} == {*NODES, "2node_cpu"}


@pytest.mark.parametrize("name", [*NODES, "2node_cpu"])
def test_header_of_a_shipped_config_says_what_to_type_on_each_node(name):
    header = (CONFIGS / f"{name}.yaml").read_text().partition("\n\n")[0]
    rank = " --machine_rank K" if name != "1node" else ""
    assert f"accelerate launch --config_file accelerate_configs/{name}.yaml{rank}" in header
    assert f"python -m trl_multinode.check accelerate_configs/{name}.yaml{rank}" in header


@pytest.mark.parametrize("name", ["2node", "4node", "8node", "2node_cpu"])
def test_forgotten_rank_is_an_error_with_every_shipped_config_of_several_nodes(name):
    problem = only_problem(str(CONFIGS / f"{name}.yaml"), "--main_process_ip", "node0")
    assert "`machine_rank` is missing" in problem.what and "--machine_rank K" in problem.cure


@pytest.mark.parametrize("total, reserved", [(24, ["6", "7"]), (16, ["4", "5", "6", "7"])])
def test_other_splits_are_a_change_of_num_processes_only(total, reserved):
    flags = ["--machine_rank", "1", "--main_process_ip", "node0", "--num_processes", str(total)]
    launch = launched(CONFIGS / "4node.yaml", *flags)
    assert launch.visible[launch.started :] == reserved


# ---- the rules: one broken thing each, the whole problem and its cure ----

RULES = {
    "pdsh": (
        {"deepspeed_config": {"zero_stage": 3}},
        "got pdsh, expected standard",
        "`deepspeed_multinode_launcher: standard`",
    ),
    "own launcher": (
        {"deepspeed_config": {"deepspeed_multinode_launcher": "openmpi"}},
        "got openmpi, expected standard",
        "`deepspeed_multinode_launcher: standard`",
    ),
    "floor": ({"num_processes": 15}, "accelerate runs 7 on each (got 15", "14 (7 a node)"),
    "floor below one": ({"num_processes": 1}, "accelerate runs 0 on each (got 1", "2 (1 a node)"),
    "no rank": ({"machine_rank": None}, "`machine_rank` is missing", "pass `--machine_rank K`"),
    "rank out of range": ({"machine_rank": 2}, "got 2, expected 0 to 1", "`--machine_rank` 0 to 1"),
    "rank without nodes": ({"num_machines": 1, "num_processes": 7}, "got 1, expected 0 to 0", "`num_machines`"),
    "no address": ({"main_process_ip": None}, "a host named None", "pass `--main_process_ip HOST0`"),
    "own ports": ({"main_process_port": 0}, "a port of its own", "`main_process_port: 29500`"),
    "hidden GPU": ({"gpu_ids": "0,1,2,3,4,5,6"}, "got 7 visible GPUs for 7 processes, expected 8", "`gpu_ids: all`"),
    "number as GPU ids": ({"gpu_ids": 7}, "got YAML's 7, expected a string", "`gpu_ids: all`"),
    "no GPU left": ({"num_processes": 16}, "got 8 processes a node, expected 7 or less", "`num_processes: 14`"),
    "bare no": ({"mixed_precision": False}, "got YAML's False, expected a string", '`mixed_precision: "no"`'),
    "unknown key": ({"num_procs": 14}, "rejects a file with the key `num_procs`", "did you mean num_processes?"),
    "flag as key": ({"max_restarts": 3}, "rejects a file with the key `max_restarts`", "pass `--max_restarts`"),
    "section's key": ({"zero_stage": 3}, "rejects a file with the key `zero_stage`", "`deepspeed_config:`"),
    "ignored key": ({"rdzv_backend": "c10d"}, "got 'c10d', but 'static' would run", "pass `--rdzv_backend`"),
    "ignored switch": ({"same_network": True}, "accelerate ignores `same_network`", "delete it from the file"),
    "ignored affinity": (
        {"enable_cpu_affinity": True},
        "got True, but False would run",
        "pass `--enable_cpu_affinity`",
    ),
    "unread section": ({"fsdp_config": {"fsdp_version": 2}}, "nothing reads `fsdp_config`", "delete it"),
    "unread dynamo": ({"dynamo_backend": "INDUCTOR"}, "nothing reads `dynamo_backend`", "delete it"),
    "unread TPU key": ({"tpu_name": "pod"}, "nothing reads `tpu_name`", "delete it"),
    "typo in a section": (
        {"deepspeed_config": {"zero_stge": 3, "deepspeed_multinode_launcher": "standard"}},
        "nothing reads `zero_stge` under `deepspeed_config`",
        "did you mean zero_stage?",
    ),
    "MULTI_CPU": (
        {"distributed_type": "MULTI_CPU", "num_processes": 4, "deepspeed_config": None},
        "`distributed_type: MULTI_CPU` starts one process a node and says nothing (got 1, expected 2)",
        "`distributed_type: DEEPSPEED`",
    ),
    "Megatron": (
        {"distributed_type": "MEGATRON_LM", "deepspeed_config": None},
        "got MEGATRON_LM, expected DEEPSPEED, FSDP or MULTI_GPU",
        "`distributed_type: DEEPSPEED`",
    ),
    "unknown type": ({"distributed_type": "DEEPSPED"}, "'DEEPSPED' is not a valid", "follow that sentence"),
    "no count": ({"num_processes": None}, "manually pass in `--num_processes`", "follow that sentence"),
}


@pytest.mark.parametrize("changes, what, cure", RULES.values(), ids=RULES.keys())
def test_rule_names_what_and_cure(write, changes, what, cure):
    problem = only_problem(write(**changes))
    assert what in problem.what
    assert cure in problem.cure


def test_the_file_that_the_rules_break_is_valid(write):
    assert launched(write()).num_ranks == 14


def test_cpu_flag_starts_one_process_whatever_the_file_says(write):
    problem = only_problem(write(use_cpu=True), "--cpu")
    assert "`--cpu` starts one process a node" in problem.what and "leave `--cpu` out" in problem.cure


def test_all_problems_are_reported_not_only_the_first(write):
    path = write(num_procs=1, machine_rank=None, num_processes=15, rdzv_backend="c10d", deepspeed_config=None)
    _, problems = check(path, ["--gpu_ids", "0,1,2,3,4,5,6"], Batch(num_generations=5))
    keys = ["num_procs", "pdsh", "num_processes", "machine_rank", "gpu_ids", "rdzv_backend", "num_generations"]
    assert [key for key, problem in zip(keys, problems, strict=True) if key not in problem.what] == []


def test_shell_that_hides_the_reserved_gpu(write, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6")
    problem = only_problem(write())
    assert "CUDA_VISIBLE_DEVICES of this shell hides" in problem.what and "unset" in problem.cure


def test_gpu_ids_that_leave_one_for_the_engine_are_fine(write):
    assert launched(write(num_processes=6, gpu_ids="4,5,6,7")).visible[3:] == ["7"]


def test_one_gpu_can_only_be_shared(write):
    problem = only_problem(write(num_machines=1, machine_rank=0, num_processes=1), gpus_per_node=1)
    assert "no GPU is left over" in problem.what and problem.cure.startswith("name a training GPU")


def test_taken_port_matters_on_node_0_only(write, monkeypatch):
    monkeypatch.setattr(check_module, "is_port_in_use", lambda port: port == 29500)
    assert "port 29500 is taken" in only_problem(write(machine_rank=0)).what
    launched(write(machine_rank=1))
    launched(write(machine_rank=0), "--main_process_port", "29501")


def test_flags_win_over_the_file(write):
    path = write(num_processes=15, machine_rank=0, rdzv_backend="c10d")
    launch = launched(path, "--num-processes", "12", "--machine_rank=1", "--rdzv_backend", "c10d")
    assert (launch.started, launch.args.machine_rank, launch.endpoint) == (6, 1, "c10d, node0:29500")


@pytest.mark.parametrize("kind", ["FSDP", "MULTI_GPU"])
def test_other_strategies_run_under_torchrun_too(write, kind):
    launch = launched(write(distributed_type=kind, deepspeed_config=None))
    assert (launch.launcher, launch.started, launch.endpoint) == ("multi_gpu_launcher", 7, "static, node0:29500")


def test_what_accelerate_config_writes_for_others_is_no_problem(write):
    quiet = {"downcast_bf16": "no", "tpu_env": [], "tpu_use_cluster": False, "main_training_function": "main"}
    launched(write(**quiet, rdzv_backend="static", fsdp_config={}, debug=True, enable_cpu_affinity=False))


# ---- batch arithmetic ----


@pytest.mark.parametrize("ranks", [7, 14, 28, 56])
@pytest.mark.parametrize("batch", [Batch(8, 1), Batch(6, 2, 3), Batch(16, 3, 1, 5), Batch(5, 4, 2), Batch(8, 1, 1, 3)])
def test_every_value_in_the_cure_works(batch, ranks):
    problems = list(batch_problems(batch, ranks))
    if batch.world(ranks) % batch.num_generations == 0:
        assert problems == []
        return
    offers = re.findall(r"`--(\w+)` ([\d, or]*\d)", problems[0].cure)
    assert {name for name, _ in offers} >= {"per_device_train_batch_size", "num_generations"} and len(offers) == 3
    for name, values in offers:
        for value in map(int, re.findall(r"\d+", values)):
            assert list(batch_problems(Batch(**{**vars(batch), name: value}), ranks)) == []


def test_seven_ranks_a_node_do_not_divide_by_eight():
    [problem] = batch_problems(Batch(num_generations=8, per_device_train_batch_size=1), num_ranks=28)
    assert "got 28 completions = 1 rows x 28 ranks x 1 steps, expected a multiple of 8" in problem.what
    assert "`--per_device_train_batch_size` 2, 4 or 6" in problem.cure
    assert "`--gradient_accumulation_steps` 2, 4 or 6" in problem.cure
    assert "`--num_generations` 2, 4, 7 or 14" in problem.cure


def test_generation_batch_size_must_hold_whole_steps_and_whole_groups():
    [problem] = batch_problems(Batch(8, 2, generation_batch_size=100), num_ranks=14)
    assert "got 100, expected a multiple of 2 rows x 14 ranks and of 8 generations" in problem.what
    assert "`--generation_batch_size` 56, 112 or 168" in problem.cure
    assert list(batch_problems(Batch(8, 2, generation_batch_size=112), num_ranks=14)) == []


def test_batch_rules_of_trl():
    [lonely] = batch_problems(Batch(num_generations=1), num_ranks=7)
    assert "expected 2 or more" in lonely.what
    [both] = batch_problems(Batch(8, 8, steps_per_generation=2, generation_batch_size=112), num_ranks=14)
    assert "only one of" in both.what and "leave one of them out" in both.cure


def test_world_batch_counts_the_ranks_that_run(write):
    _, problems = check(write(num_processes=15), [], Batch(num_generations=5, per_device_train_batch_size=1))
    assert "1 rows x 14 ranks" in problems[-1].what


def test_accumulation_in_the_file_must_be_the_scripts(write):
    section = {**TWO_NODES["deepspeed_config"], "gradient_accumulation_steps": 1}
    problem = only_problem(write(deepspeed_config=section), batch=Batch(gradient_accumulation_steps=4))
    assert "got 1, expected 4" in problem.what and "delete it" in problem.cure
    launched(write(deepspeed_config=section), batch=Batch())


def test_defaults_are_those_of_trl_and_transformers():
    assert Batch().num_generations == _default("trl", "trainer/grpo_config.py", "num_generations")
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        assert getattr(Batch(), name) == _default("transformers", "training_args.py", name)


def _default(package: str, file: str, name: str) -> object:
    """Default of a dataclass field in a source file; importing TRL would take 13 s."""
    spec = importlib.util.find_spec(package)
    tree = ast.parse(Path(spec.submodule_search_locations[0], file).read_text())
    field = next(n for n in ast.walk(tree) if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == name)
    return next(keyword.value.value for keyword in field.value.keywords if keyword.arg == "default")


# ---- the command ----


def test_command_prints_what_runs_and_succeeds(capsys):
    argv = [str(CONFIGS / "4node.yaml"), "--machine_rank", "2", "--main_process_ip", "node0"]
    assert main([*argv, "examples/grpo.py", "--max_steps", "5", "--per-device-train-batch-size", "4"]) == 0
    rows = dict(re.findall(r"│ (.*?) +│ (.*?) +│", capsys.readouterr().out))
    assert rows == {
        "nodes": "4",
        "processes per node": "7: here ranks 14 to 20 of 28",
        "training devices": "GPU 0, 1, 2, 3, 4, 5, 6",
        "reserved devices": "GPU 7",
        "launcher": "torchrun, DeepSpeed ZeRO-3, mixed precision bf16",
        "rendezvous": "static, node0:29500",
        "world batch": "112 completions: 14 prompts x 8 generations",
    }


def test_command_says_what_may_surprise(capsys, write):
    assert main([str(CONFIGS / "2node_cpu.yaml"), "--machine_rank", "0"]) == 0
    out = capsys.readouterr().out
    assert "the script needs its own `--use_cpu true`" in out and "must be this one machine" in out
    assert main([write()]) == 0
    assert "`machine_rank` 1 is the file's" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, "", "a: [", "- 1"])
def test_unreadable_file_is_one_problem(tmp_path, capsys, content):
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_text(content)
    assert main([str(path)]) == 1
    assert f"cannot read `{path}`" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--machine_rnk", "1"], "did you mean --machine_rank?"),
        (["--num_processes", "many"], "invalid int value: 'many'"),
        (["--config_file", "other.yaml"], "two config files"),
        (["--num_generations", "0"], "got 0, expected a number from 1"),
    ],
)
def test_unreadable_command_line_exits_with_2(write, capsys, flags, message):
    with pytest.raises(SystemExit) as stop:
        main([write(), *flags])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_nothing_is_started(write, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("started something")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(torchrun, "run", refuse)
    for changes, *_ in RULES.values():
        check(write(**changes), [])


def test_module_runs_as_a_command_without_loading_the_libraries_it_checks_for():
    command = [sys.executable, "-X", "importtime", "-m", "trl_multinode.check", CONFIGS / "2node.yaml"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1, run.stderr
    assert "`machine_rank` is missing" in run.stdout and "cure: pass `--machine_rank K`" in run.stdout
    imported = set(re.findall(r"\| +(\w+)$", run.stderr, re.MULTILINE))
    assert "accelerate" in imported
    assert not imported & {"vllm", "trl", "transformers", "deepspeed"}
