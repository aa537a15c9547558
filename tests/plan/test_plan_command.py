"""The command: what it prints of a model, its exit codes and its errors; docs/operate/sizing.md holds its output."""

import json
import re
import shlex
from pathlib import Path

import pytest
from plan_kit import CONFIGS, layouts, size, task
from transformers import AutoConfig

from trl_multinode.tools import main
from trl_multinode.tools.plan.hardware import GIB
from trl_multinode.tools.plan.layouts import weight_sync
from trl_multinode.tools.plan.sync_seconds import Rates, load_seconds
from trl_multinode.tools.plan.training import FREE_SHARE

PAGE = (Path(__file__).parents[2] / "docs" / "operate" / "sizing.md").read_text()
FLAGS = ["--nodes", "4x8", "--completion", "4096", "--rows", "256"]


def plan(*words: str) -> int:
    return main(["plan", *words])


# ---- what fits


@pytest.mark.parametrize("name", ["0.5B", "8B", "70B"])
def test_a_micro_batch_is_the_largest_that_fits(name):
    every = layouts(task(name))
    assert {split for split, _ in every} == {"7+1", "6+2", "4+4", "colocated"}
    for one in every.values():
        limit = (1 - FREE_SHARE) * task(name).cluster.gpu.total
        assert (one.memory.total <= limit) == (one.micro_rows > 0), one
        assert one.engine.weights == 2 * size(name).parameters / one.engine.tensor_parallel


def test_the_nodes_that_training_needs_are_the_fewest_and_weights_that_fill_a_gpu_leave_no_cache():
    engine = layouts(task("70B"))["7+1", 1].engine
    assert engine.weights > 78 * GIB and (engine.cache, engine.tokens) == (0, 0)
    needed = layouts(task("70B"))["4+4", 4].nodes_needed
    fewer, enough = (
        task("70B", f"--nodes {n}x8 --completion 4096 --rows 256") for n in (needed - 1, needed)
    )
    assert layouts(fewer)["4+4", 4].micro_rows == 0 < layouts(enough)["4+4", 4].micro_rows


def test_ahead_of_training_a_step_waits_for_the_pause_and_engines_for_their_load():
    plan_ = task("32B")
    every = layouts(plan_)
    trains, generates = every["4+4", 4], every["7+1", 1]  # the longer side of each
    found = trains.seconds
    assert found.beside == found.in_flight == found.pause + found.train < found.sync + found.train
    found = generates.seconds
    load = load_seconds(weight_sync(plan_, generates), Rates(nic=plan_.cluster.link))
    assert found.beside == pytest.approx(found.pause + load + found.generate)
    assert found.pause + found.train < found.in_flight < found.beside
    assert every["colocated", 8].seconds.pause is None


@pytest.mark.nightly
def test_a_rank_that_keeps_its_states_leaves_less_cache_to_a_colocated_engine():
    alone, beside = (
        layouts(task("8B", f"--nodes {n}x8 --completion 4096 --rows 256")) for n in (32, 1)
    )
    assert alone["colocated", 1].engine.cache > beside["colocated", 1].engine.cache + 15 * GIB


@pytest.mark.nightly
def test_offloading_moves_states_to_the_hosts(capsys):
    assert plan(
        str(CONFIGS / "235B.json"), *FLAGS, "--gpu", "H200-141", "--offload", "optimizer"
    ) in (0, 1)
    text = capsys.readouterr().out
    numbers = re.search(r"^Host memory.*", text, re.M).group()
    host, slots, left = map(float, re.findall(r" (\d[\d.]*)", numbers))
    assert host == pytest.approx(16 * 235.09e9 * 1.5 / 4 / GIB, rel=0.01)
    assert slots == pytest.approx(2 * 235.09e9 / GIB, rel=0.01) and left == 2 * slots


# ---- the command


def test_a_folder_and_its_file_are_the_same_model(tmp_path, capsys):
    entries = json.loads((CONFIGS / "0.5B.json").read_text())
    AutoConfig.for_model(entries.pop("model_type"), **entries).save_pretrained(tmp_path)
    printed = []
    for name in (str(tmp_path), str(tmp_path / "config.json")):
        assert plan(name, *FLAGS, "--json") == 0
        printed.append(json.loads(capsys.readouterr().out))
    assert printed[0]["layouts"] == printed[1]["layouts"]
    assert printed[0]["task"]["model"]["parameters"] == size("0.5B").parameters
    even = [one for one in printed[0]["layouts"] if len({*one["ranks"]}) == 1]
    assert {one["name"] for one in even} == {"7+1", "6+2", "4+4", "colocated"}


def test_a_plan_in_which_nothing_fits_says_why_and_ends_with_1(capsys):
    assert plan(str(CONFIGS / "235B.json"), *FLAGS) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "235B" in text and "4 x 8 H100-80" in text and "7+1 from 11 nodes" in text
    assert "Seconds of a step" not in text


@pytest.mark.nightly
def test_a_gpu_without_rates_gets_memory_and_no_seconds(capsys):
    assert plan(str(CONFIGS / "8B.json"), *FLAGS, "--gpu", "X1-96") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "no seconds" in text and "No seconds" in text


@pytest.mark.nightly
def test_splits_and_micro_batches_can_be_chosen(capsys):
    assert plan(str(CONFIGS / "8B.json"), *FLAGS, "--splits", "5+3,2+6", "--micro_rows", "4") == 0
    text = capsys.readouterr().out
    assert "5+3" in text and "2+6" in text and "7+1" not in text
    assert [row.split()[7] for row in text.splitlines() if row.startswith(("5+3", "2+6"))][:2] == [
        "4",
        "4",
    ]


REFUSED = {
    "--nodes 2x1": "one GPU",
    "--splits 7+2": "got '7+2', expected for example 7+1",
    "--mean 5000": "5000 > 4096",
    "--prompt 40000": "got 44096 tokens, expected 40960",
    "--run /nowhere": "`--run`",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_value_that_cannot_be_planned_is_named_with_its_cure(flags, capsys):
    assert plan(str(CONFIGS / "8B.json"), *FLAGS, *flags.split()) == 2
    assert REFUSED[flags] in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["--nodes 4", "--gpu 80"])
def test_a_word_that_cannot_be_read_is_named_with_what_it_should_be(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        plan(str(CONFIGS / "8B.json"), *FLAGS, *flags.split())
    flag, word = flags.split()
    assert stop.value.code == 2
    assert f"argument {flag}: got '{word}', expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content", [None, "{", '{"model_type": "none"}', '{"model_type": "clip"}', "{}"]
)
def test_a_model_without_a_config_that_can_be_read_is_named(content, tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    if content is not None:
        (folder / "config.json").write_text(content)
    assert plan(str(folder), *FLAGS) == 2
    error = capsys.readouterr().err
    assert str(folder) in error and len(error.splitlines()) == 1
    (folder / "config.json").write_text('{"model_type": "mamba", "num_hidden_layers": 2}')
    assert plan(str(folder), *FLAGS) == 2
    assert "got 'mamba'" in capsys.readouterr().err


# ---- the page


COMMANDS = re.findall(r"```console\n\$ trl-multinode plan (.*)\n((?:.*\n)*?)```", PAGE)


@pytest.mark.parametrize("command", [command for command, _ in COMMANDS])
def test_the_page_has_what_the_command_prints(command, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    plan(*shlex.split(command))
    printed = capsys.readouterr().out
    for part in dict(COMMANDS)[command].split("...\n"):  # parts that the page leaves out
        assert part in printed


# ---- what to type


SCRIPT = """\
from trl_multinode import GRPOConfig, ModelConfig, TrlParser

if __name__ == "__main__":
    args, model = TrlParser((GRPOConfig, ModelConfig)).parse_args_and_config()
"""


def test_a_plan_of_a_config_file_and_a_script_takes_its_numbers_from_them_and_ends_with_commands(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    assert main(["config", "2x8"]) == 0 and capsys.readouterr()
    arguments = ["--model_name_or_path", str(CONFIGS / "32B.json"), "--output_dir", "a b"]
    arguments += ["--max_completion_length", "512", "--per_device_train_batch_size", "4"]
    assert plan("2node.yaml", "train.py", *arguments, "--gpu", "H200-141", "--json") == 0
    task_ = json.loads(capsys.readouterr().out)["task"]
    assert (task_["cluster"]["nodes"], task_["rows"]["longest"], task_["micro_rows"]) == (2, 512, 4)
    assert task_["rows"]["number"] == 4 * 7
    Path("2node_6+2.yaml").touch()
    assert plan("2node.yaml", "train.py", *arguments, "--gpu", "H200-141", "--splits", "6+2") == 0
    lines = capsys.readouterr().out.splitlines()
    config, check, launch = commands(lines)
    assert main(config) == 0 and main(check) in (
        0,
        1,
    )  # the file of the plan has another name than its own
    assert Path(check[1]).exists() and launch[:2] == ["launch", check[1]]
    assert launch[2:] == check[check.index("train.py") :] and "a b" in launch
    assert any("--machine_rank K" in line and "scheduler" in line for line in lines)


def commands(lines: list[str]) -> list[list[str]]:
    return [shlex.split(line)[1:] for line in lines if line.startswith("  trl-multinode")]


def test_a_split_that_is_the_files_own_needs_no_other_file_and_no_other_batch(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    assert main(["config", "2x8", "--out", "my own.yaml"]) == 0 and capsys.readouterr()
    words = ["my own.yaml", "train.py", "--model_name_or_path", str(CONFIGS / "8B.json")]
    assert plan(*words, "--splits", "7+1") == 0
    check, launch = commands(capsys.readouterr().out.splitlines())
    assert check[1] == launch[1] == "my own.yaml"
    assert "--per_device_train_batch_size" not in check


@pytest.mark.parametrize(
    ("rows", "more"), [(256, []), (252, []), (100, ["--micro_rows", "2"]), (1, [])]
)
def test_numbers_of_the_plan_are_those_of_the_commands_and_divide(
    rows, more, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    flags = ["--nodes", "4x8", "--completion", "512", "--rows", str(rows), "--splits", "6+2", *more]
    assert plan(str(CONFIGS / "8B.json"), *flags) == 0
    lines = capsys.readouterr().out.splitlines()
    config, check, launch = commands(lines)
    assert main(config) == 0 and main(check) == 0, capsys.readouterr().out
    given = dict(zip(launch[3::2], launch[4::2], strict=True))
    assert given["--model_name_or_path"] == str(CONFIGS / "8B.json")
    assert given["--max_completion_length"] == "512"
    a_rank = int(given["--per_device_train_batch_size"])
    a_rank *= int(given["--gradient_accumulation_steps"])
    # in flight a rank has whole groups
    step = 8 if int(given["--max_staleness"]) > 1 else 1
    assert abs(6 * a_rank - rows) <= 6 * step
    assert any(f"{24 * a_rank} instead of {4 * rows} rows" in line for line in lines) == (
        6 * a_rank != rows
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["2node.yaml", "train.py"], "no `TrlParser`"),
        (["none.yaml", "train.py"], "none.yaml"),
        (["2node.yaml", "parses.py"], "no `--model_name_or_path`"),
    ],
)
def test_a_script_that_says_no_model_is_named(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print()\n")
    Path("parses.py").write_text(SCRIPT)
    assert main(["config", "2x8"]) == 0
    assert plan(*words) == 2 and message in capsys.readouterr().err
