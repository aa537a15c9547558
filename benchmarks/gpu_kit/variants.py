"""Stages g, h and j: a LoRA adapter, an FP8 engine, and layouts that need two GPUs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

from multinode_kit.engines import SyncDriver, running_engines
from trl_multinode.engine.settings import lora_arguments
from trl_multinode.weights.peft_source import AdapterSource, PeftSource
from trl_multinode.weights.transport import Transport

from . import rows as comparing
from .bench import FLOOR_FACTOR, LIMITS, STALE_FACTOR, bench, bucket_bytes
from .machine import Machine, build_model
from .record import require
from .weights import logprobs

LORA_RANK = 8
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@torch.no_grad()
def move_adapter(model) -> None:
    """Add noise to A and B, because PEFT starts B at zero, where an adapter has no effect."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.add_(torch.randn_like(parameter) * 0.05)


@contextmanager
def adapted(machine: Machine, folder: Path, separate: bool) -> Iterator[SyncDriver]:
    """Start an engine and a model with a LoRA adapter, which is sent separately or merged into the weights."""
    torch.manual_seed(0)
    config = LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules=TARGETS)
    model = get_peft_model(
        build_model(machine, "0.5B", "bf16"), config, autocast_adapter_dtype=False
    ).eval()
    args = machine.engine_args(
        "bf16", eager=True, max_model_len=2048, **lora_arguments(LORA_RANK if separate else 0)
    )
    with running_engines(
        model.get_base_model(), folder, machine.engine_module, stall_timeout_s=120.0,
        environment=machine.engine_environment(), **args,
    ) as engines:  # fmt: skip
        source = (AdapterSource if separate else PeftSource)(
            model.get_base_model(), machine.dtype("bf16")
        )
        transport = Transport("host", machine.device, pin=not machine.rehearsal)
        yield SyncDriver(model, engines, bucket_bytes(machine), source, transport)


def adapter(machine: Machine, figures: dict, folder: Path) -> None:
    """Run stage g: send the adapter alone after a first full sync; compare with sending it merged into all weights."""
    for name, separate in (("adapter", True), ("merged", False)):
        with adapted(machine, folder / name, separate) as trainer:
            asked = comparing.prompts(trainer.model.config.vocab_size, 4)
            stale = []
            for sync in range(4):
                move_adapter(trainer.model)
                if sync:
                    rows = comparing.sample(trainer.engines, asked, 4, 48, sync)
                    stale.append(comparing.mean_difference(trainer.model, rows))
                trainer.send()
            rows = comparing.sample(trainer.engines, asked, 4, 48, trainer.version.update)
            fresh = comparing.mean_difference(trainer.model, rows)
            figures |= {
                f"{name}_fresh": fresh,
                f"{name}_stale": min(stale),
                f"{name}_s": trainer.timings.total_s,
            }
            figures[f"{name}_mib"] = trainer.timings.num_bytes / 2**20
            floor = comparing.rounding_floor(trainer.model, rows)
            figures[f"{name}_rounding_floor"] = floor
            require(
                fresh <= max(LIMITS["bf16"], FLOOR_FACTOR * floor),
                f"{name}: log-probs differ by {fresh:.2g}",
            )
            require(
                min(stale) >= 3 * fresh, f"{name}: a stale adapter differs by {min(stale):.2g} only"
            )


def fp8(machine: Machine, figures: dict, folder: Path) -> None:
    """Run stage h: check that an engine that quantizes to FP8 has the new values after a reload of bf16 buckets.

    Quantization alone shifts its log-probs, equally before and after the reload; stale weights shift them far more.
    """
    with bench(machine, folder, "0.5B", "bf16", eager=True, quantization="fp8") as found:
        first = comparing.mean_difference(found.model, found.rows())
        found.send_changed()
        second = comparing.mean_difference(found.model, found.rows())
        kept = found.rows()
        found.send_changed()  # `kept` is from the weights before
        stale = comparing.mean_difference(found.model, kept)
    figures |= {"first": first, "after_reload": second, "stale": stale}
    require(
        second <= 1.5 * first,
        f"log-probs differ by {second:.2g} after a reload, {first:.2g} before",
    )
    require(
        stale >= 3 * second, f"stale weights differ by {stale:.2g} only: the test shows nothing"
    )


def two_gpus(machine: Machine, figures: dict, folder: Path) -> None:
    """Run stage j: one GPU trains and one generates (`nccl`, `host`), then an engine uses both (TP 2, `host`).

    A rehearsal runs everything on the CPU, and its `nccl` is the same code over gloo.
    """
    other = {} if machine.rehearsal else {"CUDA_VISIBLE_DEVICES": machine.gpu_id(1)}
    reserved = Machine(machine.rehearsal, machine.engine_module, other)
    cases = {
        "split_nccl": (reserved, {"kind": "nccl"}),
        "split_host": (reserved, {}),
        "tp2": (machine, {"gpus": 2, "tensor_parallel_size": 2}),
    }
    for name, (where, keywords) in cases.items():
        with bench(where, folder / name, "0.5B", "bf16", eager=True, **keywords) as found:
            case: dict = {}
            try:
                logprobs(found, case)
            finally:
                figures |= {f"{name}_{key}": value for key, value in case.items()}
            kind = found.trainer.sync._slots.kind
            require(kind == keywords.get("kind", "host"), f"{name}: went through {kind} instead")
    require(
        figures["tp2_stale"] >= STALE_FACTOR * figures["tp2_fresh_5"], "stale weights look fresh"
    )
