"""Marks the tests of `tests/faults` with the rows in their names; `--faults` (`make faults`) records their seconds.

A test measures with the fixture `fault_seconds`: `fault_seconds(7.2)` gives the seconds from the fault to the end.
"""

import json
import time

import pytest
from fault_table import DOCS, RECORD, page, recorded, rows_of_test


class FaultRecord:
    """Adds the mark `fault` to the tests in `tests/faults`, and collects the results of all tests of a row."""

    def __init__(self, write: bool):
        self._write = write
        self._tests: dict[str, dict] = {}

    def pytest_itemcollected(self, item) -> None:
        named = rows_of_test(item.path, getattr(item, "originalname", None) or item.name)
        if named or item.path.parent.name == "faults":
            item.add_marker(pytest.mark.fault(*named))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        marked = list(dict.fromkeys(row for mark in item.iter_markers("fault") for row in mark.args))
        if marked and (report.when == "call" or report.outcome == "failed"):
            self._add(item, report, marked)
        return report

    def _add(self, item, report, marked: list[str]) -> None:
        name = item.nodeid.removeprefix("tests/")
        found = {"rows": marked, "result": report.outcome, "ran": time.strftime("%Y-%m-%d", time.gmtime())}
        found["whole_s"] = round(report.duration, 1)
        found |= {name: value for name, value in item.user_properties if name == "seconds"}
        if item.get_closest_marker("engine") is not None:
            found["real"] = True
        if report.outcome != "skipped":
            self._tests[name] = self._tests.get(name, {}) | found

    def pytest_sessionfinish(self) -> None:
        """Keep the results of tests that did not run, unless they are gone: one area can run by itself."""
        if not self._write or not self._tests:
            return
        record = recorded()
        record["tests"] = dict(sorted((still_there(record["tests"]) | self._tests).items()))
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        (DOCS / "faults.md").write_text(page(record))


def still_there(tests: dict[str, dict]) -> dict[str, dict]:
    """Leave out recorded tests whose file or function has another name now."""
    folder = DOCS.parent / "tests"

    def exists(name: str) -> bool:
        file, _, function = name.split("[")[0].partition("::")
        return (folder / file).is_file() and f"def {function}(" in (folder / file).read_text()

    return {name: test for name, test in tests.items() if exists(name)}


@pytest.fixture
def fault_seconds(record_property):
    """Record the seconds that a fault took until its end."""
    return lambda seconds: record_property("seconds", round(seconds, 1))
