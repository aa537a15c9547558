"""A name that another library lacks gives an error with its version and a cure; a replaced one comes back."""

import ast
import importlib.abc
import importlib.metadata
import inspect
import os
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from refusals import refused
from trl.trainer import grpo_trainer

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import trl_multinode
from trl_multinode import libraries
from trl_multinode.engine.settings import VLLM_RANGE
from trl_multinode.libraries import replaced

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = libraries.installed("trl")
WORKS = "trl>=1.16,<2"


class Owner:
    name = "the class's"

    def method(self):
        return "the class's"


# ---- replaced names


def test_a_global_of_a_module_is_replaced_and_comes_back():
    real = grpo_trainer.VLLMGeneration
    with replaced(grpo_trainer, "VLLMGeneration", "outer"):
        with replaced(grpo_trainer, "VLLMGeneration", "inner"):
            assert grpo_trainer.VLLMGeneration == "inner"
        assert grpo_trainer.VLLMGeneration == "outer"
    assert grpo_trainer.VLLMGeneration is real


def test_a_name_of_an_object_is_that_of_its_class_or_its_own_again_afterwards():
    owner = Owner()
    with replaced(owner, "method", lambda: "ours"):
        assert owner.method() == "ours" and Owner().method() == "the class's"
    assert vars(owner) == {} and owner.method() == "the class's"
    owner.name = "the object's"
    with replaced(owner, "name", "ours"):
        assert owner.name == "ours"
    assert owner.name == "the object's"


def test_an_error_inside_brings_the_name_back():
    with (
        pytest.raises(ZeroDivisionError, match="mine"),
        replaced(grpo_trainer, "gather_object", None),
    ):
        raise ZeroDivisionError("mine")
    assert grpo_trainer.gather_object is not None


def test_a_name_that_has_moved_is_an_error_with_version_cure_and_page(monkeypatch):
    monkeypatch.setattr(libraries, "installed", lambda library: "2.0.0")
    with (
        pytest.raises(AttributeError, match="NoSuchName") as error,
        replaced(grpo_trainer, "NoSuchName", None),
    ):
        pass
    versions = ["trl 2.0.0", trl_multinode.__version__, f"`pip install '{WORKS}'`"]
    parts = ["trl.trainer.grpo_trainer", *versions, "docs/inside/upgrading.md"]
    assert all(part in str(error.value) for part in parts)
    assert not hasattr(grpo_trainer, "NoSuchName")


def test_an_attribute_of_our_subclass_is_looked_for_in_the_library_that_it_extends():
    trainer = object.__new__(trl_multinode.GRPOTrainer)
    message = rf"trl {VERSION} has no `_metrics` in trl\.trainer\.grpo_trainer"
    with pytest.raises(AttributeError, match=message), replaced(trainer, "_metrics", {}):
        pass


# ---- functions of an untested TRL

TRAINER = trl_multinode.GRPOTrainer
READS_LOGPROBS = "logprobs = [[lp[0] for lp in seq] for seq in logprobs]"


def changed(monkeypatch, before: str, after: str) -> None:
    """Let a TRL that was not tested have other source in the place of `before`."""
    source = inspect.getsource(grpo_trainer)
    sources = {grpo_trainer: source.replace(before, after)}
    assert sources[grpo_trainer] != source
    real = inspect.getsource
    monkeypatch.setattr(
        libraries.inspect, "getsource", lambda module: sources.get(module) or real(module)
    )
    monkeypatch.setattr(libraries, "installed", lambda library: "1.99.0")


def functions_in(warning: str) -> list[str]:
    return warning.rpartition(": ")[2].split(", ")


def test_a_tested_trl_is_not_read_and_an_untested_one_without_changes_is_named(monkeypatch):
    assert libraries.check_trl(TRAINER) == ""
    monkeypatch.setattr(libraries, "installed", lambda library: "1.99.0")
    warning = libraries.check_trl(TRAINER)
    assert "1.99.0" in warning and functions_in(warning) == ["nothing"]


@pytest.mark.parametrize(
    ("before", "after", "functions"),
    [
        (READS_LOGPROBS, "logprobs = [seq[0] for seq in logprobs]", ["GRPOTrainer._generate_single_turn"]),
        (READS_LOGPROBS, f"# another comment\n            {READS_LOGPROBS}", ["nothing"]),
        ("def _tokenize_prompts(self, prompts: list):", "def _tokenize_prompts(self, prompts):", ["nothing"]),
        ("self.vllm_generation.llm", "self.vllm_generation.another",
         ["GRPOTrainer._tool_call_loop", "self.vllm_generation"]),
    ],
    ids=["code", "comment", "annotation", "attribute"],
)  # fmt: skip
def test_the_functions_whose_code_has_changed_are_listed(before, after, functions, monkeypatch):
    changed(monkeypatch, before, after)
    assert functions_in(libraries.check_trl(TRAINER)) == functions


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ("_tool_call_loop", "_loop_of_tools", "`GRPOTrainer._tool_call_loop`"),
        ("_buffered_inputs", "_buffer", "`_buffered_inputs`"),
        ("def _tokenize_prompts(self, ", "def _tokenize_prompts(self, images, ",
         "GRPOTrainer._tokenize_prompts(self, images, "),
        ("_, completion_ids, logprobs, _ = self.vllm_g", "_, completion_ids, logprobs, _, _ = self.vllm_g", " -> 5"),
        ("images=images,\n                num_g", "pictures=images,\n                num_g", "pictures"),
        ("min_p=self.min_p,", "min_p=self.min_p, top_n_sigma=1,", "top_n_sigma"),
    ],
    ids=["function", "attribute", "parameter", "values", "keyword", "setting"],
)  # fmt: skip
def test_what_has_moved_is_refused_by_name(before, after, name, monkeypatch):
    changed(monkeypatch, before, after)
    with refused("trl", "`pip install 'trl==1.16.0'`", got="1.99.0", expected="1.16.0") as caught:
        libraries.check_trl(TRAINER)
    assert name in str(caught.value)
    # which of its functions a trainer has is decided by its base classes
    assert functions_in(libraries.check_trl(trl_multinode.RLOOTrainer)) == ["nothing"]


# ---- imports


class Absent(importlib.abc.MetaPathFinder):
    """Stands for a TRL without some modules."""

    def __init__(self, *names: str):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def forget(monkeypatch, *modules: str) -> None:
    """Let the next import of these modules and what is below them run again; pytest brings the old ones back."""
    for name in [name for name in sys.modules if name.startswith(modules)]:
        monkeypatch.delitem(sys.modules, name)


def without_gold(monkeypatch) -> None:
    forget(monkeypatch, "trl.experimental.gold", "trl_multinode.experimental.gold")
    monkeypatch.setattr(sys, "meta_path", [Absent("trl.experimental.gold"), *sys.meta_path])


def test_an_experimental_trainer_that_trl_lacks_is_a_plain_error(monkeypatch):
    without_gold(monkeypatch)
    with pytest.raises(ImportError, match=r"trl_multinode\.GOLDTrainer") as error:
        trl_multinode.GOLDTrainer  # noqa: B018
    parts = [
        f"trl {VERSION}",
        "trl.experimental.gold",
        libraries.upgrade_command(),
        "docs/inside/upgrading.md",
    ]
    assert all(part in str(error.value) for part in parts)


@pytest.mark.nightly
def test_the_other_trainers_are_imported_all_the_same(monkeypatch):
    forget(monkeypatch, "trl_multinode.experimental", "trl_multinode.trainers")
    without_gold(monkeypatch)
    for name in ("IWOPD", "SDFT", "SDPO", "RLOO", "Distillation", "GRPO"):
        assert getattr(trl_multinode, f"{name}Trainer").__name__ == f"MultiNode{name}Trainer"


@pytest.mark.nightly
def test_a_class_that_trl_lacks_is_named_with_the_versions_that_work(monkeypatch):
    forget(monkeypatch, "trl_multinode.trainers")
    monkeypatch.setitem(sys.modules, "trl", ModuleType("trl"))
    monkeypatch.setattr(libraries, "installed", lambda library: "2.0.0")
    with pytest.raises(ImportError, match="`DistillationConfig`") as error:
        from trl_multinode import RLOOTrainer  # noqa: F401
    parts = ["trl_multinode.RLOOTrainer", "trl 2.0.0", f"`pip install '{WORKS}'`"]
    assert all(part in str(error.value) for part in parts)


@pytest.mark.nightly
def test_the_cause_of_an_error_that_trl_wraps_is_named(monkeypatch):
    """TRL imports lazily; if a new transformers breaks it, it raises a `RuntimeError`."""

    def lazily(name: str):
        try:
            from transformers.trainer import NoSuchName  # noqa: F401
        except ImportError as error:
            raise RuntimeError(
                f"Failed to import trl.trainer because of the following error:\n{error}"
            ) from error

    broken = ModuleType("trl")
    broken.__getattr__ = lazily
    forget(monkeypatch, "trl_multinode.trainers")
    monkeypatch.setitem(sys.modules, "trl", broken)
    with pytest.raises(
        ImportError, match=r"transformers [\d.]+ .*`NoSuchName`.* transformers\.trainer"
    ):
        trl_multinode.RLOOTrainer  # noqa: B018


@pytest.mark.nightly
@pytest.mark.parametrize(
    "error", [ImportError("no name", name="PIL"), RuntimeError("out of memory"), ImportError()]
)
def test_any_other_error_stays_as_it_is(error):
    assert libraries.explanation(error, "GRPOTrainer") is None


@pytest.mark.nightly
def test_a_library_that_is_not_installed_is_named_as_such(monkeypatch):
    monkeypatch.setattr(libraries, "installed", lambda library: None)
    reason = libraries.explanation(
        ModuleNotFoundError("No module named 'trl'", name="trl"), "GRPOTrainer"
    )
    assert "trl is not installed" in reason and f"`pip install '{WORKS}'`" in reason


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("direct_url", "command"),
    [
        (None, "`pip install --upgrade trl-multinode`"),
        (
            '{"url": "https://x.org/trl_multinode.whl", "archive_info": {}}',
            "`pip install --upgrade trl-multinode`",
        ),
        (
            '{"url": "file:///my/clone", "dir_info": {"editable": true}}',
            "`git pull && pip install .` in /my/clone",
        ),
    ],
)
def test_the_upgrade_command_is_that_of_the_installation(monkeypatch, direct_url, command):
    installed = type("Installed", (), {"read_text": lambda self, name: direct_url})
    monkeypatch.setattr(libraries.metadata, "distribution", lambda name: installed())
    assert libraries.upgrade_command() == command


# ---- what `pip install` brings


def imported_libraries() -> set[str]:
    """The libraries that the package imports by the name of their module."""
    found = set()
    for path in (ROOT / "trl_multinode").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(str(node.module).split(".")[0])
    return found - set(sys.stdlib_module_names) - {"trl_multinode"}


def test_every_imported_library_is_declared():
    extras = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *extras["gpu"], *extras["ray"]]
    declared = {Requirement(line).name.lower() for line in lines}
    # vLLM requires pillow, and only an engine's process imports it; a tracker is there if `report_to` names it
    declared |= {"pillow", "trackio", "wandb"}
    homes = importlib.metadata.packages_distributions()
    names = {
        module: {name.lower() for name in homes.get(module, [module])}
        for module in imported_libraries()
    }
    missing = {module for module, found in names.items() if not (found | {module}) & declared}
    assert len(names) > 10 and missing == set()


def test_the_range_of_vllm_that_a_run_checks_is_that_of_the_package():
    (line,) = (
        line
        for line in map(Requirement, PROJECT["optional-dependencies"]["gpu"])
        if line.name == "vllm"
    )
    bounds = {part.operator: Version(part.version).release[:2] for part in line.specifier}
    assert (bounds[">="], bounds["<"]) == VLLM_RANGE
