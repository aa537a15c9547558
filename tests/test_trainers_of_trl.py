"""Every trainer of the installed TRL that uses vLLM is in docs/use/trainers.md: with a class here, or a reason."""

import ast
import os
import re
from functools import cache
from pathlib import Path

import pytest
import trl

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import trl_multinode

pytestmark = pytest.mark.nightly  # the lock pins TRL
TRL = Path(trl.__file__).parent
PAGE = (Path(__file__).parent.parent / "docs" / "use" / "trainers.md").read_text()
# names, and a package, by which a module generates or scores
USES = {
    "VLLMGeneration",
    "VLLMClient",
    "vllm",
}


@cache
def trees() -> dict[Path, ast.Module]:
    files = [*(TRL / "trainer").glob("*.py"), *(TRL / "experimental").rglob("*.py")]
    return {path: ast.parse(path.read_text()) for path in sorted(files)}


def imports(tree: ast.Module) -> dict[str, str]:
    """Local name -> name in its module; `vllm` for anything that comes from vLLM itself."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            of_vllm = not node.level and node.module.split(".")[0] == "vllm"
            found |= {
                alias.asname or alias.name: "vllm" if of_vllm else alias.name
                for alias in node.names
            }
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0]: alias.name.split(".")[0] for alias in node.names}
    return found


def trainers_that_use(names: set[str]) -> set[str]:
    """Trainers whose folder imports one of the names, and those that inherit from them."""
    found, bases = set(), {}
    parsed = trees()
    in_folder = {
        folder: set().union(
            *(imports(parsed[path]).values() for path in parsed if path.parent == folder)
        )
        for folder in {path.parent for path in parsed}
    }
    for path, tree in parsed.items():
        known = imports(tree)
        # trl/trainer has a file per trainer, trl/experimental a folder
        used = set(known.values()) if path.parent == TRL / "trainer" else in_folder[path.parent]
        for node in tree.body:
            if (
                isinstance(node, ast.ClassDef)
                and node.name.endswith("Trainer")
                and not node.name.startswith("_")
            ):
                bases[node.name] = {
                    known.get(ast.unparse(base), ast.unparse(base)) for base in node.bases
                }
                found |= {node.name} if used & names else set()
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found


def tables() -> list[set[str]]:
    """Trainers in the first column of each table of the page."""
    blocks = re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE)
    return [set(re.findall(r"^\| `(\w+Trainer)`", block, re.MULTILINE)) for block in blocks]


def test_every_trainer_that_generates_through_vllm_generation_has_a_class_and_a_row():
    theirs = trainers_that_use({"VLLMGeneration"})
    assert len(theirs) == 9 and tables()[0] == theirs
    assert theirs == {name for name in trl_multinode._HOMES if name.endswith("Trainer")}


def test_every_other_trainer_that_uses_vllm_has_a_row_with_the_reason():
    assert tables()[1] == trainers_that_use(USES) - tables()[0]
    assert tables()[1] == {f"{name}Trainer" for name in trl_multinode._OWN_VLLM}
