"""The command: its levels, its forms, its exit status, and what it hides."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from doctoring import config_in

from trl_multinode.tools import main as command
from trl_multinode.tools.check.command_line import parse
from trl_multinode.tools.doctor.redaction import hide_names, hide_secrets
from trl_multinode.tools.doctor.report import main

parse_doctor = partial(parse, command="doctor")
SCRIPT = Path(__file__).parents[2] / "examples" / "grpo.py"


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    for name in [
        name for name in os.environ if name.startswith(("PET_", "SLURM_", "GLOO_", "NCCL_"))
    ]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize("level", ["static", "node", "cluster"])
def test_a_launch_without_problems_ends_with_0_at_every_level(tmp_path, capsys, level):
    assert command(["doctor", config_in(tmp_path), "--level", level]) == 0
    text = capsys.readouterr().out
    assert "processes per node" in text and "ok: 0 errors" in text
    assert ("/dev/shm" in text) == (level != "static")
    assert ("neighbours" in text) == (level == "cluster")


def test_problems_of_the_check_are_errors_of_the_doctor(tmp_path, capsys):
    config = config_in(tmp_path, num_machines=2, num_processes=3)
    assert main([config]) == 1
    text = capsys.readouterr().out
    assert "error: `num_processes`" in text and "cure: write `num_proc" in text
    assert "error: `machine_rank`" in text and "3 errors, 0 warnings" in text


def test_ranks_of_each_node_are_those_of_the_launch(tmp_path, capsys):
    config = config_in(tmp_path, num_machines=2, main_process_ip="127.0.0.1")
    words = [config, "--level", "node", "--machine_rank", "1", "--ranks", "2,1"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "2,1: here ranks 2 to 2 of 3" in text and "2 nodes x 2,1 ranks" in text


def test_a_file_that_cannot_be_read_is_an_error_without_further_levels(tmp_path, capsys):
    assert main([str(tmp_path / "none.yaml"), "--level", "node", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (
        found["ok"] is False
        and "none.yaml" in found["problems"][0]["what"]
        and "nodes" not in found
    )


def test_json_is_the_only_output_and_has_facts_and_findings(tmp_path, capsys):
    assert main([config_in(tmp_path), "--level", "node", "--json", "--machine_rank", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    (node,) = found["nodes"]
    assert found["ok"] is True and found["level"] == "node" and found["problems"] == []
    assert "cores" in {fact["name"] for fact in node["facts"]} and node["versions"]["torch"]


def test_the_scripts_arguments_reach_the_examinations(tmp_path, capsys):
    words = [
        str(SCRIPT),
        "--model_name_or_path",
        "org/none",
        "--dataset_name",
        "org/rows",
        "--use_cpu",
        "true",
    ]
    words += [
        "--reward_funcs",
        "think_format_reward",
        "--bf16",
        "false",
        "--output_dir",
        str(tmp_path / "out"),
    ]
    words += ["--sync_bucket_mb", "1024", "--report_to", "tensorboard"]
    main([config_in(tmp_path), "--level", "node", "--json", *words])
    found = json.loads(capsys.readouterr().out)
    facts = {fact["name"]: fact["value"] for fact in found["nodes"][0]["facts"]}
    assert facts["model"] == "org/none: not here" and facts["dataset"] == "org/rows: not here"
    assert (
        "2.16 GiB needed" in facts["/dev/shm"]
        and str(tmp_path / "out") in facts["disk of `output_dir`"]
    )
    assert facts["tracker"] == "tensorboard" and facts["script"].startswith(str(SCRIPT))


# ---- the command line


def test_a_switch_of_the_script_is_not_the_doctors():
    line = parse_doctor(
        ["f.yaml", "--level", "node", "--machine_rank", "1", "train.py", "--json", "--level", "3"]
    )
    assert line.level == "node" and not line.json
    assert line.flags == ["--machine_rank", "1"]
    assert line.script == ["train.py", "--json", "--level", "3"]
    line = parse_doctor(["f.yaml", "--json", "--gpus-per-node", "4", "--timeout", "5"])
    assert line.json and line.gpus_per_node == 4 and line.timeout == 5.0
    assert line.level == "static" and line.flags == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["f.yaml", "--level", "all"], "'all'"),
        (["f.yaml", "--json", "--paste"], "--paste"),
        (["--level", "node"], "required: file"),
        (["--level", "node", "f.yaml"], "config file"),
        (["f.yaml", "--timeout", "soon"], "got soon"),
    ],
)
def test_an_invalid_command_line_ends_with_2(words, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_doctor(words)
    assert stopped.value.code == 2 and said in capsys.readouterr().err


# ---- secrets


def test_secrets_are_hidden_by_variable_by_form_and_by_flag():
    environ = {
        "MY_TOKEN": "correct-horse",
        "WANDB_API_KEY": "abcdef",
        "TOKENIZERS_PARALLELISM": "false1",
        "A_TOKEN": "yes",
    }
    text = "`python train.py --hub_token hf_abcdefghijklmn --x correct-horse` https://me:pw@host/a "
    text += f"MASTER_PASSWORD=hunter22 key abcdef {'0a' * 20} --api-key=zzzz9 yes false1"
    hidden = hide_secrets(text, environ)
    for secret in ("hf_abc", "correct-horse", "me:pw", "hunter22", "abcdef", "0a0a", "zzzz9"):
        assert secret not in hidden, hidden
    assert hidden.endswith("--api-key=(hidden) yes false1") and "--hub_token (hidden)" in hidden


@pytest.mark.parametrize(
    "text",
    ["`max_tokens` 4096", "--micro_batch_tokens 8192", "a token is set", "no token, offline"],
)
def test_what_is_no_secret_stays(text):
    assert hide_secrets(text, {}) == text


@pytest.mark.nightly
def test_names_are_replaced_each_always_by_the_same(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setattr("getpass.getuser", lambda: "ann")
    text = "gpu-1 10.0.0.1, gpu-12 10.0.0.2:29500, /home/ann/x, ann, planned, 10.0.0.1, torch 2.13.0, 127.0.0.1"
    text += ", login.lab"
    assert hide_names(text, ["gpu-1", "gpu-12", "login.lab"]) == (
        "host0 address0, host1 address1:29500, ~/x, user, planned, address0, torch 2.13.0, 127.0.0.1, host2"
    )


@pytest.mark.nightly
def test_a_user_without_a_name_and_a_home_of_the_root_folder_change_nothing(monkeypatch):
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setenv("HOME", "/")
    monkeypatch.setattr("getpass.getuser", nobody)
    assert hide_names("/data/run on gpu-1", ["gpu-1"]) == "/data/run on host0"


@pytest.mark.nightly
def test_a_long_name_is_hidden_too(tmp_path, capsys, monkeypatch):
    name = "ip-10-24-130-170.us-west-2.compute.internal"
    value = " ".join(f"{number}@{name}" for number in range(9))
    monkeypatch.setattr("socket.gethostname", lambda: name)
    monkeypatch.setenv("NCCL_MY_HOSTS", value)
    main([config_in(tmp_path), "--level", "node", "--paste"])
    text = re.sub(r"[\s│|]+", "", capsys.readouterr().out)
    assert name not in text and "8@host0" in text


def test_the_block_for_an_issue_has_the_report_without_names_and_secrets(
    tmp_path, capsys, monkeypatch
):
    """A secret that NCCL's variables show, in the only output of the command."""
    monkeypatch.setenv("NCCL_MY_TOKEN", "correct-horse")
    assert main([config_in(tmp_path), "--level", "node", "--paste"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "<details><summary>trl-multinode doctor --level node</summary>\n\n```text\n"
    )
    assert text.endswith("```\n\n</details>\n") and "NCCL_MY_TOKEN=(hidden)" in text
    assert (
        os.uname().nodename not in re.findall(r"[\w-]+", text)
        and "host0" in text
        and "correct-horse" not in text
    )


@pytest.mark.nightly
@pytest.mark.real
def test_the_streamed_report_hides_secrets_too(tmp_path):
    """It is also printed where the terminal knows ASCII only."""
    environ = {**os.environ, "NCCL_MY_TOKEN": "correct-horse", "PYTHONIOENCODING": "ascii"}
    words = [
        sys.executable,
        "-m",
        "trl_multinode.tools",
        "doctor",
        config_in(tmp_path),
        "--level",
        "node",
    ]
    run = subprocess.run(words, env=environ, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.isascii() and "NCCL_MY_TOKEN=(hidden)" in run.stdout
    assert "correct-horse" not in run.stdout + run.stderr
