"""pytest plugin of `make faults`: it marks the tests of faults with their rows and writes docs/evidence/faults.md.

`PYTHONPATH=evidence python -m pytest tests -m fault -p fault_record` loads it. A test in `tests/faults` gets the mark
`fault` with the rows in its name; tests elsewhere have their rows in their name or in a mark of their own. A test that
measures gives the seconds from the fault to the end to the fixture `fault_seconds`.
"""

import time

import pytest
from fault_table import recorded, rows_of_test, write

results: dict[str, dict] = {}  # node id without `tests/` -> row of the record


def pytest_itemcollected(item) -> None:
    named = rows_of_test(item.path, getattr(item, "originalname", None) or item.name)
    if named or item.path.parent.name == "faults":
        item.add_marker(pytest.mark.fault(*named))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    marked = list(dict.fromkeys(row for mark in item.iter_markers("fault") for row in mark.args))
    if marked and (report.when == "call" or report.outcome == "failed"):
        note(item, report, marked)
    return report


def note(item, report, marked: list[str]) -> None:
    """Keep the result of one test; a skipped one proves nothing."""
    if report.outcome == "skipped":
        return
    name = item.nodeid.removeprefix("tests/")
    found = {
        "rows": marked,
        "result": report.outcome,
        "ran": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    found["whole_s"] = round(report.duration, 1)
    found |= {name: value for name, value in item.user_properties if name == "seconds"}
    if item.get_closest_marker("engine") is not None:
        found["real"] = True
    results[name] = results.get(name, {}) | found


def pytest_sessionfinish() -> None:
    """Add the results to the record: tests that did not run keep theirs, because one area can run by itself."""
    if results:
        record = recorded()
        record["tests"] |= results
        write(record)
