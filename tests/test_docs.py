"""The index links every page, links and code paths resolve, docs/errors.md has every error class and message."""

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from test_architecture import ARROWS
from test_language import LARGEST_SHARE, is_fragment

ROOT = Path(__file__).parents[1]
DOCS, PACKAGE = ROOT / "docs", ROOT / "trl_multinode"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *sorted(DOCS.rglob("*.md")),
]
SOURCES = ("trl_multinode", "tests", "benchmarks", "docs", "examples", "requirements")
ERRORS_PAGE = DOCS / "errors.md"
FEWEST_WORDS = 3  # a literal with fewer words is put together from others, which the page quotes
README_LINES = 80
URL = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Homepage"]
# The README is also the page on PyPI, where a relative link leads nowhere
ABSOLUTE = (
    f"{URL}/blob/main/",
    f"{URL}/tree/main/",
    f"{URL}/".replace("//github.", "//raw.githubusercontent.") + "main/",
)

names = [str(path.relative_to(ROOT)) for path in PAGES]


# ---- the map


def links(page: str) -> list[str]:
    """The links of a page; those to a file of this repository relative to its root, if they are absolute."""
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page, flags=re.DOTALL))
    return [re.sub("|".join(map(re.escape, ABSOLUTE)), "/", link) for link in found]


def anchors(page: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(path: Path, text: str) -> list[str]:
    """The links of `text`, a page at `path`, to files of this repository, that lead nowhere."""
    found = []
    for link in links(text):
        if "://" in link or link.startswith("mailto:"):
            continue
        file, _, anchor = link.partition("#")
        target = ROOT / file[1:] if file.startswith("/") else path.parent / file if file else path
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            found.append(link)
    return found


def test_every_page_is_linked_from_the_index():
    linked = {link.partition("#")[0] for link in links((DOCS / "index.md").read_text())}
    assert {path.name for path in DOCS.glob("*.md")} - {"index.md"} <= linked
    assert "/docs/index.md" in links((ROOT / "README.md").read_text())


@pytest.mark.parametrize("path", PAGES, ids=names)
def test_every_relative_link_resolves(path):
    assert not broken(path, path.read_text())


def test_every_link_of_the_readme_is_absolute():
    page = (ROOT / "README.md").read_text()
    assert re.findall(r"\]\((?!https://)[^)]*\)", page) == [] and len(links(page)) > 15
    bad = f"[a]({ABSOLUTE[0]}docs/none.md) [b]({ABSOLUTE[0]}docs/index.md#none) [c]({ABSOLUTE[0]}docs/index.md#learn)"
    assert broken(ROOT / "README.md", bad) == ["/docs/none.md", "/docs/index.md#none"]


def test_a_broken_link_or_anchor_is_found():
    text = "[a](none.md) [b](index.md#none) [c](index.md#learn) [d](#here) [e](https://example.org)\n## Here\n"
    assert broken(DOCS / "x.md", text.replace("(#here)", "(index.md#prove)")) == ["none.md", "index.md#none"]


def test_the_readme_is_one_screen():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


# ---- plain English


def paragraphs(page: str) -> list[str]:
    """Headings, paragraphs and list items, without their marks; no tables and no code."""
    text = re.sub(r"^\|.*$", "", re.sub(r"```.*?```", "", page, flags=re.DOTALL), flags=re.MULTILINE)
    return [re.sub(r"^(#+ |- |\d+\. |\*\*)+", "", part) for part in re.split(r"\n\s*\n|\n(?=- |\d+\. )", text.strip())]


def test_few_paragraphs_begin_with_a_fragment():
    found = [
        (is_fragment(text), f"{path.name}: {text[:80]}") for path in PAGES for text in paragraphs(path.read_text())
    ]
    fragments = [where for fragment, where in found if fragment]
    assert len(found) > 400
    assert len(fragments) <= LARGEST_SHARE * len(found), "\n".join(fragments)


def test_a_fragment_is_found_in_headings_lists_and_after_bold_marks():
    page = "# What it is\n\nA page.\n\n- **Of one** kind\n- one\n\n| What |\n"
    assert [is_fragment(text) for text in paragraphs(page)] == [True, False, True, False]


# ---- paths into the code


@cache
def sources() -> dict[str, str]:
    """Path -> text of every Python file."""
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    return {f"/{path.relative_to(ROOT)}": path.read_text() for path in files}


def exists(file: str, name: str) -> bool:
    """Whether there is such a file, by the end of its path, with all parts of the dotted `name` in it."""
    words = [re.compile(rf"\b{part}\b") for part in name.split(".") if part]
    return any(
        all(word.search(text) for word in words) for path, text in sources().items() if path.endswith(f"/{file}")
    )


def lost(page: str) -> list[str]:
    """The mentions of `file.py`, `file.py: Name` or `file.py::name` of which the file or the name does not exist."""
    spans = re.findall(r"`([^`\n]+)`", page)
    mentions = [found for span in spans for found in re.findall(r"([\w/.-]*\w\.py)\b(?:(?:::|: )([\w.]+))?", span)]
    return [f"{file}: {name}" if name else file for file, name in mentions if not exists(file, name)]


@pytest.mark.parametrize("path", PAGES, ids=names)
def test_every_code_path_exists(path):
    assert not lost(path.read_text())


def test_a_lost_path_or_name_is_found():
    text = "`config.py: NodeFields` `config.py: Nothing` `engine/nothing.py` `tests/test_docs.py` `python a/none.py`"
    assert lost(text) == ["config.py: Nothing", "engine/nothing.py", "a/none.py"]


# ---- rooms and settings


def rooms(page: str) -> dict[str, set[str]]:
    """Room -> rooms that it imports, from the rows of four cells of which the first is `folder/` or `file.py`."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")]
    return {re.sub(r"`|/|\.py", "", row[0]): set(row[3].split()) for row in rows if len(row) == 4}


def test_the_table_of_rooms_is_that_of_the_architecture_test():
    arrows = {room: set(row.split()) - {"errors"} for room, row in ARROWS.items()}
    assert rooms((DOCS / "architecture.md").read_text()) == arrows


def test_every_room_has_its_tests_in_contributing():
    rows = re.findall(r"^\| (`.*?`) \| `tests/", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    named = [re.sub(r"/|\.py", "", name) for row in rows for name in re.findall(r"`([\w/.]+)`", row)]
    assert sorted(named) == sorted(ARROWS.keys() - {"__init__", "errors"})


def test_every_setting_has_a_row():
    tree = ast.parse((PACKAGE / "config.py").read_text())
    (fields,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "NodeFields"]
    names = {node.target.id for node in fields.body if isinstance(node, ast.AnnAssign)} - {"_not_for"}
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "settings.md").read_text(), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == names


# ---- errors


@cache
def error_classes() -> tuple[str, ...]:
    tree = ast.parse((PACKAGE / "errors.py").read_text())
    return tuple(node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")


def literal(node: ast.AST) -> str | None:
    """The text of a string or f-string, with "…" in the place of values."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


@cache
def nodes() -> tuple[ast.AST, ...]:
    """The syntax of the package without docstrings and without the test kit."""
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py") if "testing" not in path.parts]
    documents = {id(node.value) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return tuple(node for tree in trees for node in ast.walk(tree) if id(node) not in documents)


def names_error(node: ast.AST) -> str | None:
    """The error class that `node` is, as a name or as a string."""
    name = node.id if isinstance(node, ast.Name) else literal(node)
    return name if name in error_classes() else None


def raised(tree: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """Class and literal of every error: `SomeError("...")`, or a call with both, as `Refused("SomeError", "...")`."""
    for call in tree:
        if isinstance(call, ast.Call):
            for first, second in pairwise([call.func, *call.args]):
                name, text = names_error(first), literal(second)
                if name and text and len(re.findall(r"[A-Za-z_]{2,}", text)) >= FEWEST_WORDS:
                    yield name, text


def sections(page: str) -> dict[str, str]:
    """Class -> text of its section, from the headings that are one name in back-ticks."""
    parts = re.split(r"^#+ (.*)$", page, flags=re.MULTILINE)
    return {title.strip("`"): text for title, text in zip(parts[1::2], parts[2::2], strict=True) if title[0] == "`"}


def quoted(text: str) -> list[str]:
    """The messages of the tables in `text`: the first cell of each row."""
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    return [row for row in rows if row not in ("message", "line")]


def quotes(pattern: str, text: str) -> bool:
    """Whether the pieces of `pattern`, which "…" separates, occur in `text` in this order."""
    start = 0
    for piece in filter(None, map(str.strip, pattern.split("…"))):
        if (found := text.find(piece, start)) < 0:
            return False
        start = found + len(piece)
    return True


def test_every_error_class_has_a_section_and_every_section_a_class():
    assert sorted(sections(ERRORS_PAGE.read_text())) == sorted(error_classes())


def test_every_quoted_message_is_in_the_source():
    texts = [text for node in nodes() if (text := literal(node))]
    patterns = [re.sub(r" \(`\w+`\)$", "", message) for message in quoted(ERRORS_PAGE.read_text())]
    assert len(patterns) > 70
    unknown = [pattern for pattern in patterns if not any(quotes(pattern, text) for text in texts)]
    assert not unknown, f"docs/errors.md quotes what no string of the package says: {unknown}"


def test_every_message_of_an_error_is_quoted_in_the_section_of_its_class():
    page = {name: quoted(text) for name, text in sections(ERRORS_PAGE.read_text()).items()}
    found = list(raised(nodes()))
    assert len(found) > 50
    missing = [(name, text) for name, text in found if not any(quotes(pattern, text) for pattern in page[name])]
    assert not missing, f"write a row in docs/errors.md for each: {missing}"


def test_a_message_without_a_row_is_found():
    (found,) = raised(ast.walk(ast.parse('raise EngineError(f"node {n} has no such thing. Buy one.")')))
    assert found == ("EngineError", "node … has no such thing. Buy one.")
    assert quotes("node … has no such", found[1]) and not quotes("node … has a such", found[1])
