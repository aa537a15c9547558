"""Arguments of a script go through the script's own parser, and nothing else of the script is executed."""

import check_kit
import pytest
from check_kit import CONFIGS, only_problem

from trl_multinode.tools.check import Batch, check

quiet_machine, write = check_kit.quiet_machine, check_kit.write
FOUR_NODES = [str(CONFIGS / "4node.yaml"), "--machine_rank", "2", "--main_process_ip", "node0"]

# The module's `model` is not needed, although a function that is needed has a local one of this name
USERS = """
from __future__ import annotations
import os
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoModelForCausalLM
from trl_multinode import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser

try:
    from no_such_package import MORE
except ImportError:
    MORE = []

Path({touched!r}).write_text("the script ran")
model = Path({touched!r}).write_text("the model was loaded")

def tasks():
    model = ["sums", "words"]
    return model + MORE

TASKS = tasks()
raise RuntimeError("the script ran")

@dataclass
class TaskArguments(ScriptArguments):
    task: str = field(default="sums", metadata={{"help": f"one of {{TASKS}}"}})

    def __post_init__(self):
        if self.task not in TASKS:
            raise ValueError(f"task must be one of {{TASKS}}, got {{self.task}}")

def main():
    Path({touched!r}).write_text("main ran")
    kinds = (TaskArguments, GRPOConfig, ModelConfig)
    parser = TrlParser(kinds)
    parser.add_argument("--shout", action="store_true")
    task_args, training_args, model_args = parser.parse_args_and_config()[:3]
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def script(tmp_path):
    touched = tmp_path / "touched"
    path = tmp_path / "train.py"
    path.write_text(USERS.format(touched=str(touched)))
    yield str(path)
    assert not touched.exists()


def test_a_users_script_is_read_without_running_it(script):
    words = ["--num_generations", "4", "--num_engines", "1", "--model_name_or_path", "m", "--shout"]
    words += ["--score_groups", "0"]
    launch, problems = check(FOUR_NODES[0], [*FOUR_NODES[1:], script, *words])
    assert problems == [] and launch.script.notes == ()
    assert launch.script.batch == Batch(num_generations=4)
    assert (launch.script.engines.num_engines, launch.script.model) == (1, "m")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--num_generatons", "4"], "--num_generations"),
        (["--task", "sum"], "got sum"),
        (["--max_steps", "many"], "'many'"),
        (["--config", "none.yaml"], "'none.yaml'"),
        (["--generation_kwargs", "{"], "property name"),
        (["--generation_kwargs", '{"do_sample": true}'], "'do_sample'"),
        (["--num_generations", "5"], "got 224 "),
        (["--score_groups", "0", "--per_device_train_batch_size", "4"], "4 x 1 = 4"),
    ],
)
def test_what_a_users_parser_refuses_is_a_problem(script, words, what):
    assert what in only_problem(*FOUR_NODES, script, *words).what


def test_words_that_a_script_leaves_to_others_are_no_problem(tmp_path):
    path = tmp_path / "train.py"
    leaves = "parse_args_and_config(return_remaining_strings=True)"
    path.write_text(
        USERS.format(touched=str(tmp_path / "touched")).replace("parse_args_and_config()", leaves)
    )
    _, problems = check(FOUR_NODES[0], [*FOUR_NODES[1:], str(path), "--mine", "4"])
    assert problems == []


def test_values_of_the_scripts_config_file_count(script, tmp_path):
    (tmp_path / "run.yaml").write_text(
        "num_generations: 4\nper_device_train_batch_size: 2\nenv:\n  A_NAME: x\n"
    )
    launch, problems = check(
        FOUR_NODES[0], [*FOUR_NODES[1:], script, "--config", str(tmp_path / "run.yaml")]
    )
    assert problems == [] and launch.script.batch == Batch(4, 2)


def test_script_without_node_mode_needs_no_reserved_gpu(script, write):
    launch, problems = check(write(num_processes=16), [script, "--use_vllm", "false"])
    assert problems == [] and not launch.script.node_mode


def test_a_module_is_read_too(tmp_path, monkeypatch):
    (tmp_path / "checked_package.py").write_text(USERS.format(touched=str(tmp_path / "touched")))
    (tmp_path / "start.py").write_text("from checked_package import main\n\nmain()\n")
    monkeypatch.syspath_prepend(tmp_path)
    for words in (["--module", "checked_package"], [str(tmp_path / "start.py")]):
        launch, problems = check(FOUR_NODES[0], [*FOUR_NODES[1:], *words, "--num_generations", "4"])
        assert problems == [] and launch.script.batch.num_generations == 4


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("source", "note"),
    [
        ("print(1)", "`TrlParser`"),
        ("TrlParser(GRPOConfig).parse_args_and_config()", "NameError: name 'TrlParser'"),
        (
            "from trl import TrlParser\nkinds = [type(AutoConfig.from_pretrained('x'))]\n"
            "TrlParser(kinds).parse_args_and_config()",
            "`from_pretrained`",
        ),
    ],
)
def test_script_whose_parser_cannot_be_built_gets_a_note(tmp_path, source, note):
    path = tmp_path / "train.py"
    path.write_text(source)
    launch, problems = check(FOUR_NODES[0], [*FOUR_NODES[1:], str(path), "--num_generations", "4"])
    assert problems == [] and note in launch.script.notes[0]


@pytest.mark.nightly
def test_batch_of_a_script_without_a_parser_is_checked(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("print(1)")
    problem = only_problem(
        *FOUR_NODES, str(path), "--per_device_train_batch_size", "1", "--unknown", "2"
    )
    assert "got 28 " in problem.what
