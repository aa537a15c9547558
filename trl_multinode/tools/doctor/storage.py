"""Shared memory and disks of this node, against what the launch writes."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ...run.memory import obstacle_to_slots
from ...wire.leftovers import leftovers
from .case import Case
from .facts import Fact, Finding, Results, size
from .models import all_slots_bytes, find_model

SHARED_MEMORY = Path("/dev/shm")
MESSAGE_QUEUES = 160 << 20  # bytes of vLLM's message queues in /dev/shm, per engine
OPTIMIZER_BYTES = 14  # per parameter in a checkpoint: weights in 2 bytes, and a master copy and two moments in 4 each
NEARLY_FULL = 1 << 30  # bytes
MORE_SHARED_MEMORY = (
    "give the container more shared memory (docker: --shm-size; Kubernetes: the `sizeLimit` of an `emptyDir` with"
    " `medium: Memory`)"
)
MORE_MEMORY = (
    "raise the limit of memory (docker: --memory; Kubernetes: `limits.memory`; Slurm: --mem)"
)


def free_bytes(path: Path) -> tuple[int, int]:
    """Return the bytes that this user may write at a path or above it, and the size of its file system."""
    found = shutil.disk_usage(existing(path))
    return found.free, found.total


def existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())


def examine_shared_memory(case: Case) -> Results:
    """Yield the free shared memory, and a finding if the slots of the weight sync and vLLM's queues do not fit."""
    free, total = free_bytes(SHARED_MEMORY)
    queues, slots = MESSAGE_QUEUES * case.engines, all_slots_bytes(case)
    needed = case.slots_bytes + queues
    wanted = f", {size(slots)} for a slot for each bucket" if slots else ""
    yield Fact("/dev/shm", f"{size(free)} free of {size(total)}, {size(needed)} needed{wanted}")
    left = list(leftovers(remove=False))
    dead = [each for each in left if each.kept is None]
    held = sum(each.num_bytes for each in dead)
    if dead:
        yield Finding(
            "warning",
            "/dev/shm",
            f"killed runs left {len(dead)} folder(s) and {size(held)} of files and shared memory on this node",
            "the next start removes them; `trl-multinode clean` does it now",
        )
    if case.launch.script.node_mode and free + held < needed:
        yield Finding(
            "error",
            "/dev/shm",
            f"{SHARED_MEMORY} has {size(free)} free of {size(total)} (expected {size(needed)} for the weight sync"
            f" and {case.engines} engine(s))",
            f"{MORE_SHARED_MEMORY}, or lower `sync_bucket_mb`",
        )
    elif slots:
        yield from _all_slots(slots, slots + queues, free + held)


def _all_slots(slots: int, needed: int, free: int) -> Iterator[Finding]:
    """Yield a warning if a slot for each bucket does not fit into the shared memory, or into half of the memory."""
    about, what, cure = "memory", obstacle_to_slots(slots), MORE_MEMORY
    if free < needed:
        what = f"{SHARED_MEMORY} has {size(free)} free (expected {size(needed)} for a slot for each bucket)"
        about, cure = "/dev/shm", MORE_SHARED_MEMORY
    if what:
        yield Finding(
            "warning", about, f"training will wait until the engines have loaded: {what}", cure
        )


def examine_disks(case: Case) -> Results:
    """Yield the free bytes of `output_dir` and of the temporary folder, and findings if little is left."""
    output, model = case.value("output_dir"), find_model(case)
    folders = {"disk of `output_dir`": Path(output)} if output else {}
    folders["disk of TMPDIR"] = Path(tempfile.gettempdir())
    for name, folder in folders.items():
        free, total = free_bytes(folder)
        yield Fact(name, f"{size(free)} free of {size(total)} ({folder})")
        if not os.access(existing(folder), os.W_OK):
            yield Finding(
                "error", name, f"{folder} cannot be written on this node", "choose another folder"
            )
        if free < NEARLY_FULL:
            yield Finding(
                "error",
                name,
                f"{folder} has {size(free)} free (expected {size(NEARLY_FULL)} or more)",
                "free some space, or choose another folder",
            )
    if output and model is not None and model.parameters:
        yield from _checkpoint(Path(output), model.parameters)


def _checkpoint(folder: Path, parameters: int) -> Iterator[Finding]:
    needed, (free, _) = OPTIMIZER_BYTES * parameters, free_bytes(folder)
    if free < needed:
        yield Finding(
            "warning",
            "disk of `output_dir`",
            f"{folder} has {size(free)} free, a checkpoint of all nodes with AdamW's state takes about {size(needed)}",
            "choose a larger disk for `output_dir`, or set `save_only_model` if you will not resume",
        )
