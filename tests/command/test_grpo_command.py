"""`trl-multinode grpo`: which words go to `accelerate launch`, and which to the script."""

from pathlib import Path

import pytest
import yaml
from accelerate.commands import launch
from check_kit import CONFIGS

import trl_multinode.examples.grpo
from trl_multinode.tools import main

NEEDED = ["--dataset_name", "d", "--reward_funcs", "think_format_reward", "my.rewards:length"]


@pytest.fixture
def launched(monkeypatch):
    """What `accelerate launch` would run, instead of running it; the script's config file is read meanwhile."""
    found = []

    def record(args):
        words = args.training_script_args
        config = yaml.safe_load(Path(words[-1]).read_text()) if "--config" in words else None
        found.append((args, words, config))

    monkeypatch.setattr(launch, "launch_command", record)

    def run(*words: str):
        assert main(["grpo", *words]) == 0
        return found.pop()

    return run


def test_each_word_goes_to_its_parser(launched):
    flags = ["--accelerate_config", "4node", "--machine-rank", "0", "--main_process_ip=node0"]
    args, words, _ = launched(
        "--seed", "0", *flags, *NEEDED, "--bf16", "true", "--num_processes", "24"
    )
    assert Path(args.config_file).samefile(CONFIGS / "4node.yaml")
    assert (args.machine_rank, args.main_process_ip, args.num_processes) == (0, "node0", 24)
    assert words == ["--seed", "0", *NEEDED, "--bf16", "true"]
    assert args.module and args.training_script == "trl_multinode.examples.grpo"


def test_a_name_of_both_is_the_scripts(launched):
    args, words, _ = launched(*NEEDED, "--gradient_accumulation_steps", "4")
    assert (
        words[-2:] == ["--gradient_accumulation_steps", "4"]
        and args.gradient_accumulation_steps is None
    )


@pytest.mark.nightly
def test_a_config_may_hold_arguments_of_both(launched, tmp_path):
    mine = {
        "learning_rate": 1e-5,
        "env": {"A": "1"},
        "dataset_name": "d",
        "reward_funcs": ["think_format_reward"],
    }
    path = tmp_path / "run.yaml"
    path.write_text(
        yaml.safe_dump(
            {**mine, "accelerate_config": str(CONFIGS / "1node.yaml"), "num_processes": 6}
        )
    )
    args, words, config = launched("--config", str(path), "--max_steps", "3")
    assert (args.num_processes, args.config_file) == (6, str(CONFIGS / "1node.yaml"))
    assert words[:-1] == ["--max_steps", "3", "--config"] and config == mine
    assert not Path(words[-1]).exists(), (
        "the copy without accelerate's keys is deleted after the launch"
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*NEEDED, "--machine_rnk", "1"], "--machine_rank"),
        ([*NEEDED, "--learning_rat", "1"], "--learning_rate"),
        (["--dataset_name", "d", "--reward_funcs", "think_formt"], "think_format_reward"),
        ([*NEEDED, "--accelerate_config", "3node"], "1node, 1node_1gpu"),
        ([*NEEDED, "--max_steps", "many"], "'many'"),
    ],
)
def test_a_mistake_is_an_error_before_a_process_starts(words, message, capsys, launched):
    with pytest.raises(SystemExit) as stop:
        main(["grpo", *words])
    assert stop.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.nightly
def test_the_help_names_arguments_that_exist_with_their_choices(capsys):
    """The short help is a list of its own: the parsers of TRL and accelerate take seconds to load."""
    assert main(["grpo", "--help"]) == 0
    shown = capsys.readouterr().out
    known = {
        flag: action
        for parser in (launch.launch_command_parser(), trl_multinode.examples.grpo.make_parser())
        for flag, action in parser._option_string_actions.items()
    }
    listed = [line.split() for line in shown.splitlines() if line.startswith("  --")]
    assert len(listed) > 40
    for flag, value, *_ in listed:
        if flag in ("--accelerate_config", "--help-all"):
            continue
        choices = known[flag].choices
        if value.startswith("{") and choices is not None:
            assert set(value.strip("{}").split(",")) == {str(each) for each in choices}, flag


@pytest.mark.nightly
def test_the_whole_help_has_every_argument_once_in_the_group_of_its_library(capsys):
    assert main(["grpo", "--help-all"]) == 0
    group, found = "", {}
    for line in capsys.readouterr().out.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            group = line.removesuffix(":")
        elif line.startswith("  -"):
            flag = line.split()[0].rstrip(",")
            assert found.setdefault(flag, group) == group
    parser = trl_multinode.examples.grpo.make_parser()
    assert {action.option_strings[0] for action in parser._actions} == found.keys()
    parts = {
        "--max_staleness": "node mode",
        "--beta": "TRL",
        "--max_steps": "training",
        "--reward_funcs": "rewards",
        "--lora_r": "model",
        "--dataset_name": "data",
    }
    for flag, part in parts.items():
        assert part in found[flag]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("text", "message"), [("a: b: c", "no valid YAML"), ("- 1", "holds no keys")]
)
def test_a_config_that_cannot_be_read_is_an_error_in_one_line(text, message, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(SystemExit):
        main(["grpo", "--config", str(tmp_path / "mine.yaml")])
    assert message in capsys.readouterr().err.splitlines()[-1]
