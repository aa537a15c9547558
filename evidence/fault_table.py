"""docs/evidence/faults.md: a table of all faults, with the tests that inject them and the seconds that these measured.

`tests/faults/rows.toml` has the faults, docs/evidence/faults.json what tests recorded (`make faults`), the sources of
the tests which test belongs to which row. `python evidence/fault_table.py` writes the page from the three, without the
recorded tests that have another name by now.
"""

import ast
import json
import re
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS, PAGES = ROOT / "tests", ROOT / "docs" / "evidence"
RECORD, PAGE = PAGES / "faults.json", PAGES / "faults.md"
NAMED_TESTS = 2  # of a row; the record has all
NOT_RUN = " (not run yet)"
HEADER = """\
# Faults

A run on many nodes meets dead engines, frozen nodes, cut links and full disks. This page has every fault that a test
injects, what is promised, and the seconds that were measured. `make faults` runs the tests and writes the page, so no
cell is written by hand. A row without a test gives the reason.

"Seconds" are those from the fault to the end of the last rank, or to the line that names it, on CPUs. If a test does
not measure them, the column has the seconds of the whole test and "(test)"; of tests that share their launches, these
are the seconds of the comparison alone. Tests shorten the limits by settings, so the seconds hold for the shortened
limits. "(real)" marks rows with at least one test on the real vLLM; the others use the test kit's fake engine (a real
process, socket and protocol) or no engine. No test of this page used a GPU.
All tests are in [faults.json](faults.json).
"""


@cache
def rows() -> list[dict]:
    """The faults in the order of the page."""
    return tomllib.loads((TESTS / "faults" / "rows.toml").read_text())["row"]


def rows_of_name(name: str) -> list[str]:
    """Rows that a test's name states, existing or not: `test_row_<id>_...`, `test_rows_1_2_and_8_...`."""
    if several := re.match(r"test_rows_((?:\d+_|and_)+)", name):
        return re.findall(r"\d+", several[1])
    if not name.startswith("test_row_"):
        return []
    rest = name.removeprefix("test_row_") + "_"
    known = [
        row["id"] for row in rows() if rest.startswith((f"{row['id']}_", *row.get("names", ())))
    ]
    return [max(known, key=len)] if known else [rest.split("_")[0]]


def rows_of_test(path: Path, name: str) -> list[str]:
    """Rows of a test by its name. In `tests/faults` the beginnings that `rows.toml` gives as `names` count, too."""
    if path.parent.name == "faults":
        if not name.startswith("test_row"):
            rest = name.removeprefix("test_")
            return [row["id"] for row in rows() if rest.startswith(tuple(row.get("names", ())))]
        return rows_of_name(name)
    return rows_of_name(name) if re.match(r"test_rows?_\d", name) else []


@cache
def named_after_rows() -> dict[str, list[str]]:
    """Tests of each row, as `file::function`; only `file` where a mark belongs to some cases of a test."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        file = str(path.relative_to(TESTS))
        for node in ast.parse(path.read_text()).body:
            function = isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
            name = f"{file}::{node.name}" if function else file
            marked = {row for call in ast.walk(node) for row in marked_rows(call)}
            for row in sorted(marked | set(rows_of_test(path, node.name) if function else ())):
                found[row].append(name)
    return dict(found)


def marked_rows(node: ast.AST) -> list[str]:
    """Rows of a `mark.fault("10")` in a source."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.fault"):
        return [ast.literal_eval(argument) for argument in node.args]
    return []


def recorded() -> dict:
    """What `make faults` wrote: `{"tests": {node id: {...}}, "random": {...}}`."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {"tests": {}}


def page(record: dict) -> str:
    """The whole page."""
    with_test = [row for row in rows() if row["id"] in named_after_rows()]
    lines = [HEADER, f"{len(with_test)} of {len(rows())} rows have a test.\n"]
    lines += [
        "| row | fault | promise | limit | seconds | test | ran |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    return (
        "\n".join(lines + [_line(row, record["tests"]) for row in rows()] + _random_section(record))
        + "\n"
    )


def _line(row: dict, tests: dict[str, dict]) -> str:
    ran = {name: test for name, test in tests.items() if row["id"] in test["rows"]}
    names = [f"`{name}`" for name in dict.fromkeys(name.split("[")[0] for name in ran)]
    names += [f"`{name}`{NOT_RUN}" for name in _not_in(row["id"], ran)]
    if not names:
        names = [f"none: {row.get('missing', 'write one')}"]
    if others := names[NAMED_TESTS:]:
        not_run = sum(name.endswith(NOT_RUN) for name in others)
        names[NAMED_TESTS:] = [
            f"{len(others)} more" + (f" ({not_run} not run yet)" if not_run else "")
        ]
    failed = any(test["result"] != "passed" for test in ran.values())
    seconds = (
        ("**fails** " if failed else "")
        + _seconds(list(ran.values()))
        + _over(row["limit"], list(ran.values()))
    )
    real = " (real)" if any(test.get("real") for test in ran.values()) else ""
    dates = max((test["ran"] for test in ran.values()), default="")
    cells = [
        row["id"] + real,
        row["fault"],
        row["promise"],
        row["limit"],
        seconds,
        "<br>".join(names),
        dates,
    ]
    return f"| {' | '.join(cells)} |"


def _not_in(row: str, ran: dict[str, dict]) -> list[str]:
    known = {name.split("[")[0] for name in ran}
    files = {name.split("::")[0] for name in ran}
    return [name for name in named_after_rows().get(row, []) if name not in known | files]


def _over(limit: str, tests: list[dict]) -> str:
    """Return a remark if a measured time is above a limit in seconds."""
    number = re.match(r"(\d+) s$", limit)
    over = number and max((test.get("seconds", 0.0) for test in tests), default=0.0) > float(
        number[1]
    )
    return " **over the limit**" if over else ""


def _seconds(tests: list[dict]) -> str:
    measured = [test["seconds"] for test in tests if "seconds" in test]
    if not measured:
        whole = max((test["whole_s"] for test in tests), default=0.0)
        return f"{f'{whole:.1f}' if whole >= 0.1 else 'below 0.1'} (test)" if tests else ""
    low, high = min(measured), max(measured)
    return f"{low:.1f}" if low == high else f"{low:.1f} to {high:.1f}"


def _random_section(record: dict) -> list[str]:
    """The last `make faults-random`; its script writes the lines."""
    return ["", *record["random"]["lines"]] if "random" in record else []


def drop_stale_reasons() -> None:
    """Remove `missing` from the rows that have a test by now."""
    file = TESTS / "faults" / "rows.toml"
    parts = re.split(r"(?=\[\[row\]\])", file.read_text())
    for i, part in enumerate(parts):
        name = re.search(r'^id = "(.*)"$', part, re.MULTILINE)
        if name and name[1] in named_after_rows():
            parts[i] = re.sub(r"^missing = .*\n", "", part, flags=re.MULTILINE)
    file.write_text("".join(parts))
    rows.cache_clear()


def still_there(tests: dict[str, dict]) -> dict[str, dict]:
    """Leave out recorded tests whose file or function has another name now."""

    def exists(name: str) -> bool:
        file, _, function = name.split("[")[0].partition("::")
        path = TESTS / file
        return path.is_file() and f"def {function}(" in path.read_text()

    return {name: test for name, test in tests.items() if exists(name)}


def write(record: dict) -> None:
    """Write the record, without tests that are gone, and the page."""
    record["tests"] = dict(sorted(still_there(record["tests"]).items()))
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(page(record))


if __name__ == "__main__":
    drop_stale_reasons()
    write(recorded())
