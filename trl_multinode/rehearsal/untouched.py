"""State that a rehearsal leaves as it found it: a forward and a backward pass without a trace.

A rehearsal never calls the optimizer, so weights and optimizer state stay as they are. Gradients, random states,
DeepSpeed's counters and gradient buffers, and the attributes of the trainer are restored here.
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

Scalar = bool | int | float | str | None


@contextmanager
def untouched(trainer: Any) -> Iterator[None]:
    """Restore, on exit, everything that a forward and a backward pass of `trainer` change."""
    model = trainer.model_wrapped
    with ExitStack() as stack:
        stack.enter_context(random_states(trainer.accelerator.device))
        restore_attributes(stack, trainer)
        restore_scalars(stack, trainer.accelerator.gradient_state)
        if (zero := zero_optimizer(model)) is not None:
            restore_scalars(stack, model)
            restore_scalars(stack, zero)
            restore_contents(stack, zero)
            restore_scalars(stack, zero._backward_hook_state)
        stack.callback(drop_gradients, model, zero)
        stack.callback(trainer.model.train, trainer.model.training)
        yield


def zero_optimizer(model: nn.Module) -> Any | None:
    """Return DeepSpeed's ZeRO optimizer of a prepared model; `None` without DeepSpeed."""
    found = getattr(model, "optimizer", None)
    return found if hasattr(found, "_backward_hook_state") else None


def drop_gradients(model: nn.Module, zero: Any | None) -> None:
    """Leave the gradients as before the first backward pass."""
    model.zero_grad()
    if zero is not None:
        zero.zero_grad(set_to_none=True)
        if (buffer := getattr(zero, "grad_partitions_flat_buffer", None)) is not None:
            buffer.zero_()  # a parameter that a later pass leaves out, such as an unused expert, keeps its gradient


@contextmanager
def random_states(device: torch.device) -> Iterator[None]:
    """Restore Python's, numpy's and torch's random states, the accelerator's included."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [device] if device.type != "cpu" else []
    try:
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def restore_attributes(stack: ExitStack, owner: Any) -> None:
    """Let `stack` restore which objects the attributes of `owner` name, and remove new attributes."""
    before = dict(vars(owner))

    def restore() -> None:
        vars(owner).update(before)
        for name in vars(owner).keys() - before.keys():
            delattr(owner, name)

    stack.callback(restore)


def restore_scalars(stack: ExitStack, owner: Any) -> None:
    """Let `stack` restore the attributes of `owner` that are numbers, flags or texts: DeepSpeed's counters, for
    example."""
    before = {name: value for name, value in vars(owner).items() if isinstance(value, Scalar)}
    stack.callback(vars(owner).update, before)


def restore_contents(stack: ExitStack, owner: Any) -> None:
    """Let `stack` restore the contents of the attributes of `owner` that are dictionaries or sets, in place."""
    for value in vars(owner).values():
        if isinstance(value, dict | set):
            stack.callback(value.update, value.copy())
            stack.callback(value.clear)
