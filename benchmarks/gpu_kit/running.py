"""Jobs as processes: start one, follow its events, end it when a stage exceeds its limit."""

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .jobs import Job
from .preflight import ROOT
from .record import FAILED, SKIPPED, events

FOLDERS = (ROOT / "benchmarks", ROOT, ROOT / "tests")  # of the kit, the package, and its test kit
STAGE_LIMIT_S = 240.0
DESCRIBE_LIMIT_S = 120.0
POLL_S = 0.5
OUT_OF_TIME = "the time of the run was over"


def helper(*arguments: str, **keywords) -> subprocess.Popen:
    """Start `python -m gpu_kit.job` in a session of its own, so that this process never holds GPU memory."""
    path = os.pathsep.join([*map(str, FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "gpu_kit.job", *arguments]
    return subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, start_new_session=True, **keywords
    )


def describe(rehearse: bool) -> dict:
    """Return the machine's description or `{"obstacle": ...}`, from a process that imports torch."""
    process = helper(
        "--describe", *(["--rehearse"] if rehearse else []), stdout=subprocess.PIPE, text=True
    )
    try:
        said, _ = process.communicate(timeout=DESCRIBE_LIMIT_S)
    except subprocess.TimeoutExpired:
        end(process)
        return {
            "obstacle": f"the check of this machine did not end within {DESCRIBE_LIMIT_S:.0f} s: see nvidia-smi."
        }
    if process.returncode != 0:
        return {
            "obstacle": f"the check of this machine ended with code {process.returncode}; its error is above."
        }
    return json.loads(said.splitlines()[-1])


def why_not(job: Job, meta: dict) -> str | None:
    """Return why `job` is skipped on the machine that `meta` describes, or `None` if it runs."""
    if meta["rehearsal"]:
        return job.on_cpu
    if meta["num_gpus"] < job.least_gpus:
        return f"needs {job.least_gpus} GPUs, this machine has {meta['num_gpus']}"
    if meta["memory_gib"] < job.least_gib:
        return f"needs {job.least_gib:g} GiB of GPU memory, this GPU has {meta['memory_gib']:g}"
    return None


def run_job(
    job: Job,
    options: Namespace,
    logs: Path,
    deadline: float,
    keep: Callable[[dict[str, dict]], None],
) -> None:
    """Run a job; `keep` gets every row as soon as its stage has ended, and at the end those of unfinished stages.

    Args:
        job (`Job`), options (`Namespace`):
            What to run, and the parsed arguments of the command line.
        logs (`Path`):
            Folder of the run; the job gets a folder of its own there.
        deadline (`float`):
            End of the run, as `time.monotonic()`.
        keep (`Callable[[dict[str, dict]], None]`):
            Stores and shows rows by their keys.
    """
    folder = logs / job.name.replace(" ", "-")
    folder.mkdir(parents=True)
    record = folder / "events.jsonl"
    arguments = [
        "--job",
        job.name,
        "--stages",
        options.stages,
        "--record",
        str(record),
        "--folder",
        str(folder),
    ]
    arguments += ["--engine", options.engine, *(["--rehearse"] if options.rehearse else [])]
    with open(folder / "job.log", "wb") as log:
        process = helper(*arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        why = follow(process, record, deadline, keep)
    finally:
        end(process)
    keep(ended(record)[1])
    missing = set(job.keys(options.stages)) - ended(record)[1].keys()
    last = (folder / "job.log").read_text(errors="replace").strip().splitlines()[-1:]
    result = SKIPPED if why == OUT_OF_TIME else FAILED
    why = why or f"the job ended with code {process.returncode}"
    keep(
        {key: without_figures(result, f"{why}: {' '.join(last)[-200:]}") for key in sorted(missing)}
    )


def end(process: subprocess.Popen) -> None:
    """Kill a job with all processes below it, if it still runs.

    torchrun starts ranks in sessions of their own, and a killed launcher would leave them behind with the GPU.
    """
    if process.poll() is None:
        import psutil  # a dependency of the package; `--list` works without

        below = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGKILL)
        for child in below:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait(30)


def follow(process: subprocess.Popen, record: Path, deadline: float, keep: Callable) -> str | None:
    """Wait for the job's end or a limit; return which limit was exceeded, if any."""
    since, seen = time.monotonic(), 0
    while process.poll() is None:
        time.sleep(POLL_S)
        count, rows = ended(record)
        if count > seen:
            since, seen = time.monotonic(), count
            keep(rows)
        if time.monotonic() - since > STAGE_LIMIT_S:
            return f"no result after {STAGE_LIMIT_S:.0f} s"
        if time.monotonic() > deadline:
            return OUT_OF_TIME
    return None


def ended(record: Path) -> tuple[int, dict[str, dict]]:
    """Return how many stages of a job have ended, and their rows by key."""
    found = [event for event in events(record) if event["event"] == "end"]
    rows = {
        event["key"]: {name: event[name] for name in ("result", "why", "seconds", "figures")}
        for event in found
    }
    return len(found), rows


def without_figures(result: str, why: str) -> dict:
    """Return the row of a stage without figures."""
    return {"result": result, "why": why, "seconds": 0.0, "figures": {}}
