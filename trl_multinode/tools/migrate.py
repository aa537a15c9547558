"""`trl-multinode migrate train.py`: the changes that a script for TRL needs, as a diff; it writes nothing."""

import argparse
import ast
import difflib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from ..former_arguments import REMOVED, RENAMED, hint

MODULE = "trl_multinode"
GAP = b"\0"  # in the place of an argument that is removed; no script holds it
RESUME = "resume_from_checkpoint={}.last_checkpoint()"


class Edits:
    """Changes of a text, by line and column of its syntax tree; the last one is made first."""

    def __init__(self, text: str):
        # columns of a syntax tree count bytes
        self._lines = [line.encode() for line in text.splitlines(keepends=True)]
        self._edits: list[tuple[int, int, bytes]] = []  # first byte, one behind the last, new text

    def _at(self, line: int, column: int) -> int:
        return sum(map(len, self._lines[: line - 1])) + column

    def replace(self, node: ast.expr | ast.keyword | ast.stmt, old: str, new: str) -> None:
        """Replace the first `old` in a node."""
        start, text = self._at(node.lineno, node.col_offset), b"".join(self._lines)
        at = text.index(old.encode(), start)
        self._edits.append((at, at + len(old.encode()), new.encode()))

    def insert_before_end(self, call: ast.Call, new: str) -> None:
        """Insert an argument into a call that has none."""
        assert call.end_lineno is not None and call.end_col_offset is not None
        at = self._at(call.end_lineno, call.end_col_offset) - 1
        self._edits.append((at, at, new.encode()))

    def remove(self, node: ast.keyword) -> None:
        """Remove an argument with its comma, and with its line if nothing but a comment is left there."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, end = (
            self._at(node.lineno, node.col_offset),
            self._at(node.end_lineno, node.end_col_offset),
        )
        comma = re.compile(rb"[ \t]*,?").match(b"".join(self._lines), end)
        assert comma is not None
        self._edits.append((start, comma.end(), GAP))

    def made(self) -> str:
        text = b"".join(self._lines)
        for start, end, new in sorted(self._edits, reverse=True):
            text = text[:start] + new + text[end:]
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
    edits, notes = Edits(text), []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            _change_import(node, edits)
        elif isinstance(node, ast.Import) and any(name.name == "trl" for name in node.names):
            notes.append(
                f"line {node.lineno}: take trainers and configs from `{MODULE}`, not from `trl`"
            )
        elif isinstance(node, ast.Call):
            notes += [*_resumed(node, edits), *_changed(node, edits)]
    return edits.made(), notes


def _change_import(node: ast.ImportFrom, edits: Edits) -> None:
    """Take trainers and configs from this package, with all that the statement names beside them."""
    module = node.module or ""
    if module.partition(".")[0] == "trl" and any(
        name.name.endswith(("Trainer", "Config")) for name in node.names
    ):
        edits.replace(node, module, MODULE)


def _resumed(call: ast.Call, edits: Edits) -> Iterator[str]:
    """Let a `train()` that would begin anew continue."""
    name = ast.unparse(call.func)
    if name.endswith("trainer.train") and not (call.args or call.keywords):
        edits.insert_before_end(call, RESUME.format(name.removesuffix(".train")))
        yield f"line {call.lineno}: a relaunch continues from the last whole checkpoint, if there is one"


def _changed(call: ast.Call, edits: Edits) -> Iterator[str]:
    """Change the former arguments of a config or a trainer."""
    name = ast.unparse(call.func)
    if not name.endswith(("Config", "Trainer", "Arguments")):
        return
    for keyword in call.keywords:
        known = keyword.arg or ""
        # a trainer's `tokenizer` only
        if known in RENAMED and (known != "tokenizer" or name.endswith("Trainer")):
            edits.replace(keyword, known, RENAMED[known])
        elif known in REMOVED:
            edits.remove(keyword)
        else:
            continue
        yield f"line {keyword.lineno}: `{known}`{hint(known)}"


def main(argv: list[str]) -> int:
    """Print the diff to standard output, and the reasons and next commands to standard error.

    Returns:
        `int`: 0, or 2 if the script cannot be read.
    """
    parser = argparse.ArgumentParser("trl-multinode migrate", allow_abbrev=False)
    parser.description = (
        "Print the changes that a script for TRL needs, as a diff. `trl-multinode migrate train.py | patch -p0` makes "
        "them."
    )
    parser.add_argument("script", type=Path, help="Python file for TRL")
    path = parser.parse_args(argv).script
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
