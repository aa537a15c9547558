"""Names of other libraries: replace one while a context is open, and explain an import that fails without one.

docs/inside/upgrading.md lists every internal name of another library that this package uses, and what to do when it
moves.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

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
    is_own, before = (
        name in own,
        own.get(name),
    )
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
