"""Cores, memory and limits of this task."""

import math
import os
import resource
from pathlib import Path

import psutil

from .case import Case
from .facts import Fact, Finding, Results, size
from .models import all_slots_bytes

CGROUP = Path("/sys/fs/cgroup")
CONNECTIONS = 3  # of each rank to the run's store, on node 0
OTHER_FILES = 200  # libraries, logs and the data loader of a process
UNLIMITED = "unlimited"


def cores_of_task() -> float:
    """Return the cores that this process may use: its CPU set, or a smaller quota of its container."""
    return min(len(os.sched_getaffinity(0)), _quota())


def _quota() -> float:
    """Return the cores of the container's quota, of version 2 or 1 of control groups; infinity without one."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((CGROUP / file).read_text() for file in files).split()
        except (OSError, ValueError):
            continue
        if quota.isdigit():
            return int(quota) / int(period)
    return math.inf


def examine_cores(case: Case) -> Results:
    """Yield the cores of this task, and a finding if its processes outnumber them."""
    cores, machine = cores_of_task(), os.cpu_count() or 1
    yield Fact("cores", f"{cores:g} of {machine}", same=True)
    needed = case.launch.started + case.engines
    if cores >= needed:
        return
    severity = "error" if case.on_gpus else "warning"
    yield Finding(
        severity,
        "cores",
        f"this task has {cores:g} of the machine's {machine} cores (expected {needed} or more: "
        f"{case.launch.started} ranks and {case.engines} engine{'s' if case.engines != 1 else ''})",
        _more_cores(case, machine),
    )


def _more_cores(case: Case, machine: int) -> str:
    if cores_of_task() >= machine:
        return "lower `num_processes`, or take a machine with more cores: each rank and each engine keeps one busy"
    if "SLURM_JOB_ID" not in case.environ:
        return "give the container or the task more cores (docker: --cpus; taskset)"
    cure = "write `#SBATCH --exclusive` and `srun --cpus-per-task=N` with all cores of the node"
    if case.environ.get("SLURM_CPUS_PER_TASK", "1") == "1":
        return f"{cure} (N = {machine}): with task affinity, `--ntasks-per-node 1` alone gives one core"
    return f"{cure}: `srun` does not take `--cpus-per-task` over from `sbatch`"


def examine_memory(case: Case) -> Results:
    """Yield the memory of the machine, or of the container if that is smaller."""
    found = psutil.virtual_memory()
    limit = min(_memory_limit(), found.total)
    text = f"{size(found.available)} free of {size(found.total)}"
    yield Fact(
        "memory", text if limit == found.total else f"{text}, the container may use {size(limit)}"
    )


def _memory_limit() -> float:
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            return int((CGROUP / file).read_text())
        except (OSError, ValueError):  # "max"
            continue
    return math.inf


def examine_limits(case: Case) -> Results:
    """Yield `ulimit -n` and `ulimit -l`, and findings if they are too small for this launch."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Fact("ulimit -n", f"{_limit(soft)} (hard {_limit(hard)})")
    ranks, needed = case.launch.num_ranks, CONNECTIONS * case.launch.num_ranks + OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < needed:
        yield Finding(
            "error" if case.rank == 0 else "warning",
            "ulimit -n",
            f"`ulimit -n`: at most {hard} files (expected {needed} or more: node 0 holds {CONNECTIONS} connections of "
            f"each of the {ranks} ranks)",
            "raise the hard limit (`LimitNOFILE=` of slurmd or containerd, /etc/security/limits.conf; docker: --ulimit"
            " nofile=65536)",
        )
    yield from _locked_memory(case)


def _locked_memory(case: Case) -> Results:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield Fact("ulimit -l", _limit(soft, in_bytes=True))
    needed = max(case.slots_bytes, all_slots_bytes(case))
    if not case.on_gpus or soft == resource.RLIM_INFINITY or soft >= needed:
        return
    yield Finding(
        "warning",
        "ulimit -l",
        f"`ulimit -l`: {size(soft)} may be locked (expected unlimited, at least {size(needed)} for the"
        " weight sync); NCCL over InfiniBand needs locked memory too",
        "run `ulimit -l unlimited`, or write `LimitMEMLOCK=infinity` for slurmd or containerd (docker: --ulimit"
        " memlock=-1)",
    )


def _limit(value: int, in_bytes: bool = False) -> str:
    if value == resource.RLIM_INFINITY:
        return UNLIMITED
    return size(value) if in_bytes else str(value)
