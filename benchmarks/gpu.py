"""Test this library on one GPU in at most half an hour: `make gpu`, or

    python benchmarks/gpu.py                    # all stages; a to d in the first ten minutes
    python benchmarks/gpu.py --stages be        # some stages; results of the others on this machine stay
    python benchmarks/gpu.py --rehearse         # the same code on a CPU with a tiny model; figures mean nothing
    python benchmarks/gpu.py --list             # jobs and stages
    python benchmarks/gpu.py --table            # write the tables of docs/evidence/gpu.md and executed.md again

Stages (docs/evidence/gpu.md): a log-probs over syncs, b host transport, c CUDA IPC, d swap while requests are frozen,
e GRPO steps and balanced micro-batches, f TRL's colocation, g LoRA, h FP8, i rows of 32k tokens, j two GPUs. Results
are written after each job. Exit code: 0 no stage failed, 1 a stage failed, 2 no stage can run on this machine.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from gpu_kit import table
from gpu_kit.jobs import JOBS, STAGES, Job
from gpu_kit.preflight import entry_points
from gpu_kit.record import FAILED, PASSED, SKIPPED, merge, read
from gpu_kit.running import OUT_OF_TIME, describe, run_job, why_not, without_figures

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results" / "gpu.json"
PAGES = FOLDER.parent / "docs" / "evidence"
PAGE, EXECUTED = PAGES / "gpu.md", PAGES / "executed.md"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stages", default=STAGES, help=f"letters out of {STAGES}")
    parser.add_argument(
        "--jobs", nargs="*", help="names of jobs; default: all that have one of the stages"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=30.0,
        help="for all jobs; the others are recorded as skipped",
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="run on the CPU, into a result file of its own"
    )
    parser.add_argument(
        "--results", type=Path, help="result file; default: benchmarks/results/gpu.json"
    )
    parser.add_argument(
        "--logs",
        type=Path,
        help="folder for the logs of jobs and engines; default: a temporary one",
    )
    parser.add_argument(
        "--engine",
        default="trl_multinode.engine_process.main",
        help="module of the engines; the tests name their fake",
    )
    parser.add_argument("--list", action="store_true", help="print the jobs and end")
    parser.add_argument("--table", action="store_true", help="write the tables and end")
    options = parser.parse_args(arguments)
    if unknown := set(options.stages) - set(STAGES):
        parser.error(f"there is no stage {', '.join(sorted(unknown))}; the stages are {STAGES}")
    if unknown := set(options.jobs or ()) - {job.name for job in JOBS}:
        parser.error(f"there is no job {', '.join(sorted(unknown))}; --list prints the jobs")
    if options.results is None:
        options.results = (
            Path(tempfile.gettempdir()) / "gpu-rehearsal.json" if options.rehearse else RESULTS
        )
    return options


def selected(options: argparse.Namespace) -> list[Job]:
    return [
        job for job in JOBS if job.keys(options.stages) and (options.jobs is None or job.name in options.jobs)
    ]  # fmt: skip


class Results:
    """Rows of this run: merged into the result file and printed when they arrive.

    Args:
        path (`Path`):
            The result file.
        meta (`dict`):
            Description of the machine.
    """

    def __init__(self, path: Path, meta: dict):
        self._path, self._meta = path, meta
        self.rows: dict[str, dict] = {}

    def keep(self, rows: dict[str, dict]) -> None:
        new = {key: row for key, row in rows.items() if key not in self.rows}
        if new:
            self.rows |= new
            merge(self._path, self._meta, new)
        for key, row in new.items():
            why = f": {row['why']}" if row["why"] else ""
            print(f"[gpu] {key}: {row['result']}, {row['seconds']} s{why}", flush=True)
            if row["figures"]:
                figures = (f"{name}={value}" for name, value in row["figures"].items())
                print(f"[gpu]     {', '.join(figures)}", flush=True)

    def counts(self) -> dict[str, int]:
        found = [row["result"] for row in self.rows.values()]
        return {result: found.count(result) for result in (PASSED, FAILED, SKIPPED)}


def run(options: argparse.Namespace) -> int:
    logs = options.logs or Path(tempfile.mkdtemp(prefix="gpu_"))
    logs.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [*entry_points(logs), os.environ.get("PYTHONPATH")])
    )
    meta = describe(options.rehearse)
    if "obstacle" in meta:
        print(f"[gpu] {meta['obstacle']}")
        return 2
    print(f"[gpu] {meta['device']}, logs in {logs}, results in {options.results}", flush=True)
    # the job runs in a session of its own
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    deadline, results = time.monotonic() + 60 * options.minutes, Results(options.results, meta)
    for job in selected(options):
        reason = why_not(job, meta) or (OUT_OF_TIME if time.monotonic() > deadline else None)
        if reason:
            results.keep(
                {key: without_figures(SKIPPED, reason) for key in job.keys(options.stages)}
            )
        else:
            print(f"[gpu] {job.name} ...", flush=True)
            run_job(job, options, logs, deadline, results.keep)
    counts = results.counts()
    print("[gpu] " + ", ".join(f"{count} {result}" for result, count in counts.items()))
    return 1 if counts[FAILED] else 0


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.list:
        for job in JOBS:
            print(f"{job.stages:5} {job.name}")
        return 0
    if not options.table:
        code = run(options)
        if options.rehearse or code == 2:
            return code
    found = read(options.results)
    PAGE.write_text(table.replaced(PAGE.read_text(), found))
    EXECUTED.write_text(table.with_evidence(EXECUTED.read_text(), found))
    return 0 if options.table else code


if __name__ == "__main__":
    sys.exit(main())
