"""`trl-multinode migrate train.py`: the changes that a script for TRL needs, as a diff; it writes nothing."""

import ast
import difflib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from ..former_arguments import REMOVED, RENAMED, hint
from .text import Parser

MODULE = "trl_multinode"
GAP = b"\0"  # in the place of an argument that is removed; no script holds it
RESUME = "resume_from_checkpoint={}.last_checkpoint()"
MODEL_KEY = "torch_dtype"
CONFIGS = ("Config", "Arguments", "parse_args_and_config", "parse_args_into_dataclasses")
# files whose keys are arguments of a script; Python would read `key: value` as an annotation
NO_SCRIPTS = (".yaml", ".yml", ".json", ".toml")


class Edits:
    """Changes of a text, by line and column of its syntax tree; the last one is made first."""

    def __init__(self, text: str):
        self._text = text.encode()  # columns of a syntax tree count bytes
        self._lines = self._text.splitlines(keepends=True)
        self._edits: list[tuple[int, int, bytes]] = []  # first byte, one behind the last, new text

    def _at(self, line: int, column: int) -> int:
        return sum(map(len, self._lines[: line - 1])) + column

    def replace(self, node: ast.expr | ast.keyword | ast.stmt, old: str, new: str) -> None:
        """Replace the first `old` in a node."""
        word = old.encode()
        at = self._text.index(word, self._at(node.lineno, node.col_offset))
        self._edits.append((at, at + len(word), new.encode()))

    def insert_before_end(self, call: ast.Call, new: str) -> None:
        """Insert an argument into a call that has none."""
        assert call.end_lineno is not None and call.end_col_offset is not None
        at = self._at(call.end_lineno, call.end_col_offset) - 1
        self._edits.append((at, at, new.encode()))

    def remove(self, node: ast.keyword | ast.stmt) -> None:
        """Remove a statement, or an argument with its comma; its line too if nothing but a comment is left there."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._at(node.lineno, node.col_offset)
        end = self._at(node.end_lineno, node.end_col_offset)
        comma = re.compile(rb"[ \t]*,?").match(self._text, end)
        assert comma is not None
        self._edits.append((start, comma.end(), GAP))

    def made(self) -> str:
        text = self._text
        for start, end, new in sorted(self._edits, reverse=True):
            text = text[:start] + new + text[end:]
        # a block may not be empty
        text = re.sub(rb"(:(?:\s|#.*\n)*)\0", rb"\1pass", text)
        text = re.sub(rb"^[ \t]*(\0[ \t]*)+(#.*)?\n", b"", text, flags=re.MULTILINE)
        text = re.sub(rb",?[ \t]*\0(?=[ \t]*\))", b"", text)
        return re.sub(rb"[ \t]*\0", b"", text).decode()


def migrated(text: str) -> tuple[str, list[str]]:
    """Return a script after the changes, and a line for each that a diff does not explain by itself.

    Args:
        text (`str`):
            Script for TRL.

    Raises:
        `SyntaxError`: if it is no Python.
    """
    tree, edits = ast.parse(text), Edits(text)
    notes = [*_resumed(tree, edits), *_set_later(tree, edits)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            _change_import(node, edits)
        elif isinstance(node, ast.Import) and any(name.name == "trl" for name in node.names):
            notes.append(
                f"line {node.lineno}: take trainers and configs from `{MODULE}`, not from `trl`"
            )
        elif isinstance(node, ast.Call):
            notes += _changed(node, edits)
        elif isinstance(node, ast.Dict):
            notes += _renamed_keys(node, edits)
    return edits.made(), notes


def fresh_starts(tree: ast.Module) -> list[tuple[ast.Call, str]]:
    """Return each `trainer.train()` without an argument, and thus without a checkpoint, and the trainer's name."""
    trainers, found = _results_of(tree, ("Trainer",)), []
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or call.args or call.keywords:
            continue
        name, dot, method = ast.unparse(call.func).rpartition(".")
        # `model.train()` only sets a mode
        is_trainer = name in trainers or name.lower().endswith("trainer")
        if method == "train" and is_trainer:
            found.append((call, name))
    return found


def _results_of(tree: ast.Module, ends: tuple[str, ...]) -> set[str]:
    """Return the names of the results of calls to functions whose names end so."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        if ast.unparse(node.value.func).endswith(ends):
            names.update(*(ast.unparse(one).strip("()").split(", ") for one in node.targets))
    return names


def _change_import(node: ast.ImportFrom, edits: Edits) -> None:
    """Take trainers and configs from this package, with all that the statement names beside them."""
    module = node.module or ""
    if module.partition(".")[0] == "trl" and any(
        name.name.endswith(("Trainer", "Config")) for name in node.names
    ):
        edits.replace(node, module, MODULE)


def _resumed(tree: ast.Module, edits: Edits) -> Iterator[str]:
    """Let a `train()` that would begin anew continue."""
    for call, name in fresh_starts(tree):
        edits.insert_before_end(call, RESUME.format(name))
        yield f"line {call.lineno}: a relaunch continues from the last whole checkpoint, if there is one"


def _set_later(tree: ast.Module, edits: Edits) -> Iterator[str]:
    """Change the former arguments that a script reads or sets as attributes of its configs."""
    configs = _results_of(tree, CONFIGS)
    for node in ast.walk(tree):
        target = node.targets[0] if isinstance(node, ast.Assign) else node
        if not isinstance(target, ast.Attribute) or ast.unparse(target.value) not in configs:
            continue
        known = target.attr
        if node is target and known in RENAMED.keys() - {"tokenizer"}:
            edits.replace(target, known, RENAMED[known])
        elif isinstance(node, ast.Assign) and known in REMOVED:
            edits.remove(node)
        else:
            continue
        yield f"line {target.lineno}: `{known}`{hint(known)}"


def _renamed_keys(node: ast.Dict, edits: Edits) -> Iterator[str]:
    """Rename the key of a dict for the model, as in `model_init_kwargs={"torch_dtype": ...}`."""
    for key in node.keys:
        if isinstance(key, ast.Constant) and key.value == MODEL_KEY:
            edits.replace(key, MODEL_KEY, RENAMED[MODEL_KEY])
            yield f"line {key.lineno}: `{MODEL_KEY}`{hint(MODEL_KEY)}"


def _changed(call: ast.Call, edits: Edits) -> Iterator[str]:
    """Change the former arguments of a config or a trainer."""
    name = ast.unparse(call.func)
    former = {*RENAMED, *REMOVED}
    if name == "dict":
        former = {MODEL_KEY}
    elif not name.endswith(("Config", "Trainer", "Arguments")):
        return
    elif not name.endswith("Trainer"):
        former.discard("tokenizer")
    for keyword in call.keywords:
        known = keyword.arg or ""
        if not known and name.endswith(("OConfig", "Trainer")):
            unread = f"`**{ast.unparse(keyword.value)}` is not read"
            yield f"line {keyword.lineno}: {unread}; write its entries as arguments, and repeat this command"
        if known not in former:
            continue
        if known in RENAMED:
            edits.replace(keyword, known, RENAMED[known])
        else:
            edits.remove(keyword)
        yield f"line {keyword.lineno}: `{known}`{hint(known)}"


def main(argv: list[str]) -> int:
    """Print the diff to standard output, and the reasons and next commands to standard error.

    Returns:
        `int`: 0, or 2 if the script cannot be read.

    Raises:
        `SystemExit`: with status 2, for a file that is no script.
    """
    parser = Parser("trl-multinode migrate")
    parser.description = (
        "Print the changes that a script for TRL needs, as a diff. `trl-multinode migrate train.py | patch -p0` makes "
        "them."
    )
    parser.add_argument("script", type=Path, help="Python file for TRL")
    path = parser.parse_args(argv).script
    if path.suffix in NO_SCRIPTS:
        parser.error(
            f"{path} is not Python (expected a script): its keys are arguments of the script, which "
            f"`trl-multinode check 4node.yaml train.py --config {path}` checks"
        )
    try:
        text = path.read_text(encoding="utf-8")
        new, notes = migrated(text)
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        print(f"trl-multinode migrate: cannot read {path} ({error})", file=sys.stderr)
        return 2
    before, after = text.splitlines(keepends=True), new.splitlines(keepends=True)
    sys.stdout.writelines(difflib.unified_diff(before, after, str(path), str(path)))
    for note in notes or ["nothing to change"]:
        print(note, file=sys.stderr)
    print(
        f"Then: trl-multinode config 4x8, and trl-multinode check 4node.yaml --machine_rank 0 "
        f"--main_process_ip HOST0 {path}, which also finds batches that 7 of 8 GPUs cannot divide.",
        file=sys.stderr,
    )
    return 0
