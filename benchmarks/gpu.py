"""Test this library on one GPU in at most half an hour: `make gpu`, or

    python benchmarks/gpu.py                    # all stages; a to d in the first ten minutes
    python benchmarks/gpu.py --stages be        # some stages; results of the others on this machine stay
    python benchmarks/gpu.py --rehearse         # the same code on a CPU with a tiny model; figures mean nothing
    python benchmarks/gpu.py --list             # jobs and stages
    python benchmarks/gpu.py --table            # write the tables of docs/gpu.md and README.md from the result file

Stages (docs/gpu.md): a log-probs over syncs, b host transport, c CUDA IPC, d swap while requests are frozen, e GRPO
steps and balanced micro-batches, f TRL's colocation, g LoRA, h FP8, i rows of 32k tokens, j two GPUs. Results are
written after each job. Exit code: 0 no stage failed, 1 a stage failed, 2 no stage can run on this machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gpu_kit import table
from gpu_kit.jobs import JOBS, STAGES, Job
from gpu_kit.record import FAILED, PASSED, SKIPPED, events, merge, read

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results" / "gpu.json"
PAGE, README = FOLDER.parent / "docs" / "gpu.md", FOLDER.parent / "README.md"
STAGE_LIMIT_S = 240.0
POLL_S = 0.5


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default=STAGES, help=f"letters out of {STAGES}")
    parser.add_argument("--jobs", nargs="*", help="names of jobs; default: all that have one of the stages")
    parser.add_argument("--minutes", type=float, default=30.0, help="for all jobs; the others are recorded as skipped")
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU, into a result file of its own")
    parser.add_argument("--results", type=Path, help="result file; default: benchmarks/results/gpu.json")
    parser.add_argument("--logs", type=Path, help="folder for the logs of jobs and engines; default: a temporary one")
    parser.add_argument("--engine", default="gpu_kit.engine", help="module of the engines; the tests name their fake")
    parser.add_argument("--list", action="store_true", help="print the jobs and end")
    parser.add_argument("--table", action="store_true", help="write the tables and end")
    options = parser.parse_args(arguments)
    if unknown := set(options.stages) - set(STAGES):
        parser.error(f"there is no stage {', '.join(sorted(unknown))}; the stages are {STAGES}")
    if unknown := set(options.jobs or ()) - {job.name for job in JOBS}:
        parser.error(f"there is no job {', '.join(sorted(unknown))}; --list prints the jobs")
    if options.results is None:
        options.results = Path(tempfile.gettempdir()) / "gpu-rehearsal.json" if options.rehearse else RESULTS
    return options


def selected(options: argparse.Namespace) -> list[Job]:
    return [
        job for job in JOBS if job.keys(options.stages) and (options.jobs is None or job.name in options.jobs)
    ]  # fmt: skip


def entry_points(folder: Path) -> list[str]:
    """Return the import paths that vLLM needs to find this package's plugin: none if the package is installed.

    vLLM looks for entry points, which a source tree lacks. Metadata written to `folder` supplies them, so that the kit
    runs from a plain checkout.
    """
    try:
        version("trl-multinode")
        return []
    except PackageNotFoundError:
        project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]
        found = folder / f"trl_multinode-{project['version']}.dist-info"
        found.mkdir(exist_ok=True)
        (found / "METADATA").write_text(f"Name: trl-multinode\nVersion: {project['version']}\n")
        lines = [
            f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in points.items())
            for group, points in project["entry-points"].items()
        ]
        (found / "entry_points.txt").write_text("\n".join(lines))
        return [str(folder)]


def helper(*arguments: str, **keywords) -> subprocess.Popen:
    """Start `python -m gpu_kit.job` in a session of its own, so that this process never holds GPU memory."""
    path = os.pathsep.join([str(FOLDER), str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "gpu_kit.job", *arguments]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, start_new_session=True, **keywords)


def describe(rehearse: bool) -> dict:
    """Return the machine's description or `{"obstacle": ...}`, from a process that imports torch."""
    process = helper("--describe", *(["--rehearse"] if rehearse else []), stdout=subprocess.PIPE, text=True)
    said, _ = process.communicate(timeout=120)
    return json.loads(said.splitlines()[-1])


def why_not(job: Job, meta: dict) -> str | None:
    if meta["rehearsal"]:
        return job.on_cpu
    if meta["num_gpus"] < job.least_gpus:
        return f"needs {job.least_gpus} GPUs, this machine has {meta['num_gpus']}"
    if meta["memory_gib"] < job.least_gib:
        return f"needs {job.least_gib:g} GiB of GPU memory, this GPU has {meta['memory_gib']:g}"
    return None


def skipped(why: str) -> dict:
    return {"result": SKIPPED, "why": why, "seconds": 0.0, "figures": {}}


def run_job(job: Job, options: argparse.Namespace, logs: Path, deadline: float) -> dict[str, dict]:
    """Run a job and return its rows. A stage that exceeds its limit ends the job; rows of finished stages stay."""
    folder = logs / job.name.replace(" ", "-")
    folder.mkdir(parents=True)
    record = folder / "events.jsonl"
    arguments = ["--job", job.name, "--stages", options.stages, "--record", str(record), "--folder", str(folder)]
    arguments += ["--engine", options.engine, *(["--rehearse"] if options.rehearse else [])]
    with open(folder / "job.log", "wb") as log:
        process = helper(*arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    since, seen, why = time.monotonic(), 0, None
    try:
        while process.poll() is None:
            time.sleep(POLL_S)
            ended = [event for event in events(record) if event["event"] == "end"]
            if len(ended) > seen:
                since = time.monotonic()
                for event in ended[seen:]:
                    show(event["key"], event)
                seen = len(ended)
            if time.monotonic() - since > STAGE_LIMIT_S:
                why = f"no result after {STAGE_LIMIT_S:.0f} s"
            elif time.monotonic() > deadline:
                why = "the time of the run was over"
            if why:
                break
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)  # the engines watch the job and end with it
            process.wait(30)
    return finished(job, options.stages, record, why or f"the job ended with code {process.returncode}", folder, seen)


def finished(job: Job, stages: str, record: Path, why: str, folder: Path, shown: int) -> dict[str, dict]:
    """Return the rows of the stages that ended, and a failure for each stage that did not."""
    ended = [event for event in events(record) if event["event"] == "end"]
    for event in ended[shown:]:
        show(event["key"], event)
    rows = {event["key"]: {name: event[name] for name in ("result", "why", "seconds", "figures")} for event in ended}
    for key in job.keys(stages):
        if key not in rows:
            last = (folder / "job.log").read_text(errors="replace").strip().splitlines()[-1:]
            rows[key] = {"result": FAILED, "why": f"{why}: {' '.join(last)[-200:]}", "seconds": 0.0, "figures": {}}
            show(key, rows[key])
    return rows


def show(key: str, row: dict) -> None:
    figures = ", ".join(f"{name}={value}" for name, value in row["figures"].items())
    print(f"[gpu] {key}: {row['result']}, {row['seconds']} s{': ' + row['why'] if row['why'] else ''}", flush=True)
    if figures:
        print(f"[gpu]     {figures}", flush=True)


def run(options: argparse.Namespace) -> int:
    logs = options.logs or Path(tempfile.mkdtemp(prefix="gpu_"))
    logs.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*entry_points(logs), os.environ.get("PYTHONPATH")]))
    meta = describe(options.rehearse)
    if "obstacle" in meta:
        print(f"[gpu] {meta['obstacle']}")
        return 2
    print(f"[gpu] {meta['device']}, logs in {logs}, results in {options.results}", flush=True)
    deadline, results = time.monotonic() + 60 * options.minutes, []
    for job in selected(options):
        reason = why_not(job, meta) or ("the time of the run was over" if time.monotonic() > deadline else None)
        if reason:
            rows = {key: skipped(reason) for key in job.keys(options.stages)}
            for key, row in rows.items():
                show(key, row)
        else:
            print(f"[gpu] {job.name} ...", flush=True)
            rows = run_job(job, options, logs, deadline)
        merge(options.results, meta, rows)
        results += [row["result"] for row in rows.values()]
    counts = {result: results.count(result) for result in (PASSED, FAILED, SKIPPED)}
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
    README.write_text(table.with_evidence(README.read_text(), found))
    return 0 if options.table else code


if __name__ == "__main__":
    sys.exit(main())
