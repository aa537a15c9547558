"""`python -m trl_multinode.tools check`: the shipped configs pass it, flags win over a file, and it runs alone."""

import os
import re
import subprocess
import sys
from contextlib import suppress

import check_kit
import pytest
from check_kit import CONFIGS, ROOT, launched, only_problem

from trl_multinode import tools
from trl_multinode.tools.check import main
from trl_multinode.tools.check.launch import Engines
from trl_multinode.tools.check.reading import read_launch
from trl_multinode.wire.secret import SECRET

UNEVEN = (7, 8, 8, 8)
NODES = {"1node": 1, "2node": 2, "4node": 4, "8node": 8}
SCRIPT = str(ROOT / "benchmarks" / "table.py")  # without a parser
quiet_machine, write = check_kit.quiet_machine, check_kit.write


# ---- the shipped configs ----


@pytest.mark.parametrize(("name", "nodes"), NODES.items())
def test_shipped_gpu_config_trains_on_seven_gpus_of_every_node_and_leaves_the_last(name, nodes):
    for node in range(nodes):
        flags = ["--machine_rank", str(node), "--main_process_ip", "node0"] if nodes > 1 else []
        launch = launched(CONFIGS / f"{name}.yaml", *flags)
        assert (launch.num_nodes, launch.started, launch.num_ranks) == (nodes, 7, 7 * nodes)
        assert launch.args.machine_rank == node
        assert launch.visible[launch.started :] == ["7"]
        assert launch.endpoint == (
            "static, node0:29500" if nodes > 1 else "static, 127.0.0.1:29500"
        )
        assert launch.launcher == "deepspeed_launcher" and launch.own_launcher is None
        assert (launch.args.zero_stage, launch.args.mixed_precision) == (3, "bf16")


# ---- file and flags ----


def test_flags_win_over_the_file(write):
    path = write(num_processes=15, machine_rank=0, rdzv_backend="c10d")
    launch = launched(path, "--num-processes", "12", "--machine_rank=1", "--rdzv_backend", "c10d")
    assert (launch.started, launch.args.machine_rank, launch.endpoint) == (
        6,
        1,
        "c10d, node0:29500",
    )


@pytest.mark.parametrize(
    ("kind", "section"), [("FSDP", {"fsdp_config": {"fsdp_version": 2}}), ("MULTI_GPU", {})]
)
def test_other_strategies_run_under_torchrun_too(write, kind, section):
    launch = launched(write(distributed_type=kind, deepspeed_config=None, **section))
    assert (launch.launcher, launch.started, launch.endpoint) == (
        "multi_gpu_launcher",
        7,
        "static, node0:29500",
    )


@pytest.mark.fault("29")
def test_shell_that_hides_the_reserved_gpu(write, monkeypatch):
    assert launched(write(num_processes=6, gpu_ids="4,5,6,7")).visible[3:] == ["7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6")
    problem = only_problem(write())
    assert "CUDA_VISIBLE_DEVICES" in problem.what and "unset" in problem.cure


# ---- nodes that differ ----


@pytest.mark.parametrize("node", range(4))
def test_each_node_starts_its_own_number_and_accelerate_reads_the_same(node):
    """The second reading is that of the words which `trl-multinode launch` gives to `accelerate launch`."""
    path = CONFIGS / "4node.yaml"
    flags = ["--machine_rank", str(node), "--main_process_ip", "node0"]
    launch = launched(path, *flags, gpus_per_node=9, table=UNEVEN)
    assert (launch.started, launch.num_ranks) == (UNEVEN[node], 31)
    assert launch.topology(node).local_ranks == range(*[(0, 7), (7, 15), (15, 23), (23, 31)][node])
    assert launch.reserved == (["7", "8"] if node == 0 else ["8"])
    total = str(launch.args.num_processes)
    again, problems = read_launch(str(path), [*flags, "--num_processes", total], [], 9)
    assert problems == [] and int(total) == 4 * UNEVEN[node]
    for one in (launch, again):
        assert int(one.torchrun.nproc_per_node) == one.started == UNEVEN[node]
        assert (one.endpoint, int(one.torchrun.nnodes)) == ("static, node0:29500", 4)


def test_a_rank_in_the_file_chooses_the_number_and_none_of_the_file_is_needed(write):
    launch = launched(write(num_processes=None), table=(7, 6))
    assert (launch.args.num_processes, launch.started, launch.num_ranks) == (12, 6, 13)


@pytest.mark.parametrize(
    ("flags", "table", "got", "cure"),
    [
        ([], (7, 8, 8), "got 3, expected `num_machines` 2", "2 numbers"),
        (["--num_processes", "14"], (7, 6), "got 14 and 7,6, expected one", "`--num_processes`"),
        (
            ["--rdzv_backend", "c10d"],
            (7, 6),
            "got `rdzv_backend` c10d, expected static",
            "`--rdzv_",
        ),
    ],
)
def test_numbers_that_cannot_be_those_of_the_nodes_are_the_only_problem(
    write, flags, table, got, cure
):
    problem = only_problem(write(), *flags, table=table)
    assert "`--ranks`" in problem.what and got in problem.what and cure in problem.cure


def test_deepspeeds_own_launcher_starts_no_number_of_a_node(write):
    section = {"deepspeed_multinode_launcher": "pdsh", "zero_stage": 2}
    problem = only_problem(write(deepspeed_config=section), table=(7, 6))
    assert "got pdsh, expected standard" in problem.what


def test_a_cure_names_the_number_of_this_node(write):
    problem = only_problem(write(), table=(8, 8))
    assert "got 8 processes a node, expected 7" in problem.what
    assert "`--ranks` with 7 for node 1" in problem.cure and "num_processes" not in problem.cure
    launched(write(), table=(7, 7))
    engines = Engines(vllm_tensor_parallel_size=2)
    assert (
        "`--ranks` with 6 for node 1 leaves 2"
        in only_problem(write(), table=(6, 7), engines=engines).cure
    )
    launched(write(), table=(7, 6), engines=engines)


def test_engines_of_other_nodes_need_a_secret(write, monkeypatch):
    """Nodes of 8 GPUs: those with 8 ranks use the engines of the one with 7."""
    problem = only_problem(write(), table=(7, 8))
    assert SECRET in problem.what and "umask" in problem.cure
    monkeypatch.setenv(SECRET, "secret of these tests")
    launched(write(), table=(7, 8))


def test_a_job_of_other_nodes_needs_other_numbers(write, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "4")
    problem = only_problem(write(), table=(7, 6))
    assert "`num_machines: 4`" in problem.cure and "`--ranks`" in problem.cure


def test_a_few_ranks_on_each_node_are_no_wrong_total(write):
    """8 is the number of GPUs of a node; without the table 4 of 8 GPUs would be taken for a mistake on 4 nodes."""
    assert launched(write(num_machines=4), table=(3, 2, 2, 2)).args.num_processes == 8


# ---- the command ----


def test_the_report_has_the_ranks_of_all_nodes(capsys):
    argv = [str(CONFIGS / "4node.yaml"), "--machine_rank", "2", "--main_process_ip", "node0"]
    own = ["--ranks", "7,8,8,8", "--gpus_per_node", "9", "--num_generations", "31"]
    assert main([*argv, *own]) == 0
    out = capsys.readouterr().out
    facts = ["7,8,8,8: here ranks 15 to 22 of 31", "GPU 8", f"{8 * 31} completions"]
    assert [fact for fact in facts if fact not in out] == []


def test_command_says_what_may_surprise(capsys, write):
    assert main([str(CONFIGS / "2node_cpu.yaml"), "--machine_rank", "0"]) == 0
    assert "`--use_cpu true`" in capsys.readouterr().out
    assert main([write()]) == 0
    assert "`machine_rank` 1" in capsys.readouterr().out


def test_command_prints_what_runs_and_succeeds(capsys):
    argv = [str(CONFIGS / "4node.yaml"), "--machine_rank", "2", "--main_process_ip", "node0"]
    script = [
        str(ROOT / "examples" / "grpo.py"),
        "--dataset_name",
        "d",
        "--reward_funcs",
        "think_format_reward",
    ]
    assert main([*argv, *script, "--max_steps", "5", "--per-device-train-batch-size", "4"]) == 0
    out = capsys.readouterr().out
    ranks = ["processes per node", "14 to 20", "28"]
    devices = ["GPU 0, 1, 2, 3, 4, 5, 6", "GPU 7", "1 a node"]
    facts = [*ranks, *devices, "ZeRO-3", "bf16", "node0:29500", script[0], "112"]
    assert [fact for fact in facts if fact not in out] == []


@pytest.mark.parametrize("content", [None, "", "a: [", "- 1"])
def test_unreadable_file_is_one_problem(tmp_path, capsys, content):
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_text(content)
    assert main([str(path)]) == 1
    assert f"`{path}`" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--machine_rnk", "1"], "--machine_rank"),
        (["--num_processes", "many"], "--num_processes"),
        (["--machine_rank", "K"], "K stands for the number of the node"),
        (["--config_file", "other.yaml"], "--config_file"),
        (["--num_generations", "0"], "--num_generations"),
        (["--ranks", "7,0"], "--ranks"),
        (["--ranks", "7, 8"], "--ranks"),
    ],
)
def test_unreadable_command_line_exits_with_2(write, capsys, flags, message):
    with pytest.raises(SystemExit) as stop:
        main([write(), *flags])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.real
def test_module_runs_as_a_command_without_loading_the_libraries_it_checks_for():
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "trl_multinode.tools",
        "check",
        CONFIGS / "2node.yaml",
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1, run.stderr
    assert "`machine_rank`" in run.stdout and "`--machine_rank K`" in run.stdout
    imported = set(re.findall(r"\| +(\w+)$", run.stderr, re.MULTILINE))
    assert "accelerate" in imported
    assert not imported & {"vllm", "trl", "transformers", "deepspeed"}


def test_words_of_a_whole_launch_are_read(write, capsys):
    path = write(machine_rank=None)
    for file in ([f"--config_file={path}"], ["--config_file", path]):
        assert main(["accelerate", "launch", "--machine_rank", "1", *file, SCRIPT]) == 0
        out = capsys.readouterr().out
        assert f"ok: {path}" in out and "table.py" in out
    with pytest.raises(SystemExit, match="2"):
        main(["accelerate", "launch", SCRIPT])


def test_output_into_a_pipe_that_nobody_reads_ends_quietly(write, monkeypatch):
    for words in (["--help"], ["check", "--help"], ["check", write()]):
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "w") as stream, monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", stream)
            # argparse and rich end the program themselves
            with suppress(SystemExit):
                assert tools.main(words) == 141
