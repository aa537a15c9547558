"""GPUs of this node: which ones a launch sees, how much of their memory is free, and which process holds the rest."""

from collections import Counter
from collections.abc import Iterator, Mapping

from ...run.gpu_variables import CUDA
from ..check.ports import process_name
from .case import Case
from .facts import Fact, Finding, Results, size
from .gpu_list import Gpu, NoTool, list_gpus

# bytes that a driver or a display may hold on a free GPU; a CUDA context takes about 0.5 GiB
IDLE = 1 << 30


def visible_gpus(found: list[Gpu], environ: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs that CUDA shows to a process with these variables, in its order."""
    listed = environ.get(CUDA)
    if listed is None:
        return found
    chosen: list[Gpu] = []
    for name in listed.split(","):
        gpu = _named(name.strip(), found)
        if gpu is None:  # CUDA ignores what follows it
            break
        chosen.append(gpu)
    return chosen


def _named(name: str, found: list[Gpu]) -> Gpu | None:
    """Return the GPU of an index or of the beginning of a UUID; `None` for an unknown one, at which CUDA stops."""
    if name.startswith("MIG-"):
        return Gpu(name, name, "slice of a GPU (MIG)", 0, 0, "")
    return next(
        (
            gpu
            for gpu in found
            if name == gpu.index or (len(name) > 4 and gpu.uuid.startswith(name))
        ),
        None,
    )


def count_gpus(case: Case) -> int:
    """Return the number of GPUs that the launch sees on this node; 0 without any, or if it uses the CPU."""
    return len(visible_gpus(known_gpus(), case.environ)) if case.on_gpus else 0


def known_gpus() -> list[Gpu]:
    """Return the GPUs of this machine, none if they cannot be listed."""
    try:
        return list_gpus()
    except NoTool:
        return []


def examine_gpus(case: Case) -> Results:
    """Yield the GPUs, and errors for missing and for occupied ones."""
    if not case.on_gpus:
        yield Fact("GPUs", "none needed: this launch uses the CPU", same=True)
        return
    try:
        found = list_gpus()
    except NoTool as error:
        yield Fact("GPUs", "unknown", same=True)
        yield Finding(
            "error",
            "GPUs",
            f"no GPU can be found on this node ({error})",
            "run this on a GPU node of NVIDIA; in a container, start it with the NVIDIA runtime (docker: --gpus all)",
        )
        return
    seen = visible_gpus(found, case.environ)
    severity = "warning" if case.launch.table else "error"
    yield Fact("GPUs", _models(seen) or "none", same=True, nodes=severity)
    yield Fact("driver", ", ".join(sorted({gpu.driver for gpu in found})) or "none", same=True)
    yield from _missing(case, found, seen)
    yield from _occupied(seen)


def _models(gpus: list[Gpu]) -> str:
    counts = Counter((gpu.name, gpu.total) for gpu in gpus)
    return ", ".join(f"{count} x {name} ({size(total)})" for (name, total), count in counts.items())


def _missing(case: Case, found: list[Gpu], seen: list[Gpu]) -> Iterator[Finding]:
    training, script = case.launch.started, case.launch.script
    needed = training + (0 if script.engines.vllm_devices or not script.node_mode else 1)
    if len(seen) >= needed:
        return
    what = f"this node shows {len(seen)} of its {len(found)} GPUs (expected {needed} or more: {training} train"
    what += ", and an engine needs one of its own)" if needed > training else ")"
    cure = f"write {case.launch.setting(max(1, len(seen) - 1))}"
    if len(found) > len(seen):
        cure = f"unset {CUDA} (`{case.environ.get(CUDA)}`), or ask the scheduler for all GPUs (`--gpus-per-node`)"
    yield Finding("error", "GPUs", what, cure)


def _occupied(seen: list[Gpu]) -> Results:
    busy = [gpu for gpu in seen if gpu.used > IDLE]
    yield Fact("free GPUs", f"{len(seen) - len(busy)} of {len(seen)}")
    for gpu in busy:
        holders = [
            f"{process_name(pid)} has {size(used) if used else 'some'}"
            for pid, used in gpu.pids.items()
        ]
        who, cure = "; ".join(holders), "end them (`kill PID`)"
        if not holders:
            who = (
                "by processes that are not visible from here, in another container or of a past job"
            )
            cure = "look with `nvidia-smi` or `rocm-smi` on the host, outside of the container"
        yield Finding(
            "error",
            "free GPUs",
            f"GPU {gpu.index} is not free: {size(gpu.used)} of {size(gpu.total)} are in use: {who}",
            f"{cure}, or take another node",
        )
