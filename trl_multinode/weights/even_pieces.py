"""Even pieces of tensors that FSDP2 cuts into whole rows.

An all-gather takes equal parts of all ranks. FSDP2 gives each rank `ceil(rows / ranks)` rows of a tensor, the last
ranks fewer or none: of 128 fused experts on 448 ranks, 320 ranks hold nothing, and an all-gather of the rows as they
lie would carry 448 of them. The ranks therefore pass rows on before the all-gather, so that each has an equal piece
of the flattened tensor, as under ZeRO-3. The pieces of both cuts are in rank order, so each rank sends and receives
intervals, without packing.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..transports.pieces import joined
from ..wire.messages import TensorRange

MIN_PADDING_BYTES = 32 << 20  # 0.7 ms at 400 Gb/s (arithmetic); less would not pay for another collective of all ranks
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

    def for_sending(self, itemsize: int) -> "Cut":
        """Return the even cut if it saves enough to be worth a collective, otherwise this one."""
        saved = self.padding - self.even().padding
        worth = saved * itemsize >= MIN_PADDING_BYTES and saved >= MIN_PADDING_SHARE * self.numel
        return self.even() if worth else self

    def interval(self, rank: int) -> tuple[int, int]:
        """Return the first element of a rank's piece, and the first one after it."""
        return min(rank * self.elements, self.numel), min((rank + 1) * self.elements, self.numel)

    def shared_with(self, other: "Cut", rank: int) -> list[int]:
        """Return how many elements of this cut's piece of `rank` are in each rank's piece of the other cut."""
        first, end = self.interval(rank)
        others = [other.interval(peer) for peer in range(self.world)]
        return [max(0, min(end, their_end) - max(first, their_first)) for their_first, their_end in others]


def pass_on_range(data: torch.Tensor, old: Cut, part: TensorRange, into: torch.Tensor) -> None:
    """Fill `into` with this rank's part of a range of a tensor that is cut otherwise. A collective of all ranks.

    Args:
        data (`torch.Tensor`):
            This rank's piece of the old cut, without padding.
        old (`Cut`):
            Cut of the tensor.
        part (`TensorRange`):
            Range to send, which has a piece per rank.
        into (`torch.Tensor`):
            Memory for this rank's part of the range; its padding is left as it is.
    """
    rank, intervals = dist.get_rank(), part.intervals(old.numel)
    first, end = old.interval(rank)
    sent = [data[max(first, a) - first : max(first, a, min(end, b)) - first] for a, b in intervals]
    mine, mine_end = intervals[rank]
    others = [old.interval(peer) for peer in range(old.world)]
    received = [max(0, min(mine_end, b) - max(mine, a)) * into.itemsize for a, b in others]
    target = into.view(torch.uint8)[: sum(received)]
    source = joined(sent, into.dtype, into.device).view(torch.uint8)
    dist.all_to_all_single(target, source, received, [piece.numel() * into.itemsize for piece in sent])


def pass_on(data: torch.Tensor, old: Cut, new: Cut, into: torch.Tensor) -> None:
    """Change a tensor's cut: fill `into` with this rank's piece of the new one. A collective of all ranks.

    Args:
        data (`torch.Tensor`):
            This rank's piece of the old cut, without padding and in the dtype of `into`.
        old (`Cut`), new (`Cut`):
            The two cuts.
        into (`torch.Tensor`):
            Memory for the piece of the new cut; its padding is left as it is.
    """
    rank = dist.get_rank()
    sent, received = (
        [count * data.itemsize for count in counts]
        for counts in (old.shared_with(new, rank), new.shared_with(old, rank))
    )
    target = into.view(torch.uint8)[: sum(received)]  # bytes, because not every backend has every dtype
    dist.all_to_all_single(target, data.view(torch.uint8), received, sent)
