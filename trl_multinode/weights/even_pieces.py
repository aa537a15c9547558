"""Even pieces of tensors that FSDP2 cuts into whole rows.

An all-gather takes equal parts of all ranks. FSDP2 gives each rank `ceil(rows / ranks)` rows of a tensor, the last
ranks fewer or none: of 128 fused experts on 448 ranks, 320 ranks hold nothing, and an all-gather of the rows as they
lie would carry 448 of them. The ranks therefore pass rows on before the all-gather, so that each has an equal piece
of the flattened tensor, as under ZeRO-3. The pieces of both cuts are in rank order, so each rank sends and receives
intervals, without packing.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..transports.pieces import joined
from ..wire.messages import TensorRange

# 0.7 ms at 400 Gb/s (arithmetic); less would not pay for another collective of all ranks
MIN_PADDING_BYTES = 32 << 20
MIN_PADDING_SHARE = 0.25  # of the tensor


def all_of(pieces: int, elements: int) -> TensorRange:
    """Return the range that is a whole tensor, which is cut into pieces of so many elements, padding included."""
    return TensorRange(pieces, elements, 0, elements)


def evened(cut: TensorRange, numel: int, itemsize: int) -> TensorRange:
    """Return the even cut of a tensor of `numel` elements if it saves enough to be worth a collective, else `cut`."""
    even = all_of(cut.pieces, math.ceil(numel / cut.pieces))
    saved = cut.pieces * (cut.elements - even.elements)
    worth = saved * itemsize >= MIN_PADDING_BYTES and saved >= MIN_PADDING_SHARE * numel
    return even if worth else cut


def overlaps(interval: tuple[int, int], others: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the part of an interval that is in each of the others, empty where they share nothing."""
    first, end = interval
    parts = []
    for other, its_end in others:
        start = max(first, other)
        parts.append((start, max(start, min(end, its_end))))
    return parts


def pass_on(
    data: torch.Tensor, numel: int, cut: TensorRange, part: TensorRange, into: torch.Tensor
) -> None:
    """Fill `into` with this rank's part of a range of a tensor that is cut otherwise. A collective of all ranks.

    Args:
        data (`torch.Tensor`):
            This rank's piece of the tensor as it is cut, without padding.
        numel (`int`), cut (`TensorRange`):
            Number of elements of the tensor, and its cut.
        part (`TensorRange`):
            Range to send, of other pieces, one per rank; it may be the whole tensor.
        into (`torch.Tensor`):
            Memory for this rank's part of the range; its padding is left as it is.
    """
    rank = dist.get_rank()
    pieces = part.intervals(numel)
    old_pieces = cut.intervals(numel)
    first, _ = own = old_pieces[rank]
    sent = [data[start - first : end - first] for start, end in overlaps(own, pieces)]
    received = [(end - start) * into.itemsize for start, end in overlaps(pieces[rank], old_pieces)]
    # bytes, because not every backend has every dtype
    target = into.view(torch.uint8)[: sum(received)]
    source = joined(sent, into.dtype, into.device).view(torch.uint8)
    dist.all_to_all_single(
        target, source, received, [piece.numel() * into.itemsize for piece in sent]
    )
