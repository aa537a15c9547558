"""Stages a to d: log-probs over syncs, the host and IPC transports, a weight swap while requests are frozen."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import torch

from trl_multinode.engine.node_engines import NodeEngines
from trl_multinode.testing.engines import Trainer, running_engines
from trl_multinode.weights.source import slot_bytes
from trl_multinode.weights.transports import Transport

from . import rows as comparing
from .machine import Machine, build_model, perturb, synchronize
from .record import Recorder

LIMITS = {"fp32": 1e-3, "bf16": 0.03}  # mean |difference| of log-probs per token
STALE_FACTOR = 10
COPY_BYTES = 256 << 20


def bucket_bytes(machine: Machine) -> int:
    return 40_000 if machine.rehearsal else 512 << 20


class Bench:
    """An engine, the model whose weights it gets, and what both were started with."""

    def __init__(self, machine: Machine, trainer: Trainer, dtype: str, log_folder: Path):
        self.machine, self.trainer, self.dtype, self.log_folder = machine, trainer, dtype, log_folder
        self.model, self.engines = trainer.model, trainer.engines

    @property
    def runner(self) -> str:
        """vLLM's model runner, as the engine reports it."""
        return self.engines.ready[0].model_runner

    def rows(self) -> comparing.Rows:
        """Sample 16 rows of 64 tokens (a rehearsal: 4 of 24) with the engine's present weights."""
        each, tokens = (1, 24) if self.machine.rehearsal else (4, 64)
        asked = comparing.prompts(self.model.config.vocab_size, 4)
        return comparing.sample(self.engines, asked, each, tokens, self.trainer.version.update)

    def send_changed(self) -> None:
        perturb(self.model)
        self.trainer.send()


@contextmanager
def bench(
    machine: Machine,
    folder: Path,
    shape: str,
    dtype: str,
    eager: bool,
    model_on_host: bool = False,
    gpus: int = 1,
    kind: str = "host",
    **engine_args,
) -> Iterator[Bench]:
    """
    Start an engine that shares the first GPU with the model; the first update is sent.

    Args:
        shape (`str`), dtype (`str`), eager (`bool`):
            Of model and engine.
        model_on_host (`bool`, *optional*, defaults to `False`):
            Whether the model stays in host memory, so that the engine can have nearly all of the GPU.
        gpus (`int`, *optional*, defaults to 1):
            Visible GPUs of the engine.
        kind (`str`, *optional*, defaults to `"host"`):
            Transport of the first update.
        **engine_args:
            Further keywords of vLLM's `EngineArgs`.
    """
    model = build_model(machine, shape, dtype, torch.device("cpu") if model_on_host else machine.device)
    args = machine.engine_args(dtype, eager, **{"max_model_len": 2048, **engine_args})
    environment = machine.engine_environment(gpus) | ({"TRITON_F32_DEFAULT": "ieee"} if dtype == "fp32" else {})
    module = machine.engine_module
    with running_engines(model, folder, module, stall_timeout_s=120.0, environment=environment, **args) as engines:
        transport = Transport(kind, machine.device, pin=not machine.rehearsal, seen_as=[0], folder=folder)
        trainer = Trainer(model, engines, bucket_bytes(machine), transport=transport)
        trainer.send()
        yield Bench(machine, trainer, dtype, folder)


def logprobs(found: Bench, figures: dict) -> None:
    """Stage a: the engine agrees with the trainer after 1 and 5 syncs, and disagrees before each."""
    fresh, stale = [], []
    for sync in range(1, 6):
        if sync > 1:
            perturb(found.model)
            stale.append(comparing.mean_difference(found.model, found.rows()))
            found.trainer.send()
        if sync in (1, 5):
            rows = found.rows()
            fresh.append(comparing.mean_difference(found.model, rows))
    floor = comparing.rounding_floor(found.model, rows)
    limit = LIMITS[found.dtype]
    figures |= {
        "fresh_1": fresh[0], "fresh_5": fresh[1], "stale": min(stale), "limit": limit, "rounding_floor": floor,
        "prompt_logprobs": comparing.score_difference(found.engines, found.model, rows), "runner": found.runner,
    }  # fmt: skip
    # A random model's rounding grows with its layers; where it alone is above the limit, it is the limit
    require(max(fresh) <= max(limit, 1.5 * floor), f"fresh weights differ by {max(fresh):.2g} per token")
    require(figures["prompt_logprobs"] <= max(limit, 3 * floor), "the engine's prompt log-probs are of other weights")
    require(min(stale) >= STALE_FACTOR * max(fresh), f"stale weights differ by {min(stale):.2g} only")


def transport(kind: str, found: Bench, figures: dict, repeats: int = 5) -> None:
    """Stages b and c: whole syncs into an engine that only takes the buckets, then into vLLM, beside a plain copy."""
    machine = found.machine
    environment = machine.engine_environment()
    with running_engines(
        found.model, found.log_folder / "holder", "gpu_kit.holder", environment=environment
    ) as engines:  # fmt: skip
        other = Trainer(found.model, engines, bucket_bytes(machine))
        alone = timed_syncs(other, kind, machine, found.log_folder, repeats)
    figures |= alone | {"copy_gb_per_s": copy_gb_per_s(machine, kind)}
    with_vllm = timed_syncs(found.trainer, kind, machine, found.log_folder, repeats)
    figures |= {f"{name}_vllm": value for name, value in with_vllm.items()}
    for ours in ("", "_vllm"):
        figures[f"of_copy{ours}"] = figures[f"gb_per_s{ours}"] / figures["copy_gb_per_s"]
    rows = found.rows()
    figures["fresh"] = comparing.mean_difference(found.model, rows)
    limit = max(LIMITS[found.dtype], 1.5 * comparing.rounding_floor(found.model, rows))
    require(figures["fresh"] <= limit, f"log-probs differ by {figures['fresh']:.2g} after {kind}")


def timed_syncs(trainer: Trainer, kind: str, machine: Machine, folder: Path, repeats: int) -> dict:
    """Median GB/s of whole syncs, of the copies into slots and of the loads; the first sync warms up."""
    sync, warnings = trainer.sync, []
    opened = Transport(
        kind, machine.device, pin=not machine.rehearsal, seen_as=[0], folder=folder, say=warnings.append
    ).open(trainer.engines, slot_bytes(sync.buckets), sync._places)
    sync.close()
    sync._slots = opened
    require(opened.kind == kind and not warnings, f"{kind}: {warnings}")
    stages: dict[str, list[float]] = {"gb_per_s": [], "copy_gb_per_s_sender": [], "load_gb_per_s": []}
    for repeat in range(-1, repeats):
        perturb(trainer.model)
        synchronize(machine)
        trainer.send()
        if repeat >= 0:
            seconds = (trainer.timings.stream_s, trainer.timings.copy_s, trainer.timings.load_s)
            for values, value in zip(stages.values(), seconds, strict=True):
                values.append(trainer.timings.num_bytes / value / 1e9)
    middle = {name: median(values) for name, values in stages.items()}
    return middle | {"gb_per_s_min": min(stages["gb_per_s"]), "gb_per_s_max": max(stages["gb_per_s"])}


def copy_gb_per_s(machine: Machine, kind: str) -> float:
    """What one large copy on the way of `kind` reaches: pinned host to device, or within the device."""
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=machine.device)
    if kind == "host" and not machine.rehearsal:
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    else:
        source = torch.ones_like(target)
    return COPY_BYTES / median(seconds_of(lambda: target.copy_(source), machine) for _ in range(9)) / 1e9


def seconds_of(call: Callable[[], object], machine: Machine) -> float:
    synchronize(machine)
    start = time.perf_counter()
    call()
    synchronize(machine)
    return time.perf_counter() - start


def swap_in_flight(found: Bench, figures: dict) -> None:
    """Stage d: requests are frozen while a whole update arrives; every token has the log-prob of its own weights."""
    tokens = 1500
    asked = comparing.prompts(found.model.config.vocab_size, 2)
    other = NodeEngines(
        [connection._socket_path for connection in found.engines.connections], 0, 1,
        found.log_folder / "load", 120.0, 64, found.log_folder,
    )  # fmt: skip
    try:
        with ThreadPoolExecutor(1) as thread:
            update = found.trainer.version.update
            future = thread.submit(comparing.sample, other, asked, 2, tokens, update)
            time.sleep(1.0)
            old = {name: tensor.clone() for name, tensor in found.model.state_dict().items()}
            perturb(found.model)
            start = time.perf_counter()
            require(not future.done(), "the rows ended before the swap: nothing was frozen")
            found.trainer.send()
            figures["swap_s"] = time.perf_counter() - start
            got = comparing.wait(future, 180.0)
    finally:
        other.close()
    judge_swap(found, figures, got, old)


def judge_swap(found: Bench, figures: dict, got: comparing.Rows, old: dict) -> None:
    after = comparing.trainer_logprobs(found.model, got, batch=2)
    new = {name: tensor.clone() for name, tensor in found.model.state_dict().items()}
    found.model.load_state_dict(old)
    before = comparing.trainer_logprobs(found.model, got, batch=2)
    floor = comparing.rounding_floor(found.model, got[:1])
    found.model.load_state_dict(new)
    engine = comparing.engine_logprobs(got)
    cuts = comparing.swap_points(before, after, engine)
    left = torch.cat([(engine - before)[i, :cut] for i, cut in enumerate(cuts)]).abs().mean().item()
    right = torch.cat([(engine - after)[i, cut:] for i, cut in enumerate(cuts)]).abs().mean().item()
    wrong = min((engine - before).abs().mean().item(), (engine - after).abs().mean().item())
    figures |= {"tokens_before_swap": cuts, "before": left, "after": right, "without_a_swap": wrong}
    limit = max(LIMITS[found.dtype], 1.5 * floor)
    require(all(0 < cut < engine.shape[1] for cut in cuts), f"no row was cut in two: {cuts}")
    require(max(left, right) <= limit, f"tokens differ by {left:.2g} before and {right:.2g} after the swap")
    require(wrong >= STALE_FACTOR * max(left, right), "one set of weights explains the rows as well as two")


def require(condition: bool, why: str) -> None:
    """Raises `AssertionError`, also under `python -O`."""
    if not condition:
        raise AssertionError(why)


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
    """A job: the stages in `stages` on one engine. What starts the engine fails the job."""
    with bench(machine, folder, shape, dtype, eager, **engine_args) as found:
        for stage in stages:
            if stage == "c" and machine.rehearsal:
                record.skip(f"{stage} {name}", "CUDA IPC needs a GPU")
                continue
            with record.stage(f"{stage} {name}") as figures:
                figures["model"] = f"{machine.shape(shape)} {dtype}"
                STAGES[stage](found, figures)
