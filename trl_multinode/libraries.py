"""Names of other libraries: replace one while a context is open, explain an import that fails without one, and compare
the functions of an untested TRL with those of the tested one.

docs/inside/upgrading.md lists every internal name of another library that this package uses, and what to do when it
moves.
"""

import ast
import hashlib
import inspect
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from .errors import ConfigurationError

LIBRARIES = (
    "trl",
    "transformers",
    "accelerate",
    "deepspeed",
    "peft",
    "torch",
    "datasets",
    "huggingface_hub",
)
PAGE = "docs/inside/upgrading.md lists where this package uses the library's internals."
# Tested versions of TRL, and of the newest of them the functions on which this package relies
TESTED_TRL = Path(__file__).with_name("tested_trl.json")
# TRL's module with the class that `NodeGeneration` replaces, which no trainer inherits
GENERATION = "trl.generation.vllm_generation"
# how TRL's trainers call that class and its object
CALLED = ("VLLMGeneration", "self.vllm_generation.generate", "self.vllm_generation.sync_weights")


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """
    Replace an attribute while the context is open. Contexts may be nested; every thread sees the replacement.

    Args:
        owner (`Any`):
            Module, class or object of another library.
        name (`str`):
            Name of the attribute. Write it as a literal, so that tests/test_upgrading.py finds it.
        value (`Any`):
            Replacement.

    Raises:
        `AttributeError`: if `owner` has no such attribute; the message names the installed version and the cure.
    """
    if not hasattr(owner, name):
        where = home(owner)
        library = where.split(".")[0]
        raise AttributeError(
            f"{library} {installed(library)} has no `{name}` in {where}, which trl_multinode replaces. "
            f"{cure(library)} {PAGE}"
        )
    own = vars(owner)
    # a method is an attribute of the class, not of the object
    is_own = name in own
    before = own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def home(owner: Any) -> str:
    """Return the module of another library that defines `owner`, or a base class of it."""
    if isinstance(owner, ModuleType):
        return owner.__name__
    kinds = (owner if isinstance(owner, type) else type(owner)).__mro__
    return next(
        kind.__module__ for kind in kinds if not kind.__module__.startswith("trl_multinode")
    )


def explanation(error: Exception, wanted: str) -> str | None:
    """
    Explain why `wanted`, a name of this package, cannot be imported.

    Args:
        error (`Exception`):
            Error of the import. TRL and transformers import lazily and wrap the actual `ImportError`.
        wanted (`str`):
            Name that the caller imports.

    Returns:
        `str`, *optional*: a message with the missing name, the installed version and the cure; `None` if the missing
            name does not belong to one of `LIBRARIES`.
    """
    actual = _actual(error)
    if actual is None or (module := actual.name or "").split(".")[0] not in LIBRARIES:
        return None
    library = module.split(".")[0]
    # Python 3.11 has no `ImportError.name_from`
    name = re.match(r"cannot import name '(\w+)'", str(actual))
    missing = f"no `{name[1]}` in {module}" if name else f"no module {module}"
    version = installed(library)
    reason = f"{library} {version} has {missing}" if version else f"{library} is not installed"
    return f"trl_multinode.{wanted} cannot be imported: {reason}. {cure(library)} {PAGE}"


def _actual(error: BaseException) -> ImportError | None:
    """Return the innermost `ImportError` that names a module, among an error and its causes."""
    found = None
    cause: BaseException | None = error
    while cause is not None:
        found = cause if isinstance(cause, ImportError) and cause.name else found
        cause = cause.__cause__
    return found


# ---- functions of an untested TRL -----------------------------------------------------------------------------------


def check_trl(trainer: type) -> str:
    """
    Compare the functions on which this package relies with those of the tested TRL, by their sources.

    Args:
        trainer (`type`):
            Trainer of this package. Only TRL's modules with its base classes, and `GENERATION`, are compared.

    Returns:
        `str`: a warning with the functions whose source differs; empty if the installed version was tested.

    Raises:
        `ConfigurationError`: if a name is missing, a function has other parameters, or TRL calls the generation object
            in another way; the same on every rank.
    """
    record = json.loads(TESTED_TRL.read_text())
    version, newest = installed("trl"), record["tested"][-1]
    if version in record["tested"]:
        return ""
    moved, changed = [], []
    used = {kind.__module__ for kind in trainer.__mro__} | {GENERATION}
    for module in sorted(used & record["modules"].keys()):
        if module not in sys.modules:
            moved.append(f"no module {module}")
            continue
        found = fingerprints(inspect.getsource(sys.modules[module]))
        for name, (signature, digest) in record["modules"][module].items():
            if name not in found:
                moved.append(f"no `{name}` in {module}")
            elif found[name][0] != signature:
                moved.append(f"`{name}{found[name][0]}` in {module}, not `{name}{signature}`")
            elif found[name][1] != digest:
                changed.append(name)
    if moved:
        raise ConfigurationError(
            f"trl {version} has {'; '.join(moved)}, on which trl_multinode relies.",
            setting="trl",
            got=version,
            expected=newest,
            cure=f"`pip install 'trl=={newest}'`, or upgrade trl-multinode ({upgrade_command()}). {PAGE}",
        )
    return (
        f"trl {version} was not tested with trl_multinode, trl {newest} was; changed since then, of what node mode "
        f"relies on: {', '.join(changed) or 'nothing'}"
    )


def fingerprints(source: str) -> dict[str, list[str]]:
    """
    Return all names in a module of TRL, each with two texts.

    Args:
        source (`str`):
            Source of the module.

    Returns:
        `dict[str, list[str]]`: for a function its parameters, if they matter, and a digest of its code without
            annotations of parameters and docstring; for the generation object the keywords of a call and the number of
            values that TRL unpacks, and the attributes in the place of a digest; else two empty texts.
    """
    tree = ast.parse(source)
    names = {
        name
        for node in ast.walk(tree)
        for field in ("id", "attr", "name")
        if (name := getattr(node, field, None))
    }
    found = {name: ["", ""] for name in names} | _uses_of_generation(tree)
    for owner in ast.walk(tree):
        if isinstance(owner, ast.Module | ast.ClassDef):
            prefix = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
            for node in owner.body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    found[prefix + node.name] = _fingerprint(node)
    return found


def _uses_of_generation(tree: ast.AST) -> dict[str, list[str]]:
    """Return how TRL builds and calls the generation object, and which of its attributes it reads."""
    shapes, attributes = defaultdict(set), set()
    unpacked: dict[ast.AST, str] = {}
    for node in ast.walk(tree):
        # before the call itself, because `walk` yields parents first
        if isinstance(node, ast.Assign):
            unpacked[node.value] = f" -> {len(getattr(node.targets[0], 'elts', 'x'))}"
        elif isinstance(node, ast.Call) and (called := ast.unparse(node.func)) in CALLED:
            keywords = sorted(str(keyword.arg) for keyword in node.keywords)
            words = ", ".join(["positional"] * len(node.args) + keywords)
            shapes[called].add(f"({words}){unpacked.get(node, '')}")
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self.vllm_generation":
            attributes.add(node.attr)
    found = {name: [" ".join(sorted(each)), ""] for name, each in shapes.items()}
    return found | {"self.vllm_generation": ["", " ".join(sorted(attributes))]}


def _fingerprint(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    for node in ast.walk(function.args):
        if isinstance(node, ast.arg):
            node.annotation = None
    if ast.get_docstring(function) is not None:
        del function.body[0]
    digest = hashlib.sha256(repr(_plain(function)).encode()).hexdigest()[:8]
    # a trainer of ours binds a call to whatever parameters TRL's `__init__` has
    bound = function.name == "__init__"
    return ["" if bound else f"({ast.unparse(function.args)})", digest]


def _plain(node: Any) -> Any:
    """Return code as nested lists without empty fields, whose number depends on the version of Python."""
    if isinstance(node, list):
        return [_plain(each) for each in node]
    if not isinstance(node, ast.AST):
        return node
    fields = ast.iter_fields(node)
    return [
        type(node).__name__,
        *((k, _plain(value)) for k, value in fields if value not in (None, [])),
    ]


# ---- installed and allowed versions ---------------------------------------------------------------------------------


def cure(library: str) -> str:
    """Return a sentence with the versions that this package works with, and the command that installs one."""
    from packaging.requirements import Requirement

    try:
        ours = metadata.distribution("trl-multinode")
    except metadata.PackageNotFoundError:  # run from its sources, without an installation
        return f"Install a version of {library} that pyproject.toml allows."
    lines = map(Requirement, ours.requires or ())
    wanted = next((line for line in lines if line.name == library), None)
    if wanted is None:
        return f"Install another version of {library}."
    version = installed(library)
    if version is not None and wanted.specifier.contains(version, prereleases=True):
        return f"Upgrade trl-multinode ({upgrade_command()}), or install an older {library}."
    limits = ",".join(sorted(map(str, wanted.specifier), reverse=True))
    return f"trl_multinode {ours.version} works with {library}{limits}: `pip install '{library}{limits}'`."


def upgrade_command() -> str:
    """Return the command that upgrades this package: from the package index, or in the clone that was installed."""
    try:
        source = json.loads(
            metadata.distribution("trl-multinode").read_text("direct_url.json") or "{}"
        )
    except metadata.PackageNotFoundError:  # run from its sources, without an installation
        return "`git pull` in your clone"
    if "dir_info" not in source:
        return "`pip install --upgrade trl-multinode`"
    return f"`git pull && pip install .` in {url2pathname(urlsplit(source['url']).path)}"


def installed(library: str) -> str | None:
    """Return the installed version of a library by the name of its module; `None` if it is not installed."""
    for distribution in (library, f"{library}-cpu"):  # as vLLM's is called without a GPU
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return None
