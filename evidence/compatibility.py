"""pytest plugin of `make compatibility`: it writes docs/evidence/compatibility.md from the results of marked tests.

`PYTHONPATH=evidence python -m pytest tests -m feature -p compatibility` loads it. A test has a mark of what it proves:
`feature(group, row, engine="vllm" | "fake" | "none", refused=False)`. Without `engine` it is vLLM's for tests marked
`engine`, else the fake's. A test of a refusal records its message: `record_property("message", ...)`.

`python evidence/compatibility.py` writes the page from docs/evidence/compatibility.json, without tests that are gone.
"""

import json
from collections import defaultdict

import pytest
from fault_table import PAGES, TESTS

RECORD = PAGES / "compatibility.json"
PAGE = PAGES / "compatibility.md"
ENGINES = {"vllm": "vLLM", "fake": "fake engine", "none": "no engine"}
HEADER = """\
# TRL features that work here

`make compatibility` runs the tests and writes this page from their results. So no cell is written by hand, and each
was executed. "fake engine" is the test kit's transformers model behind the same protocol, held to vLLM by
`tests/engine/test_conformance.py`; "no engine" means that this library does not generate in this row.
Tests of `tests/e2e/test_features.py` run the same script, data and seed under `trl.GRPOTrainer` on the completions
that our trainer got, and require equal metrics, gradients and weights.
"""

# group and row -> results of its tests
proved: dict[tuple[str, str], list[dict]] = defaultdict(list)
failed: set[str] = set()


# ---- the tests of a run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    name = item.nodeid.removeprefix("tests/")
    if report.outcome != "passed":
        failed.add(name)  # also by its set-up, or by what it left
    if report.when == "call":
        for marker in item.iter_markers("feature"):
            real = item.get_closest_marker("engine") is not None
            engine = marker.kwargs.get("engine", "vllm" if real else "fake")
            result = "refused" if marker.kwargs.get("refused") else "works"
            message = dict(item.user_properties).get("message", "")
            proved[marker.args].append(
                {"test": name, "engine": engine, "result": result, "message": message}
            )
    return report


def pytest_sessionfinish() -> None:
    for tests in proved.values():
        for test in tests:
            if test["test"] in failed:
                test["result"] = "fails"
    write({(row["group"], row["row"]): row["tests"] for row in recorded()} | proved)


# ---- the record and the page


def recorded() -> list[dict]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else []


def write(rows: dict[tuple[str, str], list[dict]]) -> None:
    """Write record and page, without tests that have another name by now."""
    data = []
    for (group, row), tests in sorted(rows.items()):
        if there := [test for test in tests if is_there(test["test"])]:
            data.append({"group": group, "row": row, "tests": there})
    RECORD.write_text(json.dumps(data, indent=1) + "\n")
    PAGE.write_text(page(data))


def is_there(name: str) -> bool:
    file, *_, function = name.split("[")[0].split("::")
    path = TESTS / file
    return path.is_file() and f"def {function}(" in path.read_text()


def page(rows: list[dict]) -> str:
    """The page: a table per group, and first of all how many rows there are of each kind."""
    results = [verdict(row["tests"]) for row in rows]
    counts = {result: results.count(result) for result in ("works", "refused", "fails")}
    lines = [
        HEADER,
        f"{counts['works']} rows work, {counts['refused']} are refused, {counts['fails']} fail.",
    ]
    group = None
    for row, result in zip(rows, results, strict=True):
        if row["group"] != group:
            group = row["group"]
            lines += [
                f"\n## {group}\n",
                "| feature | result | engine | test |",
                "| --- | --- | --- | --- |",
            ]
        engines = ", ".join(sorted({ENGINES[test["engine"]] for test in row["tests"]}))
        tests = "<br>".join(
            f"`{test}`" for test in short_names([test["test"] for test in row["tests"]])
        )
        messages = "".join(f": {test['message']}" for test in row["tests"][:1] if test["message"])
        lines.append(f"| {row['row']} | {result}{messages} | {engines} | {tests} |")
    return "\n".join(lines) + "\n"


def short_names(tests: list[str]) -> list[str]:
    """Name several cases of one test once."""
    functions = [test.split("[")[0] for test in tests]
    return list(
        dict.fromkeys(
            f if functions.count(f) > 1 else t for f, t in zip(functions, tests, strict=True)
        )
    )


def verdict(tests: list[dict]) -> str:
    results = {test["result"] for test in tests}
    return "fails" if "fails" in results else "refused" if "refused" in results else "works"


if __name__ == "__main__":
    write({(row["group"], row["row"]): row["tests"] for row in recorded()})
