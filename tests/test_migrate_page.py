"""Every key of docs/migrate.md exists: this library's and TRL's in the code, others' in tests/foreign_keys.json.

That file has the keys of the other frameworks' own parsers and config files, with the commit that they were read from.
"""

import ast
import importlib.util
import json
import re
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import trl
import trl.scripts.vllm_serve
from accelerate.commands.launch import launch_command_parser

from trl_multinode import GRPOConfig, ModelConfig
from trl_multinode.command import COMMANDS
from trl_multinode.examples.grpo import GRPOScriptArguments

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "migrate.md").read_text()
FOREIGN = json.loads((Path(__file__).parent / "foreign_keys.json").read_text())
PREFIXES = ("", "actor_rollout_ref.", "--")  # which the page leaves out
SPAN = re.compile(r"`([^`]+)`")
SECTIONS = {"From open-r1": "open-r1", "From OpenRLHF": "OpenRLHF", "From verl": "verl"}


def tables(title: str) -> list[list[str]]:
    """Rows of the tables of a section, without their headings."""
    (section,) = [part for part in PAGE.split("\n## ") if part.startswith(f"{title}\n")]
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if line[:1] == "|"
    ]
    return [row for row in rows if "here" not in row and not row[0].startswith("---")]


def keys(cell: str) -> list[str]:
    """The keys of a cell; a value after "=" is dropped."""
    return [span.partition("=")[0] for span in SPAN.findall(cell)]


@cache
def known() -> frozenset[str]:
    """Names that the right side of a table may have."""
    configs = {each.name for kind in (GRPOConfig, ModelConfig, GRPOScriptArguments) for each in fields(kind)}
    return frozenset(configs | vars(launch_command_parser().parse_args(["x"])).keys())


@cache
def engine_arguments() -> frozenset[str]:
    """Fields of vLLM's `EngineArgs`, from its source: an import would take 10 s."""
    path = Path(importlib.util.find_spec("vllm").origin).parent / "engine" / "arg_utils.py"
    (found,) = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == "EngineArgs"]
    return frozenset(node.target.id for node in found.body if isinstance(node, ast.AnnAssign))


def unknown(cell: str) -> list[str]:
    """What a cell on the right side names, and what exists nowhere."""
    lost = []
    for span in SPAN.findall(cell):
        name, _, value = span.partition("=")
        if span.startswith("trl-multinode "):
            lost += [span] if span.split()[1] not in COMMANDS else []
        elif name not in known():
            lost.append(span)
        elif name == "engine_kwargs" and value:
            lost += sorted(json.loads(value).keys() - engine_arguments())
    return lost


ALL = ["From TRL, server mode", "From TRL, colocation", *SECTIONS]


@pytest.mark.parametrize("title", ALL)
def test_every_key_of_ours_exists(title):
    rows = tables(title)
    assert len(rows) > 7 and all(len(row) == 3 and (row[1] == "none" or keys(row[1])) for row in rows)
    assert [(row[0], lost) for row in rows if (lost := unknown(row[1]))] == []


@pytest.mark.parametrize("title", ALL[:2])
def test_every_key_of_trl_exists(title):
    ours = {each.name for each in fields(trl.GRPOConfig)} | {"num_processes"}
    served = {f"--{each.name}" for each in fields(trl.scripts.vllm_serve.ScriptArguments)}
    found = [key for row in tables(title) for key in keys(row[0])]
    assert len(found) > 6 and [key for key in found if key not in ours | served] == []


def test_every_argument_of_trls_server_has_a_row():
    served = {f"--{each.name}" for each in fields(trl.scripts.vllm_serve.ScriptArguments)}
    assert served == {key for row in tables("From TRL, server mode") for key in keys(row[0]) if key.startswith("--")}


def test_every_field_of_trls_server_and_colocation_has_a_row():
    """New fields of TRL with `vllm` in their name; those of its correction for older weights stay as they are."""
    found = {each.name for each in fields(trl.GRPOConfig) if "vllm" in each.name and "importance" not in each.name}
    assert found <= {key for title in ALL[:2] for row in tables(title) for cell in row[:2] for key in keys(cell)}


@pytest.mark.parametrize("title", SECTIONS)
def test_every_key_of_another_framework_exists_there(title):
    source = FOREIGN[SECTIONS[title]]
    assert source["commit"] and len(source["keys"]) > 80
    found = [key for row in tables(title) for key in keys(row[0]) if "/" not in key]
    lost = [key for key in found if not any(prefix + key in source["keys"] for prefix in PREFIXES)]
    assert len(found) > 25 and lost == []


def test_a_key_that_does_not_exist_is_found():
    assert unknown("`max_stalenes=1`, `beta`") == ["max_stalenes=1"] and unknown("`trl-multinode confg 4x8`")
    assert unknown('`engine_kwargs={"max_num_seq": 1}`') == ["max_num_seq"]


def test_the_version_of_each_framework_is_named():
    for name, source in FOREIGN.items():
        version = source["commit"][:7] if name == "open-r1" else f"{name} {source['version']}"
        assert version in PAGE


def test_wrappers_of_reward_functions_return_one_number_per_row():
    import torch

    (code,) = re.findall(r"```python\n(.*?)```", PAGE.split("## Reward functions")[1], re.DOTALL)
    seen = []

    def reward_func(queries, prompts, labels):
        seen.append((queries, prompts, labels))
        return {"rewards": torch.tensor([float(len(query)) for query in queries])}

    names = {"compute_score": lambda *row: float(len(row[1])), "reward_func": reward_func}
    exec(code, names)  # noqa: S102
    said = [[{"role": "assistant", "content": text}] for text in ("ab", "abc")]
    asked = [[{"role": "user", "content": "q"}]] * 2
    assert names["from_verl"](asked, said, data_source=["d", "d"], ground_truth=["g", "g"]) == [2.0, 3.0]
    assert names["from_openrlhf"](asked, said, label=["l", "m"]) == [3.0, 4.0]
    assert seen == [(["qab", "qabc"], ["q", "q"], ["l", "m"])]
