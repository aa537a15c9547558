"""Stages a to d: log-probs after syncs, the host and IPC transports, a weight swap while requests are frozen."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch

from multinode_kit.engines import SyncDriver, running_engines
from trl_multinode.weights.transport import Transport

from . import rows as comparing
from .bench import STALE_FACTOR, Bench, bench, bucket_bytes
from .machine import Machine, perturb, synchronize
from .record import Recorder, require
from .swap import swap_in_flight

COPY_BYTES = 256 << 20


def logprobs(found: Bench, figures: dict) -> None:
    """Run stage a: engine and trainer must agree after syncs 1 and 5, and disagree before each of syncs 2 to 5."""
    fresh, stale = [], []
    for sync in range(1, 6):
        if sync > 1:
            perturb(found.model)
            stale.append(comparing.mean_difference(found.model, found.rows()))
            found.trainer.send()
        if sync in (1, 5):
            rows = found.rows()
            fresh.append(comparing.mean_difference(found.model, rows))
    limit, floor = found.limit(rows)
    scored = comparing.score_difference(found.engines, found.model, rows)
    figures |= {
        "fresh_1": fresh[0], "fresh_5": fresh[1], "stale": min(stale), "limit": limit, "rounding_floor": floor,
        "prompt_logprobs": scored, "runner": found.runner,
    }  # fmt: skip
    require(all(value <= limit for value in fresh), f"fresh weights differ by {fresh} per token")
    # one row has more noise
    require(scored <= 2 * limit, f"the log-probs of a scored prompt differ by {scored:.2g}")
    require(
        all(s >= STALE_FACTOR * f for s in stale for f in fresh),
        f"stale weights differ by {stale} only",
    )


def transport(kind: str, found: Bench, figures: dict, repeats: int = 5) -> None:
    """Run stage b or c: time whole syncs into an engine that drops the buckets, then into vLLM, and a plain copy."""
    machine = found.machine
    environment = machine.engine_environment()
    with running_engines(
        found.model, found.log_folder / "holder", "gpu_kit.holder", environment=environment
    ) as engines:  # fmt: skip
        other = SyncDriver(found.model, engines, bucket_bytes(machine))
        alone = timed_syncs(other, kind, machine, found.log_folder, repeats)
        other.sync.close()
    figures |= alone | {"copy_gb_per_s": copy_gb_per_s(machine, kind)}
    with_vllm = timed_syncs(found.trainer, kind, machine, found.log_folder, repeats)
    figures |= {f"{name}_vllm": value for name, value in with_vllm.items()}
    for ours in ("", "_vllm"):
        figures[f"of_copy{ours}"] = figures[f"gb_per_s{ours}"] / figures["copy_gb_per_s"]
    rows = found.rows()
    figures["fresh"] = comparing.mean_difference(found.model, rows)
    require(
        figures["fresh"] <= found.limit(rows)[0],
        f"log-probs differ by {figures['fresh']:.2g} after {kind}",
    )


def timed_syncs(
    trainer: SyncDriver, kind: str, machine: Machine, folder: Path, repeats: int
) -> dict:
    """Return the median GB/s of whole syncs, of the copies into slots and of the loads, after a warm-up sync."""
    sync, warnings = trainer.sync, []
    opened = Transport(
        kind,
        machine.device,
        pin=not machine.rehearsal,
        seen_as=[0],
        folder=folder,
        report=warnings.append,
    ).open(trainer.engines, sync.layouts)
    sync.close()
    sync._slots = opened
    require(opened.kind == kind and not warnings, f"{kind}: {warnings}")
    stages: dict[str, list[float]] = {
        "gb_per_s": [],
        "copy_gb_per_s_sender": [],
        "load_gb_per_s": [],
    }
    for repeat in range(-1, repeats):
        perturb(trainer.model)
        synchronize(machine)
        trainer.send()
        if repeat >= 0:
            seconds = (trainer.timings.stream_s, trainer.timings.copy_s, trainer.timings.load_s)
            for values, value in zip(stages.values(), seconds, strict=True):
                values.append(trainer.timings.num_bytes / value / 1e9)
    middle = {name: median(values) for name, values in stages.items()}
    halves = [median(stages["gb_per_s"][start::2]) for start in (0, 1)]
    return middle | {
        "control": halves[0] / halves[1],
        "gb_per_s_min": min(stages["gb_per_s"]),
        "gb_per_s_max": max(stages["gb_per_s"]),
    }


def copy_gb_per_s(machine: Machine, kind: str) -> float:
    """Return the GB/s of one large copy on the path of `kind`: pinned host to device, or within the device."""
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=machine.device)
    if kind == "host" and not machine.rehearsal:
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    else:
        source = torch.ones_like(target)
    return (
        COPY_BYTES
        / median(seconds_of(lambda: target.copy_(source), machine) for _ in range(9))
        / 1e9
    )


def seconds_of(call: Callable[[], object], machine: Machine) -> float:
    synchronize(machine)
    start = time.perf_counter()
    call()
    synchronize(machine)
    return time.perf_counter() - start


STAGES: dict[str, Callable[[Bench, dict], None]] = {
    "a": logprobs,
    "b": partial(transport, "host"),
    "c": partial(transport, "ipc"),
    "d": swap_in_flight,
}


def run_stages(
    machine: Machine, record: Recorder, name: str, folder: Path, stages: str, shape: str, dtype: str, eager: bool,
    **engine_args,
) -> None:  # fmt: skip
    """Run the stages in `stages` on one engine. An error while the engine starts fails the whole job."""
    with bench(machine, folder, shape, dtype, eager, **engine_args) as found:
        for stage in stages:
            if stage == "c" and machine.rehearsal:
                record.skip(f"{stage} {name}", "CUDA IPC needs a GPU")
                continue
            with record.stage(f"{stage} {name}") as figures:
                figures["model"] = f"{machine.shape(shape)} {dtype}"
                STAGES[stage](found, figures)
