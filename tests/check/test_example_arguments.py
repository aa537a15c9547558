"""`examples/grpo.py` names a wrong reward, split or column, and what to write instead, before any model loads."""

import importlib.util
import json
import os
import runpy
import sys

import pytest
from check_kit import ROOT

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
            "no/such/model",
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
    with pytest.raises(OSError, match="no/such/model"):
        start(*words, "train", "--use_vllm", "false")
