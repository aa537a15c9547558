"""The tensors of a source as a worker gets them: bucket by bucket, ranges joined."""

import math

import torch

from trl_multinode.transports.pieces import GrowingTensor
from trl_multinode.weights.buckets import slot_layout
from trl_multinode.weights.source import WeightSource


def received(
    source: WeightSource, limit_bytes: int, is_local_main: bool = True
) -> dict[str, torch.Tensor]:
    """A collective of all training ranks; the tensors come to local main processes."""
    growing, found = GrowingTensor(torch.device("cpu")), {}
    for bucket in source.buckets(limit_bytes):
        with source.gathering(bucket) as finish:
            for spec, pieces in zip(slot_layout(bucket), finish(), strict=True):
                if not is_local_main:
                    continue
                assert pieces.shape == spec.shape_in_slot
                data = torch.empty(math.prod(spec.shape_in_slot), dtype=getattr(torch, spec.dtype))
                pieces.copy_to(data)
                whole = (
                    data.view(spec.shape)
                    if spec.range is None
                    else growing.add(spec, spec.range, data)
                )
                found |= {} if whole is None else {spec.name: whole}
    source.release()
    return found
