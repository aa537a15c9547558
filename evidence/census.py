"""Count what the package weighs: `make census`, or `python evidence/census.py [ROOT]` for another checkout.

Size is counted in tokens of Python without comments, docstrings and line ends, because neither packing nor unpacking
of lines changes that number.
"""

import argparse
import ast
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# Rooms that no rank, engine or worker of a run imports
TOOLS = {"tools"}
COMPLEX = 10  # a function above this is counted
MANY_ATTRIBUTES = 12  # a class above this is counted
WEIGHTLESS = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (
    ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert, ast.match_case,
)  # fmt: skip
COLLECT = """
from collections import Counter
import pytest

class Parts:
    def pytest_collection_finish(self, session):
        parts = Counter()
        for item in session.items:
            marks = {mark.name for mark in item.iter_markers()}
            if "nightly" in marks:
                parts["nightly"] += 1
            elif "two_node" in marks:
                parts["launches"] += 1
            elif marks & {"engine", "zero3", "real"}:
                parts["real"] += 1
            else:
                parts["fast"] += 1
        print("parts: " + ", ".join(f"{count} {part}" for part, count in sorted(parts.items())))

pytest.main(["--collect-only", "-qq"], plugins=[Parts()])
"""


@dataclass
class Room:
    """Counts of a folder of the package, or of the files beside the folders."""

    files: int = 0
    lines: int = 0
    code_lines: int = 0
    tokens: int = 0
    comments: int = 0  # lines that are a comment
    imports: set[str] = field(default_factory=set)  # other rooms

    def add(self, other: "Room") -> None:
        self.files += other.files
        self.lines += other.lines
        self.code_lines += other.code_lines
        self.tokens += other.tokens
        self.comments += other.comments


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the lines of all strings that are statements: docstrings, and texts below attributes."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            found |= set(range(node.lineno, node.end_lineno + 1))
    return found


def count_file(path: Path) -> Room:
    source = path.read_text()
    texts = docstring_lines(ast.parse(source))
    found = Room(files=1, lines=source.count("\n"))
    code: set[int] = set()
    with open(path, "rb") as file:
        for token in tokenize.tokenize(file.readline):
            line = token.start[0]
            if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
                found.comments += 1
            if token.type in WEIGHTLESS or line in texts:
                continue
            found.tokens += 1
            code.update(range(line, token.end[0] + 1))
    found.code_lines = len(code)
    return found


def imported_rooms(path: Path, package: Path) -> Iterator[str]:
    """Yield the room of each module of the package that `path` imports, also inside functions."""
    own = path.relative_to(package).parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = own[: len(own) - node.level]
            names = (
                (node.module or "").split(".")
                if node.module
                else [alias.name for alias in node.names]
            )
            whole = [*base, *names]
            yield whole[0]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            package.name + "."
        ):
            yield node.module.split(".")[1]


def count_rooms(package: Path) -> dict[str, Room]:
    rooms: dict[str, Room] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts
        name = parts[0] if len(parts) > 1 else "(beside)"
        room = rooms.setdefault(name, Room())
        room.add(count_file(path))
        room.imports |= set(imported_rooms(path, package))
    folders = set(rooms)
    for name, room in rooms.items():
        room.imports = (room.imports & folders) - {name}
    return rooms


def complexities(package: Path) -> list[tuple[int, str]]:
    """Return the complexity and place of every function, without the functions that are defined in it."""
    found = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, FUNCTIONS):
                found.append(
                    (1 + decisions(node), f"{path.relative_to(package.parent)}: {node.name}")
                )
    return sorted(found, reverse=True)


def decisions(function: ast.AST) -> int:
    """Return the number of branches: statements, conditional expressions, `and`, `or`, loops and filters of
    comprehensions. ruff's C901 leaves the expressions out, and so rewards packing them into one line."""
    found, left = 0, list(ast.iter_child_nodes(function))
    while left:
        node = left.pop()
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            continue
        if isinstance(node, BRANCHES):
            found += 1
        elif isinstance(node, ast.comprehension):
            found += 1 + len(node.ifs)
        elif isinstance(node, ast.BoolOp):
            found += len(node.values) - 1
        left += ast.iter_child_nodes(node)
    return found


def attributes(package: Path) -> list[tuple[int, str]]:
    """Return the number of attributes of every class: annotated fields, and names that a method sets on `self`."""
    found = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.append(
                    (len(attributes_of(node)), f"{path.relative_to(package.parent)}: {node.name}")
                )
    return sorted(found, reverse=True)


def attributes_of(node: ast.ClassDef) -> set[str]:
    fields = {
        part.target.id
        for part in node.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    own = {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }
    return fields | own


def words(path: Path) -> int:
    """Return the words of a page, without the bars of its tables."""
    return sum(any(character.isalnum() for character in word) for word in path.read_text().split())


def rank_modules(root: Path) -> int:
    """Return how many modules of the package a GRPO rank imports before it builds a trainer."""
    code = (
        "import sys; from trl_multinode import GRPOConfig, GRPOTrainer; "
        "print(len([name for name in sys.modules if name.split('.')[0] == 'trl_multinode']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True
    )
    return int(done.stdout.split()[-1])


def settings_of_our_own(root: Path) -> int:
    """Return the number of fields of our config that TRL's has not."""
    code = (
        "import dataclasses, trl, trl_multinode; "
        "names = lambda config: {field.name for field in dataclasses.fields(config)}; "
        "print(len(names(trl_multinode.GRPOConfig) - names(trl.GRPOConfig)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True
    )
    return int(done.stdout.split()[-1])


def tests_by_part(root: Path) -> str:
    """Return how many tests each part of the Makefile has."""
    done = subprocess.run(
        [sys.executable, "-c", COLLECT], capture_output=True, text=True, cwd=root, check=True
    )
    return done.stdout.split("parts: ")[1].splitlines()[0]


def table(rooms: dict[str, Room]) -> str:
    lines = ["room            files  lines   code  tokens  per line  comment %  imports"]
    for name, room in sorted(rooms.items(), key=lambda item: -item[1].tokens):
        lines.append(row(name, room, " ".join(sorted(room.imports))))
    return "\n".join(lines)


def row(name: str, room: Room, imports: str = "") -> str:
    per_line = room.tokens / max(1, room.code_lines)
    share = 100 * room.comments / max(1, room.lines)
    return (
        f"{name:15} {room.files:5} {room.lines:6} {room.code_lines:6} {room.tokens:7} {per_line:9.1f} {share:10.1f}  "
        f"{imports}"
    )


def total(rooms: dict[str, Room], names: set[str]) -> Room:
    found = Room()
    for name in names & set(rooms):
        found.add(rooms[name])
    return found


def show_most(title: str, found: list[tuple[int, str]], limit: int) -> None:
    above = [item for item in found if item[0] > limit]
    print(f"\n{title} above {limit}: {len(above)} of {len(found)}")
    for number, place in above[:10]:
        print(f"  {number:4} {place}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--tools", nargs="*", default=sorted(TOOLS), help="rooms that are commands")
    parser.add_argument("--static", action="store_true", help="import nothing and collect no tests")
    options = parser.parse_args()
    package, tools = options.root / "trl_multinode", set(options.tools)
    rooms = count_rooms(package)
    print(table(rooms) + "\n")
    core = set(rooms) - tools
    print(row("core", total(rooms, core)))
    print(row("tools", total(rooms, tools)))
    print(
        row("test kit", total(count_rooms(options.root / "tests" / "multinode_kit"), {"(beside)"}))
    )
    pairs = Counter(
        (name, other) for name in core | tools for other in rooms[name].imports if name in rooms
    )
    print(
        f"\nrooms: {len(core - {'(beside)'})} and {len(tools)} of commands; arrows between rooms: {len(pairs)}"
    )
    show_most("complexity of functions", complexities(package), COMPLEX)
    show_most("attributes of classes", attributes(package), MANY_ATTRIBUTES)
    pages = sorted(options.root.glob("docs/**/*.md"))
    written = [page for page in pages if page.parent.name not in ("evidence", "api")]
    print(f"\npages below docs: {len(pages)} with {sum(map(words, pages))} words")
    print(f"without evidence and API: {len(written)} with {sum(map(words, written))} words")
    print(f"words of the README: {words(options.root / 'README.md')}")
    tests = list((options.root / "tests").rglob("*.py"))
    print(
        f"lines of tests: {sum(path.read_text().count(chr(10)) for path in tests)} in {len(tests)} files"
    )
    if not options.static:
        print(f"settings of our own: {settings_of_our_own(options.root)}")
        print(f"modules of the package that a GRPO rank imports: {rank_modules(options.root)}")
        print(f"tests: {tests_by_part(options.root)}")


if __name__ == "__main__":
    main()
