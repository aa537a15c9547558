"""docs/inside/upgrading.md lists every internal name of other libraries that is used, and the installed ones have it.

A scan of our sources finds these names, and the page lists them. A failure after an upgrade gives the name that moved;
its row on the page says what to do. The scan cannot find a private name on an object other than `self` if a class of
ours has the same name.
"""

import ast
import importlib.util
import inspect
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest
from transformers import Trainer

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import trl_multinode
from trl_multinode.libraries import (
    CALLED,
    GENERATION,
    TESTED_TRL,
    check_trl,
    fingerprints,
    installed,
)

# The lock pins the libraries; `make versions` runs this file on others
pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "trl_multinode"
LIBRARIES = ("trl", "transformers", "vllm", "deepspeed", "peft", "accelerate", "torch")
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}
TRAINERS = {
    name: getattr(trl_multinode, f"MultiNode{name}Trainer")
    for name in (
        "GRPO",
        "RLOO",
        "Distillation",
        "SDFT",
        "SDPO",
        "GOLD",
        "IWOPD",
        "GMPO",
        "ServerDistillation",
    )
}
CONFIGS = [trainer._config for trainer in TRAINERS.values()]
CLASSES = {kind for each in (*TRAINERS.values(), *CONFIGS) for kind in each.__mro__}
LOOKUPS = {"getattr", "setattr", "hasattr"}


def is_ours(kind: type) -> bool:
    return kind.__module__.startswith("trl_multinode")


# ---- the page


@dataclass(frozen=True)
class Row:
    """One line of a table in docs/inside/upgrading.md."""

    library: str
    # of the library; every one has the names, or one of several with " or " between them
    modules: tuple[str, ...]
    # each one name, or several with " or " between them, of which one must exist
    names: tuple[str, ...]
    files: frozenset[str]  # of this package

    def own_words(self) -> set[str]:
        dotted = [name for names in self.names for name in names.split(" or ")]
        return {part for name in dotted for part in name.split(".")}

    def words(self) -> set[str]:
        return self.own_words() | {part for module in self.modules for part in module.split(".")}


def quoted(cell: str) -> tuple[str, ...]:
    """The parts in backticks; ` or ` joins two of them."""
    return tuple(re.findall(r"`([^`]+)`", cell.replace("` or `", " or ")))


def rows() -> list[Row]:
    library, found = "", []
    for line in (ROOT / "docs" / "inside" / "upgrading.md").read_text().splitlines():
        if line.startswith("## "):
            library = line.removeprefix("## ").lower()
        elif line.startswith("| `"):
            names, modules, files, *_ = line.strip("| ").split(" | ")
            places = tuple(
                TRAINERS[m]._trl.__module__ if m in TRAINERS else m for m in quoted(modules)
            )
            found.append(Row(library, places, quoted(names), frozenset(quoted(files))))
    return found


ROWS = rows()


# ---- the scan of our sources


def stored_on_self(tree: ast.AST) -> set[str]:
    return {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
            and ast.unparse(n.value) == "self"}  # fmt: skip


@cache
def source_of(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))


@cache
def members(kind: type) -> set[str]:
    """What a class of another library has: attributes, and what its methods set on `self`."""
    (node,) = (
        n for n in source_of(kind.__module__).body if getattr(n, "name", "") == kind.__name__
    )
    return set(vars(kind)) | stored_on_self(node)


THEIRS = set().union(
    *(members(kind) for kind in CLASSES if kind.__module__.split(".")[0] in LIBRARIES)
)


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[A-Za-z]\w*", name) is not None


def subclass_of_theirs(file: str, node: ast.stmt) -> type | None:
    """Our trainer or config that the statement defines, if it is one."""
    module = f"trl_multinode.{file.removesuffix('.py').replace('/', '.')}"
    return next(
        (c for c in CLASSES if (c.__module__, c.__name__) == (module, getattr(node, "name", ""))),
        None,
    )


def own_names() -> set[str]:
    """What this package defines. A method of a trainer that TRL has too is TRL's."""
    own = set()
    for file, tree in TREES.items():
        for statement in tree.body:
            defined = stored_on_self(statement)
            for node in ast.walk(statement):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    defined.add(node.name)
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    defined.add(node.id)
            own |= defined - THEIRS if subclass_of_theirs(file, statement) else defined
    return own


OWN = own_names()


def is_module(name: str) -> bool:
    """Whether a library has such a file; importing to find out would take vLLM 10 s."""
    library, *rest = name.split(".")
    path = folder_of(library).joinpath(*rest)
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


@cache
def folder_of(library: str) -> Path:
    spec = importlib.util.find_spec(library)
    if spec is None:
        pytest.skip(f"{library} is not installed")
    return Path(spec.origin).parent


def internal_imports(tree: ast.Module) -> Iterator[str]:
    """Names imported from a submodule of a library, and private ones. The submodules of torch are public."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and node.module.split(".")[0] in LIBRARIES
        ):
            deep = "." in node.module and not node.module.startswith("torch.")
            for name in (alias.name for alias in node.names):
                if (deep or is_private(name) or "._" in node.module) and not is_module(
                    f"{node.module}.{name}"
                ):
                    yield name


def in_a_trainer(node: ast.AST, kind: type) -> Iterator[str]:
    """What a trainer or config of ours takes from TRL or transformers: overrides and uses of private names, and names
    that it sets."""
    public = issubclass(kind, Trainer)  # a config's public fields are settings
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls", "super()"):
        name, stores = node.attr, isinstance(node.ctx, ast.Store) and public
    elif isinstance(node, ast.FunctionDef):
        name, stores = node.name, False
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        name, stores = node.id, False
    else:
        return
    if name in THEIRS and (is_private(name) or stores):
        yield name


def anywhere(node: ast.AST, others: set[str], imported: set[str]) -> Iterator[str]:
    """Private names that this package does not define, names set on a library's class, and replaced names."""
    if isinstance(node, ast.Attribute) and (base := ast.unparse(node.value)) not in others:
        foreign = (is_private(node.attr) and node.attr not in OWN) or node.attr.startswith("ds_")
        if foreign or (isinstance(node.ctx, ast.Store) and base in imported):
            yield node.attr
    elif (
        isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant)
    ):
        called, name = ast.unparse(node.func), node.args[1].value
        foreign = (
            isinstance(name, str)
            and name not in OWN
            and (is_private(name) or name.startswith("ds_"))
        )
        if called == "replaced" or (called in LOOKUPS and foreign):
            yield name
    elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
        value = node.value.value  # `_sync_mark = "_last_loaded_step"`
        yield from [value] if isinstance(value, str) and is_private(value) else []


def uses(file: str, tree: ast.Module) -> set[str]:
    """Internal names of libraries that a file of ours uses."""
    plain = {(a.asname or a.name).split(".")[0]: a.name.split(".")[0] for n in ast.walk(tree)
             if isinstance(n, ast.Import) for a in n.names}  # fmt: skip
    others = {name for name, library in plain.items() if library not in LIBRARIES}
    imported = {a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and not n.level and
                n.module.split(".")[0] in LIBRARIES for a in n.names}  # fmt: skip
    found = set(internal_imports(tree))
    for statement in tree.body:
        kind = subclass_of_theirs(file, statement)
        for node in ast.walk(statement):
            found |= set(anywhere(node, others, imported)) | (
                set(in_a_trainer(node, kind)) if kind else set()
            )
    return found


@cache
def used() -> dict[str, set[str]]:
    """Internal name of a library -> our files that use it."""
    found: dict[str, set[str]] = defaultdict(set)
    for file, tree in TREES.items():
        for name in uses(file, tree):
            found[name].add(file)
    return found


# ---- the list is true


def test_each_internal_name_that_is_used_is_listed_with_the_files_that_use_it():
    missing = {}
    for name, files in used().items():
        listed = set().union(*(row.files for row in ROWS if name in row.words()))
        if files - listed:
            missing[name] = sorted(files - listed)
    assert len(used()) > 100 and not missing, (
        "docs/inside/upgrading.md has no row, or no file in it, for these"
    )


# ---- the installed library has it


def definitions(body: list[ast.stmt], classes: bool = False) -> Iterator[tuple[str, ast.stmt]]:
    """Names that a module or class defines or imports, also below `if` and `try`; with `classes` their members too."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
            yield from (
                definitions(node.body, classes)
                if classes and isinstance(node, ast.ClassDef)
                else ()
            )
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name, node) for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (
                (t.id, node)
                for target in targets
                for t in ast.walk(target)
                if isinstance(t, ast.Name)
            )
        elif isinstance(node, ast.If | ast.Try):
            yield from definitions([*node.body, *node.orelse], classes)


@cache
def tree_of(module: str) -> ast.Module:
    library, *rest = module.split(".")
    path = folder_of(library).joinpath(*rest)
    if not rest and not (path / "__init__.py").is_file():
        path /= library  # a library of one file
    return ast.parse(
        (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    )


def defines(module: str, dotted: str) -> bool:
    """Whether the source of a module defines `Class.name`, or `name` anywhere, or sets it as an attribute."""
    body = tree_of(module).body
    for part in dotted.split(".")[:-1]:
        owner = dict(definitions(body)).get(part)
        if not isinstance(owner, ast.ClassDef):
            return False
        body = owner.body
    name = dotted.split(".")[-1]
    stored = {n.attr for statement in body for n in ast.walk(statement) if isinstance(n, ast.Attribute) and
              isinstance(n.ctx, ast.Store)}  # fmt: skip
    return name in dict(definitions(body, classes="." not in dotted)) or name in stored


def has(module: str, dotted: str) -> bool:
    if defines(module, dotted) or not module.startswith("torch"):
        return defines(module, dotted)
    owner = import_module(module)  # much of torch is C++, without a source here
    for name in dotted.split("."):
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True


def places(module: str) -> list[str]:
    """Return the module, or those of several with " or " between them that the library has."""
    several = module.split(" or ")
    return [name for name in several if len(several) == 1 or is_module(name)]


def test_the_installed_libraries_have_the_names():
    lost = []
    for row in ROWS:
        for module in row.modules:
            for names in row.names:
                if not any(has(*pair) for pair in product(places(module), names.split(" or "))):
                    files = ", ".join(sorted(row.files))
                    lost.append(
                        f"{row.library} {installed(row.library)}: {module} has no {names}, used by {files}"
                    )
    assert not lost, "the rows of docs/inside/upgrading.md say what to do"


def calls_of_super(kind: type) -> set[str]:
    (node,) = (
        n for n in source_of(kind.__module__).body if getattr(n, "name", "") == kind.__name__
    )
    found = (n for n in ast.walk(node) if isinstance(n, ast.Attribute))
    return {n.attr for n in found if ast.unparse(n.value) == "super()"} - {
        "__init__",
        "__init_subclass__",
    }


def relied_on() -> dict[str, dict[str, list[str]]]:
    """The fingerprints of TRL's names on which this package relies: those of the page, what our classes call on
    `super()`, and how TRL builds and calls the generation object."""
    names = {"__init__"}.union(*map(calls_of_super, filter(is_ours, CLASSES)))
    owners = defaultdict(set)
    for kind in {kind for trainer in TRAINERS.values() for kind in trainer.__mro__}:
        if kind.__module__.startswith("trl."):
            owners[kind.__module__].add(kind.__name__)
    owners[GENERATION] = {"VLLMGeneration"}
    found = {}
    for module in sorted(owners):
        listed = {name for row in ROWS if module in row.modules for name in row.own_words()}
        listed |= {"generate", "sync_weights"} if module == GENERATION else set()
        functions, kept = set(), {}
        for name, value in fingerprints(inspect.getsource(import_module(module))).items():
            owner, _, last = name.rpartition(".")
            if name in CALLED or name in listed or (owner == "self" and value[1]):
                kept[name] = value
            elif value[1] and last in names | listed and owner in owners[module] | {""}:
                functions.add(last)
                kept[name] = value
        # a function has a line with its class
        found[module] = {
            name: kept[name] for name in sorted(kept) if name not in functions or kept[name][1]
        }
    return found


def write_tested(versions: list[str]) -> None:
    """Write the file of the tested TRL from the installed one, whose tests have passed."""
    record = {"tested": versions, "modules": relied_on()}
    TESTED_TRL.write_text(json.dumps(record, indent=1) + "\n")


def test_the_tested_trl_is_recorded_and_no_other_has_moved_a_name():
    record = json.loads(TESTED_TRL.read_text())
    if installed("trl") == record["tested"][-1]:
        assert record["modules"] == relied_on(), "python requirements/versions.py --record"
    assert len(record["modules"]) > 10
    for trainer in TRAINERS.values():
        check_trl(trainer)


BY_USERS = {"push_to_hub", "train", "evaluate", "log", "training_step"}


def lost_in_super(trainer: str) -> list[str]:
    """Return names that a class of ours calls on `super()`, and that no base has or no method of the bases calls."""
    order = TRAINERS[trainer].__mro__
    theirs = [kind for kind in order if not is_ours(kind) and kind is not object]
    nodes = (node for kind in theirs for node in ast.walk(source_of(kind.__module__)))
    called = {node.attr for node in nodes if isinstance(node, ast.Attribute)} | BY_USERS
    lost = []
    for kind in filter(is_ours, order):
        bases = order[order.index(kind) + 1 :]
        for name in calls_of_super(kind):
            owners = [base for base in bases if name in vars(base)]
            if not owners:
                lost.append(f"{trainer}: no base of {kind.__name__} has {name}")
            elif name not in called and not all(map(is_ours, owners)):
                lost.append(f"{trainer}: {name} is never called by TRL or transformers")
    return lost


def narrow_overrides(trainer: str) -> list[str]:
    """Return overrides that lack a parameter of the overridden method."""
    order = TRAINERS[trainer].__mro__
    narrow = []
    for kind in filter(is_ours, order):
        for name, method in vars(kind).items():
            bases = order[order.index(kind) + 1 :]
            theirs = next((vars(base)[name] for base in bases if name in vars(base)), None)
            if not (inspect.isfunction(method) and inspect.isfunction(theirs)) or name.startswith(
                "__"
            ):
                continue
            taken = inspect.signature(method).parameters.values()
            if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken):
                continue
            lacking = set(inspect.signature(theirs).parameters) - {
                parameter.name for parameter in taken
            }
            narrow += (
                [f"{kind.__name__}.{name} lacks {lacking} of {theirs.__qualname__}"]
                if lacking
                else []
            )
    return narrow


def test_what_is_called_on_super_exists_and_an_override_takes_what_the_overridden_method_takes():
    assert not [
        fault
        for trainer in TRAINERS
        for fault in lost_in_super(trainer) + narrow_overrides(trainer)
    ]
