"""Arguments of a script go through the script's own parser, and nothing else of the script is executed."""

from collections.abc import Iterator
from typing import get_type_hints

import check_kit
import pytest
from check_kit import CONFIGS, only_problem

from trl_multinode.settings import Number, OneOf, Rule, Settings
from trl_multinode.tools.check import Batch, check, report
from trl_multinode.wire.secret import SECRET

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


@pytest.mark.parametrize(
    ("words", "idle"),
    [
        (["--use_vllm", "false"], True),
        (["--vllm_mode", "colocate"], True),
        # its server may run there
        (["--vllm_mode", "server"], False),
        ([], False),
    ],
)
def test_reserved_gpus_that_no_engine_takes_are_a_problem(script, write, words, idle):
    launch, problems = check(write(), [script, *words])
    assert [problem.what.startswith("GPU 7 ") for problem in problems] == [True] * idle
    assert any("GPU 7" in note for note in report.notes(launch)) == ("server" in words)


@pytest.mark.parametrize("parses", [True, False])
@pytest.mark.parametrize(("module", "idle"), [("trl", True), ("trl_multinode", False)])
def test_reserved_gpus_are_idle_under_a_trainer_of_trl(tmp_path, write, module, idle, parses):
    path = tmp_path / "train.py"
    parser = f"from {module} import TrlParser, GRPOConfig\nTrlParser(GRPOConfig)"
    source = f"from {module} import GRPOTrainer\n"
    path.write_text(source + (f"{parser}.parse_args_and_config()" if parses else ""))
    launch, problems = check(write(), [str(path)])
    assert len(problems) == idle and launch.script.node_mode != idle
    assert all(f"`{path}` imports `GRPOTrainer`" in one.what for one in problems)
    if idle:  # without a reserved GPU, it is an ordinary launch
        assert check(write(num_processes=16), [str(path)])[1] == []


@pytest.mark.parametrize(
    ("call", "begins"),
    [
        ("trainer.train()", True),
        ("self.trainer.train()", True),
        ("trainer.train(resume_from_checkpoint=trainer.last_checkpoint())", False),
        ("trainer.train(last)", False),
        ("model.train()", False),
    ],
)
def test_script_that_never_resumes_gets_a_note(tmp_path, write, call, begins):
    path = tmp_path / "train.py"
    path.write_text(f"from trl_multinode import GRPOTrainer\n\ndef main():\n    {call}\n")
    launch, problems = check(write(), [str(path)])
    assert problems == [] and launch.script.begins_anew is begins
    assert any("step 1" in note for note in report.notes(launch)) is begins


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


LITERAL = "from trl_multinode import GRPOConfig\nargs = GRPOConfig({})\n"


@pytest.mark.parametrize(
    ("words", "batch"),
    [
        ("per_device_train_batch_size=2, num_generations=16", Batch(16, 2)),
        ("'out', max_steps=3", Batch()),
        ("num_generations=size", None),
        ("**words", None),
    ],
)
def test_the_batch_in_the_config_call_of_a_script_without_a_parser_is_checked(
    tmp_path, words, batch
):
    path = tmp_path / "train.py"
    path.write_text(LITERAL.format(words))
    launch, problems = check(FOUR_NODES[0], [*FOUR_NODES[1:], str(path)])
    assert launch.script.batch == batch
    assert ["got 56 " in one.what for one in problems] == [True] * (batch == Batch(16, 2))
    assert ("--num_generations" in launch.script.notes[0]) == (batch is None)
    own = [*FOUR_NODES[1:], str(path), "--num_generations", "4"]
    assert check(FOUR_NODES[0], own)[0].script.batch.num_generations == 4


# ---- every setting of node mode

STAGGERED, SCORED = ["--max_staleness", "2"], ["--score_groups", "0"]
NEEDS = {
    "max_age": STAGGERED,
    "recompute_kv": STAGGERED,
    "score_with_batch": SCORED,
    "dynamic_sampling": SCORED,
}
# of settings whose values follow from no declared range: valid, invalid
WORDS = {
    "engine_kwargs": (['{"max_num_seqs": 4}'], ["notjson"]),
    "score_with_batch": (["mine"], ["mine", "mine"]),
    "micro_batch_tokens": (["4096"], ["0"]),
    "max_age": (["2"], ["0"]),
    "vllm_devices": (["7"], ["-1"]),
}


def words_of_settings() -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield the name of each setting with valid and with invalid words."""
    for name, hint in get_type_hints(Settings, include_extras=True).items():
        limit = Rule.of(hint).limit
        if name in WORDS:
            valid, invalid = WORDS[name]
        elif isinstance(limit, Number):
            lowest = max(limit.least, limit.above + 1)
            valid, invalid = [f"{lowest:g}"], [f"{limit.most * 2:.0f}"]
        elif isinstance(limit, OneOf):
            valid, invalid = [limit.values[0]], ["other"]
        else:
            valid, invalid = ["true"], ["maybe"]
        yield name, valid, invalid


@pytest.mark.parametrize(("name", "valid", "invalid"), words_of_settings())
def test_each_value_of_each_setting_is_checked_and_an_invalid_one_is_named(
    script, name, valid, invalid, monkeypatch
):
    monkeypatch.setenv(SECRET, "secret of these tests")
    more = NEEDS.get(name, [])
    launch, problems = check(FOUR_NODES[0], [*FOUR_NODES[1:], script, *more, f"--{name}", *valid])
    assert (problems, launch.script.notes) == ([], ())
    launch, problems = check(FOUR_NODES[0], [*FOUR_NODES[1:], script, *more, f"--{name}", *invalid])
    assert problems and launch.script.notes == ()
    assert name in problems[0].what, problems


@pytest.mark.parametrize("given", [["--num_generations", "0"], ["--generation_batch_size", "0"]])
def test_batch_of_no_rows_ends_in_a_problem_and_not_in_a_division(script, given, capsys):
    assert report.main([*FOUR_NODES, script, *given]) == 1
    assert given[0].removeprefix("--") in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--generation_batch_size", "448"],
        ["--generation_batch_size", "224", "--score_groups", "2"],
        ["--max_staleness", "2"],
        ["--max_staleness", "1", "--gradient_accumulation_steps", "2"],
    ],
)
def test_values_that_the_config_derives_are_those_of_the_launch(script, words):
    launch, problems = check(FOUR_NODES[0], [*FOUR_NODES[1:], script, *words])
    assert (problems, launch.script.notes) == ([], ())


def test_group_that_straddles_ranks_of_the_launch_is_a_problem(script):
    words = ["--score_groups", "0", "--per_device_train_batch_size", "2"]
    assert "straddle" in only_problem(*FOUR_NODES, script, *words).what


def test_rule_that_raises_is_a_note_and_the_others_run(script, monkeypatch):
    def broken_problems(launch):
        raise KeyError("gone")

    monkeypatch.setattr(report, "LAUNCH_RULES", (broken_problems, *report.LAUNCH_RULES))
    words = ["--sync_bucket_mb", "0"]
    launch, problems = check(FOUR_NODES[0], [*FOUR_NODES[1:], script, *words])
    assert len(problems) == 1 and len(launch.script.notes) == 1
    assert "broken problems" in launch.script.notes[0] and "KeyError" in launch.script.notes[0]
