"""Every claim of docs/determinism.md names tests that exist, and says how equal things are."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "determinism.md"
MENTION = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
EQUAL = re.compile(r"^(bitwise|1e-\d)")


def rows(page: str) -> list[list[str]]:
    lines = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| the same | if")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def lost(page: str) -> list[str]:
    """The mentioned tests that do not exist."""
    return [f"{file}::{name}" for file, name in MENTION.findall(page) if name not in functions_of(ROOT / file)]


def functions_of(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_row_has_a_degree_and_a_test_that_exists():
    found = rows(PAGE.read_text())
    assert len(found) > 14 and all(len(row) == 4 for row in found)
    assert [row for row in found if not EQUAL.match(row[2]) or not MENTION.search(row[3])] == []
    assert lost(PAGE.read_text()) == []


def test_a_bitwise_claim_has_no_approximate_test():
    """`pytest.approx` and limits in a test show that the claim is one of a limit."""
    for _, _, degree, mentions in rows(PAGE.read_text()):
        for file, name in MENTION.findall(mentions):
            source = (ROOT / file).read_text()
            (code,) = [node for node in ast.parse(source).body if getattr(node, "name", "") == name]
            approximate = "approx(" in ast.get_source_segment(source, code)
            assert not (approximate and degree == "bitwise"), f"{name} compares with a tolerance"


def test_a_lost_test_is_found():
    assert lost("`tests/test_docs.py::test_nothing` `tests/none.py::test_a`") == [
        "tests/test_docs.py::test_nothing",
        "tests/none.py::test_a",
    ]
    assert lost("`tests/test_docs.py::test_the_readme_is_one_screen`") == []
