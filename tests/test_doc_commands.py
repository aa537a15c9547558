"""Every command in a bash or console block of the docs is parsed by its program: accelerate, this package, make."""

import argparse
import ast
import os
import re
import shutil
import textwrap
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
from command_parsers import SHELL, check, parsed_only
from doc_commands import ROOT, Command, Refused, blocks, commands, split

from trl_multinode import GRPOConfig

PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md")
    for path in ROOT.glob(pattern)
    if any(language in ("bash", "console") for _, language, _ in blocks(path.read_text()))
)
COMMAND = re.compile(r"^ *(?:\$ )?(accelerate launch|trl-multinode \w|make \w|python3? [\w/]+\.py)", re.MULTILINE)

import_module("trl.rewards.accuracy_rewards")  # before the fixture's stand-in for `math_verify`, which it would use


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with what the pages assume: the shipped configs, a script of the user, the examples."""
    for path in (ROOT / "accelerate_configs").glob("*.yaml"):
        shutil.copy(path, tmp_path)
    for name in ("accelerate_configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "train.py").write_text("from trl_multinode import GRPOConfig, ModelConfig, TrlParser\n")
    (tmp_path / "math_verify.py").touch()  # of the extra `gpu`; `accuracy_reward` is refused without it
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PET_", "CUDA_"))}
    with mock.patch.dict(os.environ, outside, clear=True):  # which imports change, too
        yield tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_parsed(page, folder):
    found = list(commands(page))
    for each in found:
        check(each)
    assert any(each.words[0] not in SHELL for each in found)


def test_the_pages_have_commands_of_every_program():
    programs = {each.words[0] for page in PAGES for each in commands(page)}
    assert {"accelerate", "trl-multinode", "make", "python", "srun"} <= programs


def test_no_command_stands_outside_a_bash_or_console_block():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    fenced = re.compile(r"^( *)```(?:bash|console)\n.*?^ *```", re.MULTILINE | re.DOTALL)
    outside = {page.name: COMMAND.findall(fenced.sub("", page.read_text())) for page in pages}
    assert not {name: found for name, found in outside.items() if found}


# ---- Python blocks


def python_problems(text: str) -> list[str]:
    """Blocks that do not parse, and keywords of `GRPOConfig(...)` that it does not have."""
    known, found = {each.name for each in fields(GRPOConfig)}, []
    for line, language, block in blocks(text):
        if language != "python":
            continue
        try:
            calls = [node for node in ast.walk(ast.parse(textwrap.dedent(block))) if isinstance(node, ast.Call)]
        except SyntaxError as error:
            found.append(f"line {line}: {error}")
            continue
        names = [word.arg for call in calls if ast.unparse(call.func) == "GRPOConfig" for word in call.keywords]
        found += [f"line {line}: GRPOConfig has no {name}" for name in names if name not in known]
    return found


def test_python_blocks_parse_and_their_settings_exist():
    pages = [page for pattern in ("*.md", "docs/*.md") for page in ROOT.glob(pattern)]
    texts = {page.name: page.read_text() for page in pages}
    assert sum("GRPOConfig(" in text for text in texts.values()) > 3
    assert {name: found for name, text in texts.items() if (found := python_problems(text))} == {}


def test_a_python_block_with_a_mistake_is_found():
    text = "```python\nGRPOConfig(..., max_stalenes=1)\n```\n```python\nf(\n```\n"
    first, second = python_problems(text)
    assert first == "line 2: GRPOConfig has no max_stalenes" and second.startswith("line 5: '(' was never closed")


# ---- the parsers refuse


@pytest.mark.parametrize(
    "line",
    [
        "accelerate launch --config_file 4node.yaml --machine_rnk 0 train.py",
        "accelerate launch --config_file nothing.yaml train.py",
        "accelerate launch --config_file 4node.yaml --machine_rank 0 --main_process_ip H --num_processes 27 t.py",
        "accelerate launch ... train.py",
        "accelerate launch --config_file 4node.yaml --machine_rank 0 --main_process_ip H examples/grpo.py --beat 1",
        "accelerate launch --config_file 4node.yaml --machine_rank 0 --main_process_ip H examples/recipes/two_stage.py"
        " --draft_token 3 --model_name_or_path m --dataset_name d --reward_funcs think_format_reward",
        "trl-multinode config 4x8 --engine_gpu 2",
        "trl-multinode check 4node.yaml --machine_rank 9 --main_process_ip HOST0 train.py",
        "trl-multinode check 4node.yaml --wait --machine_rank K --main_process_ip H -- accelerate launch --nope t.py",
        "trl-multinode grpo --learning_rat 1e-6",
        "trl-multinode clean --all",
        "trl-multinode tidy",
        "make demos",
        "make demo SPEED=fast",
        "python benchmarks/none.py",
        "python benchmarks/gpu.py --lists",
        "python benchmarks/table.py --now",
        "pip install 'trl-multinode[gpus]'",
        "frobnicate --all",
        "srun --nodes 4 bash -c 'exec accelerate launch --config_file 4node.yaml --machine_rnk 0 train.py'",
        "ssh node1 trl-multinode clean --all",
    ],
)
def test_a_command_with_a_mistake_is_refused(line, folder):
    with pytest.raises(Refused):
        [check(each) for each in commands(ROOT / "README.md", f"```bash\n{line}\n```\n")]


def test_a_parser_ends_what_it_parses_for():
    def command(words, known):
        parser = argparse.ArgumentParser(exit_on_error=False)
        parser.add_subparsers().add_parser("go").add_argument("--fast", action="store_true")
        parser.parse_known_args(words) if known else parser.parse_args(words)
        raise AssertionError("it went on")

    for words, known in ((["go", "--fast"], False), (["go", "--num_machines", "2"], True)):
        with parsed_only():
            command(words, known)
    for words, known in ((["go", "--fats"], False), (["go", "--fats"], True), (["go", "--num_machines", "2"], False)):
        with pytest.raises(SystemExit), parsed_only():
            command(words, known)
    with pytest.raises(Refused, match="it parses no command line"), parsed_only():
        pass


def test_lines_quotes_comments_and_pipes_are_those_of_a_shell():
    block = "a b \\\n  c  # d\nX=1 e 'f\n g' && h | i > j\n\n# k\n"
    assert list(split(block)) == [(0, ["a", "b", "c"]), (2, ["e", "f\n g"]), (2, ["h"]), (2, ["i"])]
    with pytest.raises(Refused, match="a quote is open"):
        list(split("a 'b\n"))


@pytest.mark.parametrize("block", ["f=$(trl-multinode flags) || exit\na $f b", 'a "$(trl-multinode flags)" b'])
def test_flags_that_a_command_prints_are_filled_in(block):
    found = [each.words for each in commands(ROOT / "README.md", f"```bash\n{block}\n```\n")]
    assert found[-1] == ("a", "--machine_rank", "0", "--main_process_ip", "HOST0", "b")
    assert ("f=" in block) == (("trl-multinode", "flags") in found)


def test_a_command_knows_its_line():
    (one,) = commands(Path(ROOT / "README.md"), "# T\n\n```bash\nmake test\n```\n")
    assert one == Command(ROOT / "README.md", 4, ("make", "test"))
