"""Check of this rank's weights for NaN and infinity, before they are gathered or saved. It needs no collective.

A step with a NaN in its loss makes NaN of all weights. An engine samples from them as from any others, and rotation
then deletes the checkpoints from before. `torch.aminmax` propagates NaN and shows infinity at either end; it reads the
weights once, in less than a tenth of the time of `isfinite().all()`.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..errors import WeightsNotFiniteError
from .shards import has_own_part, own_part

# Name, tensor (sharded or not) and the dtype that must be able to hold its values
Weight = tuple[str, torch.Tensor, torch.dtype]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # those that `aminmax` takes
NOT_FINITE = (
    "The cause is in the optimizer steps before: look at loss, grad_norm and rewards. Resume from the last checkpoint "
    "(`train(resume_from_checkpoint=True)`) with a lower `learning_rate` or `max_grad_norm`, or with `bf16` instead "
    "of `fp16`."
)
TOO_LARGE = "They are finite, but too large for the engine: set `engine_kwargs={'dtype': 'bfloat16'}`, or 'float32'."


def check_finite(
    weights: Iterable[Weight],
    where: str,
    step: int,
    sends_whole: bool,
) -> None:
    """Check this rank's own part of the weights.

    Args:
        weights (`Iterable[Weight]`):
            Name, tensor (sharded or not) and the dtype that must be able to hold its values.
        where (`str`):
            Node and rank, for the message.
        step (`int`):
            Number of optimizer steps so far, for the message.
        sends_whole (`bool`):
            `True` if this rank also checks tensors that are not sharded.

    Raises:
        `WeightsNotFiniteError`: for the first parameter with NaN, infinity or a value outside the dtype's range, and
            for the first buffer with NaN.
    """
    for group in _groups(weights, sends_whole):
        ends = [end for _, part, *_ in group for end in torch.aminmax(part)]
        values = torch.stack(ends).tolist()  # one wait for the GPU, instead of one per tensor
        for (name, _, dtype, limit), low, high in zip(
            group, values[::2], values[1::2], strict=True
        ):
            is_finite = -limit <= low and high <= limit  # false of NaN
            if is_finite:
                continue
            cure = TOO_LARGE if math.isfinite(low) and math.isfinite(high) else NOT_FINITE
            raise WeightsNotFiniteError(
                f"{where}: {name} has values from {low:g} to {high:g} after optimizer step {step}, expected finite "
                f"{str(dtype).removeprefix('torch.')} values. No engine loads these weights, and no checkpoint or "
                f"push contains them. {cure}"
            )


def _groups(
    weights: Iterable[Weight], sends_whole: bool
) -> Iterable[list[tuple[str, torch.Tensor, torch.dtype, float]]]:
    """Return name, own part, dtype and largest value of each tensor to check, by the part's device and dtype."""
    groups: dict[Any, list[tuple[str, torch.Tensor, torch.dtype, float]]] = {}
    for name, tensor, dtype in weights:
        part = own_part(tensor, sends_whole)
        if part.dtype in DTYPES and part.numel():
            # infinity is a value of some buffers, as of masks
            limit = torch.finfo(dtype).max if isinstance(tensor, nn.Parameter) else torch.inf
            groups.setdefault((part.device, part.dtype), []).append((name, part, dtype, limit))
    return groups.values()


def unchecked(model: nn.Module) -> str | None:
    """Return a line about the trained parameters that `check_finite` leaves out; `None` if it checks all of them."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    count = sum(not has_own_part(parameter) for parameter in trained)
    if not count:
        return None
    return (
        f"{count} of {len(trained)} trained parameters are not checked for NaN and infinity before a sync or a save, "
        "because MiCS shards them or they are on an NVMe: watch loss and grad_norm. ZeRO-3, also with ZeRO++, but "
        "without `mics_shard_size` and `offload_param.device: nvme`, checks all."
    )
