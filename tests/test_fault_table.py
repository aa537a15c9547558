"""Every row of docs/faults.md has a test that exists, or the reason why not; every test of a fault has a row."""

from pathlib import Path

import pytest
from fault_record import still_there
from fault_table import DOCS, named_after_rows, page, recorded, rows, rows_of_name, rows_of_test

IDS = [row["id"] for row in rows()]


@pytest.mark.parametrize("row", rows(), ids=IDS)
def test_a_row_has_a_test_or_the_reason_why_not(row):
    tests = named_after_rows().get(row["id"], [])
    assert bool(tests) != ("missing" in row), (
        f"row {row['id']} of tests/faults/rows.toml: tests {tests}, missing: {row.get('missing')!r}. "
        "Write `missing` only in a row without a test; `python tests/fault_table.py` removes it from the others."
    )


def test_every_test_of_a_fault_has_a_row_and_rows_have_one_name():
    assert set(named_after_rows()) <= set(IDS)
    assert len(set(IDS)) == len(IDS)


def test_the_page_is_made_from_rows_and_record():
    wrong = "`python tests/fault_table.py` writes the page again, `make faults` runs the tests"
    assert page(recorded()) == (DOCS / "faults.md").read_text(), wrong


def test_every_recorded_test_exists_and_passed():
    tests = recorded()["tests"]
    assert still_there(tests) == tests, "`make faults` records the tests under their new names"
    assert [name for name, test in tests.items() if test["result"] != "passed"] == []


def test_a_name_gives_its_rows():
    assert rows_of_name("test_row_10_the_local_main_process") == ["10"]
    assert rows_of_name("test_row_1_an_engine") == ["1"]
    assert rows_of_name("test_rows_1_2_engines_die") == ["1", "2"]
    assert rows_of_name("test_row_node_killed_at_once") == ["node_killed"]
    assert rows_of_name("test_row_99_unknown") == ["99"] and rows_of_name("test_rows_are_read") == []
    assert rows_of_name("test_rows_1_2_and_8_losses") == ["1", "2", "8"]
    faults, elsewhere = Path("tests/faults/test_beats.py"), Path("tests/rollouts/test_rows.py")
    assert rows_of_test(faults, "test_a_frozen_node_ends_the_run") == ["node_frozen"]
    assert rows_of_test(elsewhere, "test_row_by_row") == [] and rows_of_test(elsewhere, "test_row_1_ends") == ["1"]
