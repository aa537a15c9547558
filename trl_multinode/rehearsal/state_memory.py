"""Memory of an optimizer's state, which an optimizer allocates in its first step only."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from .untouched import zero_optimizer

PROBE = 4096  # elements; bitsandbytes keeps the state of smaller parameters in 32 bits


def reserve_state(trainer: Any) -> tuple[list[torch.Tensor], str]:
    """Allocate as much memory as the optimizer's state will take. The optimizer and its state are not touched.

    Returns:
        `tuple[list[torch.Tensor], str]`: tensors that hold the memory while they are referenced, and the reason if
            there are none.
    """
    zero = zero_optimizer(trainer.model_wrapped)
    optimizer = (
        zero.optimizer
        if zero is not None
        else getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    )
    if optimizer.state:
        return [], "it is allocated already"
    try:
        parameters = list(trained_parts(zero, optimizer))
        each = state_bytes(optimizer, parameters[0])
    # an optimizer of the user's: its constructor or its step may need anything
    except Exception as error:
        return (
            [],
            f"{type(optimizer).__name__} cannot be tried on a small parameter: {type(error).__name__}: {error}",
        )
    held = []
    for part in parameters:
        size = int(each * part.numel())
        held.append(torch.empty(size, dtype=torch.uint8, device=part.device))
    return held, ""


def trained_parts(zero: Any | None, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield this rank's parts of the parameters for which the optimizer keeps state."""
    if zero is not None:  # stage 3, or stages 1 and 2
        name = "fp32_partitioned_groups_flat"
        flat = getattr(zero, name) if hasattr(zero, name) else zero.single_partition_of_fp32_groups
        yield from (part for part in flat if part is not None)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter.to_local() if hasattr(parameter, "to_local") else parameter


def state_bytes(optimizer: torch.optim.Optimizer, like: torch.Tensor) -> float:
    """Return the bytes of state per element, from one step of an optimizer of the same class on a small parameter."""
    probe = torch.nn.Parameter(torch.zeros(PROBE, dtype=like.dtype, device=like.device))
    probe.grad = torch.zeros_like(probe)
    accepted = inspect.signature(type(optimizer)).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    twin = type(optimizer)([probe], **settings)
    twin.step()
    state = [
        value
        for value in twin.state[probe].values()
        if torch.is_tensor(value) and value.numel() > 1
    ]
    return sum(value.nbytes for value in state) / PROBE
