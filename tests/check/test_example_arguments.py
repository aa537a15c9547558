"""`examples/grpo.py` names a wrong reward, split or column, and what to write instead, before any model loads."""

import importlib.util
import json
import os
import runpy
import sys

import pytest
from check_kit import CONFIGS, ROOT, launched

from trl_multinode.errors import ConfigurationError
from trl_multinode.examples import grpo

# the example; the same rules for any script are in test_check_script.py
pytestmark = pytest.mark.nightly

find_spec = importlib.util.find_spec
REWARD = "def short_answer(completions, **_):\n    return [0.0 for _ in completions]\n"


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts the script as `python examples/grpo.py` with a dataset of one split and a model that does not exist."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "1 + 1 ="}) + "\n")
    (tmp_path / "short_rewards.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *a: None if name == "math_verify" else find_spec(name, *a),
    )

    def start(*words: str, reward: str = "think_format_reward") -> None:
        fixed = [
            "--model_name_or_path",
            "no-such/model",
            "--dataset_name",
            "rows.jsonl",
            "--reward_funcs",
            reward,
        ]
        script = str(ROOT / "examples" / "grpo.py")
        argv = [
            script,
            *fixed,
            "--use_cpu",
            "true",
            "--bf16",
            "false",
            "--output_dir",
            str(tmp_path / "out"),
            *words,
        ]
        monkeypatch.setattr(sys, "argv", argv)
        runpy.run_path(script, run_name="__main__")

    environment = dict(os.environ)
    yield start
    os.environ.clear()  # an import of TRL's trainer sets variables
    os.environ.update(environment)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt_column", "question", "--eval_strategy", "steps", "--eval_steps", "1"],
         r"'test' .*\['train'\].*`--dataset_test_split`"),
        ([], r"'prompt' .*\['question'\].*`--prompt_column`"),
    ],
)  # fmt: skip
def test_missing_split_or_column_is_named(start, words, message):
    with pytest.raises(ValueError, match=message):
        start(*words)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ("think_format_rewards", "think_format_rewards.* think_format_reward"),
        ("mine", "mine.*accuracy_reward, reasoning_accuracy_reward, think_format_reward"),
        ("accuracy_reward", "`pip install math-verify`"),
        ("short_rewards:short_anwser", "short_rewards .*'short_anwser'.* short_answer"),
    ],
)
def test_reward_that_does_not_work_is_named(start, reward, message):
    with pytest.raises(ValueError, match=message):
        start(reward=reward)


def test_splits_and_columns_that_exist_reach_the_model(start):
    words = [
        "--prompt_column",
        "question",
        "--eval_strategy",
        "steps",
        "--eval_steps",
        "1",
        "--dataset_test_split",
    ]
    with pytest.raises(ConfigurationError) as stop:
        start(*words, "train", "--use_vllm", "false")
    assert stop.value.got == "no-such/model"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "model_name_or_path",
            [
                "--prompt_column",
                "question",
                "--model_name_or_path",
                grpo.DEFAULTS["model_name_or_path"],
            ],
        ),
        ("dataset_name", ["--dataset_name", grpo.DEFAULTS["dataset_name"]]),
    ],
)
def test_without_the_hub_one_line_names_the_argument_and_the_cure(start, setting, words):
    """The tests run with HF_HUB_OFFLINE=1, and the cache of this machine has neither."""
    with pytest.raises(ConfigurationError) as stop:
        start(*words)
    assert stop.value.setting == setting and stop.value.got == words[-1]
    assert f"--{setting} FOLDER" in stop.value.cure and "\n" not in str(stop.value)


def test_without_arguments_the_defaults_are_reported_and_an_argument_replaces_one(
    monkeypatch, capsys
):
    # the default reward imports a package that these machines lack
    monkeypatch.setattr(grpo, "check_reward", lambda name: None)
    monkeypatch.setenv("RANK", "0")
    kinds = (grpo.GRPOModelArguments, grpo.GRPOScriptArguments)
    parser = grpo.StrictParser(kinds)
    model, script = parser.parse_args_and_config(["--dataset_name", "rows.jsonl"])
    assert script.dataset_name == "rows.jsonl"
    assert script.reward_funcs == grpo.DEFAULTS["reward_funcs"]
    grpo.report_defaults(model, script)
    (line,) = capsys.readouterr().out.splitlines()
    assert "--model_name_or_path" in line and "--reward_funcs accuracy_reward" in line
    assert "--dataset_name" not in line


def test_the_check_reads_the_defaults(monkeypatch):
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *a: find_spec("json" if name == "math_verify" else name, *a),
    )
    script = str(ROOT / "examples" / "grpo.py")
    flags = ["--machine_rank", "0", "--main_process_ip", "node0"]
    launch = launched(CONFIGS / "4node.yaml", *flags, script)
    assert launch.script.model == grpo.DEFAULTS["model_name_or_path"]
    assert launch.script.values["dataset_name"] == grpo.DEFAULTS["dataset_name"]
