"""Build a training script's own parser without running the script.

Only the statements that the parser needs are executed: from the call `parser.parse_args_and_config()` backwards, the
assignments, classes, functions and imports by name. If a model or a dataset were among them, nothing is executed.
"""

import ast
import importlib.util
import os
import symtable
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import InspectLoader
from pathlib import Path
from types import CodeType
from typing import Any

# Methods of `TrlParser` and of transformers' `HfArgumentParser`
PARSES = ("parse_args_and_config", "parse_args_into_dataclasses")
PARSER = "trl_multinode_parser"  # name of the parser in the module that is executed
MODULE = "trl_multinode_script"
CONFIG = "OConfig"  # end of the names of training configs: GRPO, RLOO
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
LOADS = ("from_pretrained", "from_config", "load_dataset", "load_from_disk", "pipeline")


@dataclass(frozen=True)
class ParserCall:
    """Call of a script that parses its arguments."""

    method: str
    keywords: dict[str, Any]
    receiver: ast.expr
    before: list[ast.stmt]  # statements that run before it in the same function


def find_call(tree: ast.Module) -> ParserCall | None:
    """Return the first call of a script that parses its arguments, or `None`."""
    return next(_calls(tree.body, []), None)


def _calls(body: list[ast.stmt], before: list[ast.stmt]) -> Iterator[ParserCall]:
    for index, statement in enumerate(body):
        so_far = [*before, *body[:index]]
        if isinstance(statement, ast.FunctionDef):
            yield from _calls(statement.body, [])
        elif blocks := _blocks(statement):
            for block in blocks:
                yield from _calls(block, so_far)
        elif not isinstance(statement, ast.ClassDef):
            for node in _calls_in(statement):
                if isinstance(node.func, ast.Attribute) and node.func.attr in PARSES:
                    keywords = {
                        each.arg: each.value.value
                        for each in node.keywords
                        if each.arg and isinstance(each.value, ast.Constant)
                    }
                    yield ParserCall(node.func.attr, keywords, node.func.value, so_far)


def _calls_in(statement: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(statement) if isinstance(node, ast.Call)]


def trainer_of_trl(tree: ast.Module) -> str | None:
    """Return a trainer that a script imports from TRL, or `None`, also if it imports one of this library."""
    found = {
        module.split(".")[0]: name for module, name in _imported(tree) if name.endswith("Trainer")
    }
    return None if "trl_multinode" in found else found.get("trl")


def literal_values(tree: ast.Module, names: set[str]) -> dict[str, Any] | None:
    """Return the constants among `names` that the only config call of a script has; `None` if it computes one."""
    calls = [one for one in _calls_in(tree) if ast.unparse(one.func).endswith(CONFIG)]
    if len(calls) != 1:
        return None
    found: dict[str, Any] = {}
    for keyword in calls[0].keywords:
        if keyword.arg in names and isinstance(keyword.value, ast.Constant):
            found[keyword.arg] = keyword.value.value
        elif keyword.arg is None or keyword.arg in names:
            return None
    return found


def _blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    """Return the blocks of a statement that is no definition."""
    if isinstance(statement, DEFINITIONS):
        return []
    blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
    return [
        *filter(None, blocks),
        *(handler.body for handler in getattr(statement, "handlers", [])),
    ]


def needed_statements(tree: ast.Module, call: ParserCall) -> ast.Module:
    """Return a module with the statements that the parser of `call` needs, in their order."""
    candidates = [one for one in tree.body if not _is_main_block(one)]
    candidates += [one for one in call.before if one not in candidates]
    names = _used(ast.Expr(call.receiver))
    needed: list[ast.stmt] = []
    while more := [one for one in candidates if one not in needed and _belongs(one, names)]:
        needed += more
        names.update(*(_used(one) for one in more if not isinstance(one, ast.ImportFrom)))
    body = [_only(one, names) for one in candidates if one in needed]
    body.append(ast.Assign([ast.Name(PARSER, ast.Store())], call.receiver))
    return ast.fix_missing_locations(ast.Module(body, []))


def _only(statement: ast.stmt, names: set[str]) -> ast.stmt:
    """Return an import without the names that are not needed: a trainer takes seconds to import."""
    if not isinstance(statement, ast.ImportFrom) or statement.module == "__future__":
        return statement
    aliases = [alias for alias in statement.names if (alias.asname or alias.name) in {*names, "*"}]
    return ast.ImportFrom(statement.module, aliases, statement.level)


def _is_main_block(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__name__" in _used(ast.Expr(statement.test))


def _used(statement: ast.stmt) -> set[str]:
    """Return the module's names that a statement uses, also inside functions and classes."""
    return _globals(symtable.symtable(ast.unparse(statement), "script", "exec"))


def _globals(table: symtable.SymbolTable) -> set[str]:
    outermost = table.get_type() == "module"
    names = {
        s.get_name()
        for s in table.get_symbols()
        if s.is_referenced() and (outermost or s.is_global())
    }
    return names.union(*map(_globals, table.get_children()))


def _belongs(statement: ast.stmt, names: set[str]) -> bool:
    """Return whether a statement binds one of `names`, or calls a method of one, as `parser.add_argument(...)`."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        root: ast.AST = statement.value.func
        while isinstance(root, ast.Attribute):
            root = root.value
        return isinstance(root, ast.Name) and root.id in names and root is not statement.value.func
    if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
        return True
    return not {*names, "*"}.isdisjoint(_bound(statement))


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement binds in its own scope."""
    if isinstance(statement, DEFINITIONS):
        yield statement.name
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        for alias in statement.names:
            yield (alias.asname or alias.name).split(".")[0]
    elif blocks := _blocks(statement):
        for inner in (inner for block in blocks for inner in block):
            yield from _bound(inner)
    else:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


class _Statements(InspectLoader):
    """Loader of a module from its syntax tree."""

    def __init__(self, tree: ast.Module, path: str):
        self._tree, self._path = tree, path

    def get_source(self, fullname: str) -> str:
        return ast.unparse(self._tree)

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._tree, self._path, "exec")


@contextmanager
def as_launched(name: str, arguments: list[str], is_module: bool) -> Iterator[None]:
    """Set `sys.argv`, `sys.path` and `os.environ` as for a script, and restore them."""
    argv, folders, environment = sys.argv, sys.path, dict(os.environ)
    folder = Path() if is_module else Path(name).parent
    sys.argv, sys.path = [name, *arguments], [str(folder.resolve()), *folders]
    try:
        yield
    finally:
        sys.argv, sys.path = argv, folders
        os.environ.clear()
        os.environ.update(environment)
        sys.modules.pop(MODULE, None)


def build_parser(tree: ast.Module, call: ParserCall, path: str) -> Any:
    """Execute the statements that the parser of a script needs, and return the parser.

    Raises:
        `ValueError`: if one of them would load a model or a dataset.
    """
    statements = needed_statements(tree, call)
    if load := _load_in(statements):
        raise ValueError(f"it needs the result of `{load}`")
    loader = _Statements(statements, path)
    spec = importlib.util.spec_from_loader(MODULE, loader, origin=path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = path
    sys.modules[MODULE] = module  # dataclasses look up the annotations of their module
    loader.exec_module(module)
    return vars(module)[PARSER]


def _load_in(tree: ast.Module) -> str | None:
    """Return the name of a call, outside functions and classes, that loads a model or a dataset."""
    for statement in tree.body:
        for call in [] if isinstance(statement, DEFINITIONS) else _calls_in(statement):
            name = ast.unparse(call.func).rpartition(".")[2]
            if name in LOADS:
                return name
    return None


def read_script(name: str, is_module: bool) -> tuple[ast.Module, str]:
    """Return the syntax tree and the path of a script.

    A script that only calls another module's `main()` is read from that module.

    Raises:
        `OSError`, `SyntaxError`, `ImportError`, `ValueError`: if it cannot be read.
    """
    path = _path_of(name) if is_module else name
    tree = ast.parse(Path(path).read_text(encoding="utf-8"), path)
    if find_call(tree) is None and (module := _module_of_main(tree)):
        return read_script(module, is_module=True)
    return tree, path


def _path_of(module: str) -> str:
    spec = importlib.util.find_spec(module)
    # `python -m folder` runs its `__main__`
    if spec is not None and spec.submodule_search_locations:
        spec = importlib.util.find_spec(f"{module}.__main__")
    if spec is None or spec.origin is None:
        raise ImportError(f"no module {module}")
    return spec.origin


def _module_of_main(tree: ast.Module) -> str | None:
    """Return the module from which a script imports its `main`, as in `from x import main; main()`."""
    return next((module for module, name in _imported(tree) if name == "main"), None)


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield module and name of each `from module import name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, alias.name) for alias in node.names)
