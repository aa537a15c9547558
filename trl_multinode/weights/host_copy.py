"""Copy of the last sent weights in the memory of a local main process, for engines that are started again."""

from collections.abc import Callable, Sequence

import torch

from ..transports.pieces import Pieces, view_of
from ..wire.messages import TensorSpec, WeightVersion


class HostCopy:
    """Buckets as the engines of a node got them last, in their dtype, with an adapter merged or beside the rest.

    A bucket with frozen weights stays as the first update sent it, so the copy holds all that a new engine needs. The
    memory is private and not page-locked; it is taken bucket by bucket, during the first update.

    Args:
        report (`Callable[[str], None]`):
            Function that prints a line of progress.

    Attributes:
        version ([`WeightVersion`], *optional*):
            Version of all buckets together; `None` before the end of the first update.
    """

    def __init__(self, report: Callable[[str], None]):
        self.version: WeightVersion | None = None
        self._report = report
        self._buckets: dict[int, torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        return sum(bucket.numel() for bucket in self._buckets.values())

    def keep(self, index: int, data: torch.Tensor) -> None:
        """Copy bucket `index` from the bytes of its slot, in any memory."""
        if index not in self._buckets:
            self._buckets[index] = torch.empty(data.shape, dtype=data.dtype)
        self._buckets[index].copy_(data)

    def complete(self, version: WeightVersion) -> None:
        """Mark the copy as the weights of `version`, at the end of its update."""
        if self.version is None:
            self._report(
                f"`engine_restart_copy` holds {self.num_bytes / 2**20:.1f} MiB of weights in the memory of this node"
            )
        self.version = version

    def tensors(self, index: int, layout: Sequence[TensorSpec]) -> list[Pieces]:
        """Return the tensors of bucket `index`, as views of the copy."""
        data = self._buckets[index]
        return [Pieces.whole(view_of(data, spec).view(spec.shape_in_slot)) for spec in layout]
