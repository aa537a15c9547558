"""The training setups whose weights a weight source must read, each without a trainer."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

ZERO3: dict = {"stage": 3, "stage3_param_persistence_threshold": 0}
CPU = {"device": "cpu"}

DEEPSPEED: dict[str, dict] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": ZERO3,
    "zero3_offload_optimizer": ZERO3 | {"offload_optimizer": CPU},
    "zero3_offload_param": ZERO3 | {"offload_optimizer": CPU, "offload_param": CPU},
    # the last one, because DeepSpeed keeps the group of ZeRO++ for all later engines of a process
    "zero3_hpz": ZERO3 | {"zero_hpz_partition_size": 2},
}
KINDS = ("ddp", "fsdp2", *DEEPSPEED)


def prepare(
    kind: str, model: nn.Module, lr: float = 1e-2
) -> tuple[nn.Module, Callable[[torch.Tensor], None]]:
    """Shard or wrap `model` over all ranks, with AdamW. A collective: every rank must call it.

    Args:
        kind (`str`):
            One of `KINDS`.
        model (`nn.Module`):
            Causal language model in float32; changed in place.
        lr (`float`, *optional*, defaults to `1e-2`):
            Learning rate, high enough that one step moves the log-probs by more than 0.1.

    Returns:
        `(forward, step)`: the module to call for logits, and a function that trains one step on token ids `(B, T)`.
    """
    if kind in DEEPSPEED:
        return _deepspeed(DEEPSPEED[kind], model, lr)
    forward = nn.parallel.DistributedDataParallel(model) if kind == "ddp" else _fsdp2(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def step(ids: torch.Tensor) -> None:
        forward(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return forward, step


def _fsdp2(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _deepspeed(
    zero: dict, model: nn.Module, lr: float
) -> tuple[nn.Module, Callable[[torch.Tensor], None]]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": dist.get_world_size(),
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # DeepSpeed would first have to compile its own optimizer
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(ids: torch.Tensor) -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    return engine, step
