"""The table of docs/compatibility.md holds what tests proved, and a run that proves something else fails."""

import json
from types import SimpleNamespace

import pytest
from compatibility import DOCS, Compatibility, table

ROW = ("Losses", "`dapo`")
PROVED = {"test": "test_a.py::test_dapo", "engine": "fake", "result": "works", "message": ""}


def ended(file, write: bool = False, failed: bool = False) -> int:
    """Exit status of a run in which one marked test ran."""
    plugin, session = Compatibility(write, file), SimpleNamespace(exitstatus=0)
    plugin._found[ROW].append(dict(PROVED))
    if failed:
        plugin._failed.add(f"tests/{PROVED['test']}")
    plugin.pytest_sessionfinish(session)
    return session.exitstatus


def test_what_was_proved_is_written_and_the_same_run_then_passes(tmp_path):
    file = tmp_path / "compatibility.json"
    assert ended(file) == pytest.ExitCode.TESTS_FAILED  # nobody has written it yet
    assert ended(file, write=True) == 0 and ended(file) == 0
    assert "| `dapo` | works | fake engine | `test_a.py::test_dapo` |" in file.with_suffix(".md").read_text()


def test_a_row_that_fails_now_or_ran_on_another_engine_fails_the_run(tmp_path):
    file = tmp_path / "compatibility.json"
    ended(file, write=True)
    assert ended(file, failed=True) == pytest.ExitCode.TESTS_FAILED
    file.write_text(file.read_text().replace("fake", "vllm"))
    assert ended(file) == pytest.ExitCode.TESTS_FAILED


def test_a_row_works_only_if_all_its_tests_do(tmp_path):
    file = tmp_path / "compatibility.json"
    ended(file, write=True, failed=True)
    assert "1 fail" in file.with_suffix(".md").read_text()
    two = [{"group": ROW[0], "row": ROW[1], "tests": [PROVED, PROVED | {"result": "fails"}]}]
    assert "| fails |" in table(two) and json.loads(file.read_text())


def test_the_page_was_written_from_the_record():
    rows = json.loads((DOCS / "compatibility.json").read_text())
    assert table(rows) == (DOCS / "compatibility.md").read_text(), "`make compatibility` writes the page"


def test_every_test_that_the_page_names_is_there():
    """A renamed one would leave its old row behind: `make compatibility` begins anew, other runs add."""
    rows = json.loads((DOCS / "compatibility.json").read_text())
    named = {test["test"].split("::")[0] for row in rows for test in row["tests"]}
    assert named and all((DOCS.parent / "tests" / name).exists() for name in named), named
