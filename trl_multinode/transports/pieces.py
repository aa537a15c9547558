"""A gathered tensor or range, as the weight source hands it to a slot, and a tensor as a worker joins its ranges."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..wire.messages import TensorRange, TensorSpec


def view_of(slot: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return the elements of a tensor or range in its slot, flat and in its dtype."""
    return slot[spec.offset : spec.end].view(getattr(torch, spec.dtype))


@dataclass(frozen=True)
class Pieces:
    """A gathered tensor, or a range of one, as the pieces of its ranks, or as one piece if it was not sharded."""

    # (nodes, ranks of a node, elements); empty on ranks that are not local main processes
    data: torch.Tensor
    shape: tuple[int, ...]  # shape of the full tensor, or the length of a range

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> "Pieces":
        return cls(tensor.detach().reshape(1, 1, -1), tuple(tensor.shape))

    def copy_to(self, target: torch.Tensor) -> None:
        """
        Copy the tensor into `target` (flat and contiguous), without the padding and cast to the dtype of `target`.

        Copies from a GPU are asynchronous on the current stream, because hundreds of small ones would otherwise wait
        for each other (10 us each). The caller must synchronize before it reads `target` on the host.
        """
        nodes, ranks, elements = self.data.shape
        if nodes * ranks == 1 or target.numel() == 0:
            target.copy_(self.data.reshape(-1)[: target.numel()], non_blocking=True)
            return
        full_nodes = target.numel() // (ranks * elements)
        if full_nodes:
            done = full_nodes * ranks * elements
            whole = target[:done].view(full_nodes, ranks, elements)
            whole.copy_(self.data[:full_nodes], non_blocking=True)
        for piece in range(full_nodes * ranks, math.ceil(target.numel() / elements)):
            part = target[piece * elements : (piece + 1) * elements]
            part.copy_(self.data[piece // ranks, piece % ranks, : part.numel()], non_blocking=True)

    def copy(self) -> torch.Tensor:
        """Return a copy of the whole tensor, on the device and in the dtype of the pieces."""
        tensor = torch.empty(math.prod(self.shape), dtype=self.data.dtype, device=self.data.device)
        self.copy_to(tensor)
        return tensor.view(self.shape)


def joined(parts: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return flat tensors one after the other, cast as they are copied; a cast after `torch.cat` would copy twice."""
    whole = torch.empty(sum(part.numel() for part in parts), dtype=dtype, device=device)
    for target, part in zip(whole.split([part.numel() for part in parts]), parts, strict=True):
        target.copy_(part)
    return whole


class GrowingTensor:
    """The tensor whose ranges a worker receives now; one at a time, because they follow each other.

    The first range of a tensor drops what an update that failed has left.

    Args:
        device (`torch.device`):
            Device of the tensor.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._name = ""
        self._next = 0
        self._padded: torch.Tensor | None = None  # (pieces, elements)

    def add(self, spec: TensorSpec, part: TensorRange, data: torch.Tensor) -> torch.Tensor | None:
        """Copy a range into the tensor; return the whole tensor, of `spec.shape`, with its last range.

        Args:
            spec (`TensorSpec`), part (`TensorRange`):
                The tensor, and its range that `data` holds.
            data (`torch.Tensor` of shape `(part.count(...),)`):
                Elements of the range, piece by piece, without padding.

        Raises:
            `RuntimeError`: if it is not the range that was due.
        """
        if part.is_first:
            self.drop()
            self._padded = torch.empty(
                part.pieces, part.elements, dtype=data.dtype, device=self._device
            )
            self._name = spec.name
            self._next = 0
        if self._padded is None or (self._name, self._next) != (spec.name, part.first):
            raise RuntimeError(
                f"The range of {spec.name} from element {part.first} of each piece came, expected that of "
                f"{self._name or 'no tensor'} from {self._next}."
            )
        self._next = part.end
        self._copy(part, data)
        if not part.is_last:
            return None
        padded = self._padded
        self._padded = None
        return padded.view(-1)[: math.prod(spec.shape)].view(spec.shape)

    def _copy(self, part: TensorRange, data: torch.Tensor) -> None:
        assert self._padded is not None
        length = part.end - part.first
        full, rest = divmod(data.numel(), length)
        self._padded[:full, part.first : part.end].copy_(data[: full * length].view(full, length))
        if rest:  # the padding is in the last piece that has elements, and in those after it
            self._padded[full, part.first : part.first + rest].copy_(data[full * length :])

    def drop(self) -> None:
        """Forget a tensor that is not complete."""
        self._padded = None
