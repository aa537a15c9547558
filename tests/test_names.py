"""`trl_multinode` in the place of `trl` in an import: TRL's public names, with the classes of node mode among them."""

import sys
from dataclasses import make_dataclass
from types import ModuleType

import pytest
import trl

import trl_multinode
from trl_multinode import GRPOTrainer

OURS = {
    f"{name}{kind}" for name in ("GRPO", "RLOO", "Distillation") for kind in ("Config", "Trainer")
}


def imported(statement: str) -> dict[str, object]:
    names: dict[str, object] = {}
    exec(statement, names)  # noqa: S102
    return {name: value for name, value in names.items() if name != "__builtins__"}


def test_a_star_import_is_trls_with_our_classes_in_place():
    theirs, found = imported("from trl import *"), imported("from trl_multinode import *")
    assert found.keys() == theirs.keys() and len(found) > 40
    differing = {name for name in found if found[name] is not theirs[name]}
    assert differing == {*OURS, "trainer"}  # `trainer` is a module of both packages
    assert {found[name].__name__ for name in OURS} == {f"MultiNode{name}" for name in OURS}
    assert found["trainer"] is sys.modules["trl_multinode.trainer"]


def test_the_names_beside_the_trainer_in_trls_own_scripts_come_along():
    from trl_multinode import GRPOConfig, ModelConfig, ScriptArguments, TrlParser, get_peft_config

    assert TrlParser is trl.TrlParser and get_peft_config is trl.get_peft_config
    _, args, _ = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config(
        [
            "--dataset_name",
            "x",
            "--output_dir",
            "out",
            "--use_cpu",
            "--bf16",
            "false",
            "--max_staleness",
            "1",
        ]
    )
    assert args.max_staleness == 1 and args.vllm_mode == "node"


def test_dir_lists_what_can_be_imported():
    listed = dir(trl_multinode)
    assert {*trl.__all__, *OURS, "MultiNodeGRPOTrainer", "SDFTTrainer"} <= set(listed)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("GRPOTrainr", "GRPOTrainer"),
        ("TrlParsr", "TrlParser"),
        ("OnlineDPOTrainr", ""),
        ("grpo", ""),
    ],
)
def test_a_name_that_neither_package_has_names_both_and_the_nearest_one(name, nearest):
    with pytest.raises(AttributeError, match=f"trl_multinode nor trl .*'{name}'"):
        getattr(trl_multinode, name)
    with pytest.raises(ImportError, match=f"trl_multinode nor trl .*'{name}'.*{nearest}"):
        imported(f"from trl_multinode import {name}")
    assert not hasattr(trl_multinode, name)


@pytest.mark.nightly
def test_private_names_are_not_trls():
    assert hasattr(trl, "_import_structure") or hasattr(trl, "_compat")
    for name in ("_import_structure", "_compat", "__wrapped__"):
        assert not hasattr(trl_multinode, name)


@pytest.mark.nightly
def test_a_trainer_that_could_use_vllm_and_has_no_node_mode_says_so_once(monkeypatch, capsys):
    later = ModuleType("trl")  # a later TRL, in which this trainer is stable
    later.__all__ = ["AsyncGRPOTrainer", "AsyncGRPOConfig", "SFTTrainer", "SFTConfig"]
    later.AsyncGRPOConfig = make_dataclass("AsyncGRPOConfig", [("vllm_server_base_url", str, "")])
    later.SFTConfig, later.SFTTrainer, later.AsyncGRPOTrainer = (
        trl.SFTConfig,
        trl.SFTTrainer,
        GRPOTrainer,
    )
    monkeypatch.setitem(sys.modules, "trl", later)
    for _ in range(2):
        from trl_multinode import AsyncGRPOTrainer, SFTTrainer  # noqa: F401
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and "AsyncGRPOTrainer" in lines[0]
