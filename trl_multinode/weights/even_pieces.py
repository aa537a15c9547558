"""Even pieces of tensors that FSDP2 cuts into whole rows.

An all-gather takes equal parts of all ranks. FSDP2 gives each rank `ceil(rows / ranks)` rows of a tensor, the last
ranks fewer or none: of 128 fused experts on 448 ranks, 320 ranks hold nothing, and an all-gather of the rows as they
lie would carry 448 of them. The ranks therefore pass rows on before the all-gather, so that each has an equal piece
of the flattened tensor, as under ZeRO-3. The pieces of both cuts are in rank order, so each rank sends and receives
intervals, without packing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..transports.pieces import joined
from ..wire.messages import TensorRange

# 0.7 ms at 400 Gb/s (arithmetic); less would not pay for another collective of all ranks
MIN_PADDING_BYTES = 32 << 20
MIN_PADDING_SHARE = 0.25  # of the tensor


@dataclass(frozen=True)
class Cut:
    """Cut of a flattened tensor into one piece per rank, in rank order; the last pieces may be short or empty.

    Args:
        numel (`int`):
            Number of elements of the tensor.
        elements (`int`):
            Number of elements of a piece, padding included.
        world (`int`):
            Number of ranks.
    """

    numel: int
    elements: int
    world: int

    @property
    def padding(self) -> int:
        """Number of elements that equal parts of all ranks have more than the tensor."""
        return self.world * self.elements - self.numel

    def even(self) -> "Cut":
        """Return the cut with the least padding."""
        return Cut(self.numel, math.ceil(self.numel / self.world), self.world)

    def whole(self) -> TensorRange:
        """Return the range that is the whole tensor."""
        return TensorRange(self.world, self.elements, 0, self.elements)

    def for_sending(self, itemsize: int) -> "Cut":
        """Return the even cut if it saves enough to be worth a collective, otherwise this one."""
        saved = self.padding - self.even().padding
        worth = saved * itemsize >= MIN_PADDING_BYTES and saved >= MIN_PADDING_SHARE * self.numel
        return self.even() if worth else self


def overlaps(interval: tuple[int, int], others: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the part of an interval that is in each of the others, empty where they share nothing."""
    first, end = interval
    parts = []
    for other, its_end in others:
        start = max(first, other)
        parts.append((start, max(start, min(end, its_end))))
    return parts


def pass_on(data: torch.Tensor, old: Cut, part: TensorRange, into: torch.Tensor) -> None:
    """Fill `into` with this rank's part of a range of a tensor that is cut otherwise. A collective of all ranks.

    Args:
        data (`torch.Tensor`):
            This rank's piece of the old cut, without padding.
        old (`Cut`):
            Cut of the tensor.
        part (`TensorRange`):
            Range to send, which has a piece per rank; of a whole cut, all its elements.
        into (`torch.Tensor`):
            Memory for this rank's part of the range; its padding is left as it is.
    """
    rank = dist.get_rank()
    pieces = part.intervals(old.numel)
    old_pieces = old.whole().intervals(old.numel)
    first, _ = own = old_pieces[rank]
    sent = [data[start - first : end - first] for start, end in overlaps(own, pieces)]
    received = [(end - start) * into.itemsize for start, end in overlaps(pieces[rank], old_pieces)]
    # bytes, because not every backend has every dtype
    target = into.view(torch.uint8)[: sum(received)]
    source = joined(sent, into.dtype, into.device).view(torch.uint8)
    dist.all_to_all_single(
        target, source, received, [piece.numel() * into.itemsize for piece in sent]
    )
