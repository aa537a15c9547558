"""Page-locked host memory, in a rank and in vLLM's workers: a GPU copies such memory at the speed of its bus."""

from collections.abc import Sequence
from contextlib import suppress

import torch


class PageLock:
    """Registration of host memory with CUDA.

    Every process that maps a staging slot registers its own mapping: the sender for its device-to-host copies, each
    worker for its host-to-device copies. A copy from unregistered memory goes through CUDA's own small buffers
    (calculated for 32B parameters: 7 s per sync instead of 2 s). Some containers forbid page-locking. That costs only
    speed, because the copies give the same bytes, so callers log a warning and continue.

    Args:
        memory (`Sequence[torch.Tensor]`):
            Contiguous host tensors. They must outlive the lock: memory that is unmapped while it is registered stays
            pinned, and its address cannot be registered again.

    Attributes:
        failure (`str`, *optional*):
            Reason why nothing is locked; `None` if everything is.
    """

    def __init__(self, memory: Sequence[torch.Tensor]):
        self._locked: list[int] = []
        self.failure: str | None = None
        for tensor in memory:
            num_bytes = tensor.numel() * tensor.element_size()
            code = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), num_bytes, 0))
            if code != 0:
                self.release()
                self.failure = f"CUDA error {code} for {num_bytes / 2**20:.0f} MiB of host memory"
                _forget_last_error()
                return
            self._locked.append(tensor.data_ptr())

    def release(self) -> None:
        """Unregister the memory; call it before the memory is unmapped. A second call does nothing."""
        while self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._locked.pop())


def _forget_last_error() -> None:
    """Launch a kernel to clear a failed call's error code, which torch would otherwise raise at a later launch."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda").add_(1)
