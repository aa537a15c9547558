"""`docs/compatibility.md` from test results: tests say with `@pytest.mark.feature(group, row, ...)` what they prove.

With `--compatibility` (`make compatibility`) results of the tests that ran are written; without, a test whose result
is not what the file says fails the run. Nobody writes a cell by hand.
"""

import json
from collections import defaultdict
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
ENGINES = {"vllm": "vLLM", "fake": "fake engine", "none": "no engine"}
HEADER = """\
# TRL features that work here

`make compatibility` writes this page from test results; a test with another result fails its run. So no cell is
written by hand, and each was executed. "fake engine" is the test kit's transformers model behind the same protocol,
held to vLLM by `tests/engine/test_conformance.py`; "no engine" means that this library does not generate in this row.
Tests of `tests/e2e/test_features.py` run the same script, data and seed under `trl.GRPOTrainer` on the completions
that our trainer got, and require equal metrics, gradients and weights.
"""


class Compatibility:
    """Collects what marked tests proved.

    Marker: `feature(group, row, engine="vllm" | "fake" | "none", refused=False)`. Without `engine` it is vLLM's for
    tests marked `engine`, else the fake's. A test of a refusal records its message: `record_property("message", ...)`.
    """

    def __init__(self, write: bool, file: Path = DOCS / "compatibility.json"):
        self._write, self._file = write, file
        self._found: dict[tuple[str, str], list[dict]] = defaultdict(list)
        self._failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if report.outcome != "passed":
            self._failed.add(item.nodeid)  # also by its set-up, or by what it left
        if report.when == "call":
            for marker in item.iter_markers("feature"):
                self._add(item, marker, dict(item.user_properties).get("message", ""))
        return report

    def _add(self, item, marker, message: str) -> None:
        group, row = marker.args
        real = item.get_closest_marker("engine") is not None
        engine = marker.kwargs.get("engine", "vllm" if real else "fake")
        test = item.nodeid.removeprefix("tests/")
        result = "refused" if marker.kwargs.get("refused") else "works"
        self._found[group, row].append({"test": test, "engine": engine, "result": result, "message": message})

    def pytest_sessionfinish(self, session) -> None:
        for tests in self._found.values():
            for test in tests:
                if f"tests/{test['test']}" in self._failed or test["test"] in self._failed:
                    test["result"] = "fails"
        said = json.loads(self._file.read_text()) if self._file.exists() else []
        if self._write:
            self._rewrite(said)
        elif differing := self._not_as(said):
            print(f"\nnot as docs/compatibility.md says (`make compatibility` writes it): {differing}")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _not_as(self, said: list[dict]) -> list[str]:
        known = [(row["group"], row["row"], test) for row in said for test in row["tests"]]
        return [
            f"{group} / {row}: {test['test']} {test['result']}"
            for (group, row), tests in self._found.items()
            for test in tests
            if (group, row, test) not in known
        ]

    def _rewrite(self, said: list[dict]) -> None:
        rows = {(row["group"], row["row"]): row["tests"] for row in said} | dict(self._found)
        data = [{"group": group, "row": row, "tests": tests} for (group, row), tests in sorted(rows.items())]
        self._file.write_text(json.dumps(data, indent=1) + "\n")
        self._file.with_suffix(".md").write_text(table(data))


def table(rows: list[dict]) -> str:
    """The page: a table per group, and first of all how many rows there are of each kind."""
    lines, group = [HEADER], None
    results = [verdict(row["tests"]) for row in rows]
    lines.append(f"{results.count('works')} rows work, {results.count('refused')} are refused, "
                 f"{results.count('fails')} fail.")  # fmt: skip
    for row, result in zip(rows, results, strict=True):
        if row["group"] != group:
            group = row["group"]
            lines += [f"\n## {group}\n", "| feature | result | engine | test |", "| --- | --- | --- | --- |"]
        engines = ", ".join(sorted({ENGINES[test["engine"]] for test in row["tests"]}))
        tests = "<br>".join(f"`{test}`" for test in short_names([test["test"] for test in row["tests"]]))
        messages = "".join(f": {test['message']}" for test in row["tests"][:1] if test["message"])
        lines.append(f"| {row['row']} | {result}{messages} | {engines} | {tests} |")
    return "\n".join(lines) + "\n"


def short_names(tests: list[str]) -> list[str]:
    """Several cases of one test are named once."""
    functions = [test.split("[")[0] for test in tests]
    return list(dict.fromkeys(f if functions.count(f) > 1 else t for f, t in zip(functions, tests, strict=True)))


def verdict(tests: list[dict]) -> str:
    results = {test["result"] for test in tests}
    return "fails" if "fails" in results else "refused" if "refused" in results else "works"
