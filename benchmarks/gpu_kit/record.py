"""Results of the stages: a job appends events to a file, the runner merges them into `gpu.json`."""

import json
import math
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


class Recorder:
    """Events of one job, written at once as one JSON line each, so that a killed job keeps its measurements.

    Args:
        path (`Path`):
            File of the job, to which events are appended.
    """

    def __init__(self, path: Path):
        self._path = path

    @contextmanager
    def stage(self, key: str) -> Iterator[dict]:
        """Time a stage and record the figures that its body puts into the yielded `dict`.

        A stage that raises is recorded as failed, with its figures so far and the reason; the job continues, because
        the next stage may still pass.
        """
        figures: dict = {}
        start = time.perf_counter()
        self.event(key=key, event="begin")
        try:
            yield figures
            result, why = PASSED, None
        except Exception as error:
            traceback.print_exc()
            result, why = FAILED, f"{type(error).__name__}: {error}".splitlines()[0][:300]
        seconds = round(time.perf_counter() - start, 1)
        self.event(
            key=key, event="end", result=result, why=why, seconds=seconds, figures=rounded(figures)
        )

    def skip(self, key: str, why: str) -> None:
        self.event(key=key, event="end", result=SKIPPED, why=why, seconds=0.0, figures={})

    def event(self, **line) -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")


def require(condition: bool, why: str) -> None:
    """Fail a stage unless `condition` holds: raise `AssertionError`, also under `python -O`."""
    if not condition:
        raise AssertionError(why)


def rounded(figures: dict) -> dict:
    """Round to four digits. NaN becomes text, because JSON has no NaN and a lost one would hide a failure."""

    def value(number):
        if not isinstance(number, float):
            return number
        return float(f"{number:.4g}") if math.isfinite(number) else str(number)

    return {name: value(number) for name, number in figures.items()}


def events(path: Path) -> list[dict]:
    """Return the events that a job has written so far, without an incomplete last line."""
    if not path.exists():
        return []
    return [
        json.loads(line)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def merge(results: Path, meta: dict, rows: dict[str, dict]) -> None:
    """Merge a job's rows into the result file, which has one run per device, versions and commit.

    A stage stays in its newest run only, so a fault that is mended does not stay in the file. A stage that was skipped
    replaces nothing.
    """
    runs = read(results)
    had = {key for run in runs for key in run["stages"]}
    rows = {key: row for key, row in rows.items() if row["result"] != SKIPPED or key not in had}
    mine = next((run for run in runs if run["meta"] == meta), {"meta": meta, "stages": {}})
    for run in runs:
        run["stages"] = {key: stage for key, stage in run["stages"].items() if key not in rows}
    mine["stages"] |= rows
    runs = [run for run in runs if run is not mine] + [mine]
    results.parent.mkdir(parents=True, exist_ok=True)
    partial = results.with_suffix(".part")
    partial.write_text(json.dumps([run for run in runs if run["stages"]], indent=1) + "\n")
    partial.replace(results)


def read(results: Path) -> list[dict]:
    """Return the recorded runs, oldest first: `meta` describes the machine, `stages` has a result per key."""
    return json.loads(results.read_text()) if results.exists() else []
