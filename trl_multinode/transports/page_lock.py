"""Page-locked host memory, in a rank and in vLLM's workers: a GPU copies such memory at the speed of its bus."""

import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch

from ..errors import WeightSyncError

ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered


class PageLock:
    """Registration of host memory with CUDA.

    Every process that maps a staging slot registers its own mapping: the sender for its device-to-host copies, each
    worker for its host-to-device copies. A copy from unregistered memory goes through CUDA's own small buffers
    (calculated for 32B parameters: 7 s per sync instead of 2 s). Some containers forbid page-locking. That costs only
    speed, because the copies give the same bytes, so callers log a warning and continue.

    CUDA keeps the registration of memory that is unmapped without being unregistered, and a copy to whatever is mapped
    at its address next moves no byte and reports no error (seen on an H100). So a lock keeps its memory, unregisters
    it at the latest when nobody holds the lock any more, and first ends a registration that it finds there.

    Args:
        memory (`Sequence[torch.Tensor]`):
            Contiguous host tensors.

    Attributes:
        failure (`str`, *optional*):
            Reason why nothing is locked; `None` if everything is.
        release (`Callable[[], None]`):
            Function that unregisters the memory. A second call does nothing.

    Raises:
        `WeightSyncError`: if memory that is mapped no more is still registered at one of these addresses.
    """

    def __init__(self, memory: Sequence[torch.Tensor]):
        self.failure: str | None = None
        locked: list[torch.Tensor] = []
        self.release = weakref.finalize(self, _unregister, locked)
        for tensor in memory:
            code = _register(tensor)
            if code != 0:
                self.release()
                self.failure = (
                    f"CUDA error {code} for {tensor.nbytes / 2**20:.0f} MiB of host memory"
                )
                if code == ALREADY_REGISTERED:
                    raise WeightSyncError(
                        f"{self.failure}: other code of this process unmapped memory here that is still registered, "
                        "so copies would be lost. Set `weight_transport='ipc'`, or find the call of cudaHostRegister."
                    )
                return
            locked.append(tensor)


def _register(tensor: torch.Tensor, again: bool = True) -> int:
    """Register the memory of a tensor; return CUDA's error code."""
    runtime = torch.cuda.cudart()
    pointer = tensor.data_ptr()
    code = int(runtime.cudaHostRegister(pointer, tensor.nbytes, 0))
    if code != 0:
        _forget_last_error()
    if code == ALREADY_REGISTERED and again and int(runtime.cudaHostUnregister(pointer)) == 0:
        return _register(tensor, again=False)
    return code


def _unregister(locked: list[torch.Tensor]) -> None:
    while locked:
        torch.cuda.cudart().cudaHostUnregister(locked[-1].data_ptr())
        locked.pop()


def _forget_last_error() -> None:
    """Launch a kernel to clear a failed call's error code, which torch would otherwise raise at a later launch."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda").add_(1)
