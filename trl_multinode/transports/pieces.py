"""A gathered tensor, as the weight source hands it to a slot."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Pieces:
    """A gathered tensor as the pieces of its ranks, or as one piece if it was not sharded."""

    data: torch.Tensor  # (nodes, ranks of a node, elements); empty on ranks that are not local main processes
    shape: tuple[int, ...]  # shape of the full tensor

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

    def full(self) -> torch.Tensor:
        """Return the whole tensor, on the device and in the dtype of the pieces."""
        if self.data.shape[:2] == (1, 1):
            return self.data.view(self.shape)
        tensor = torch.empty(math.prod(self.shape), dtype=self.data.dtype, device=self.data.device)
        self.copy_to(tensor)
        return tensor.view(self.shape)
