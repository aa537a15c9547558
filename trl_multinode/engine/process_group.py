"""A process group beside the training ranks': one sender and the workers of its node's engines."""

from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from typing import Any

import torch.distributed as dist

SELF_TEST_S = 30.0  # for everything that a transport does the first time


def pair_group(backend: str, store: str, rank: int, size: int, timeout_s: float) -> Any:
    """Join the group; blocks until all have come.

    Not `init_process_group`: the caller has, or is about to get, a default group of its own, to which this one must
    not belong.

    Args:
        backend (`str`):
            `"nccl"`, or `"gloo"` on the loopback interface.
        store (`str`):
            A file in a private folder, by which the processes find each other.
        rank (`int`), size (`int`):
            In this group; 0 sends.
        timeout_s (`float`):
            For joining, and for every collective of the group.

    Raises:
        `RuntimeError`: (torch's) if somebody did not come in time.
    """
    timeout = timedelta(seconds=timeout_s)
    file_store = dist.FileStore(store, size)
    file_store.set_timeout(timeout)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(file_store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]  # nothing listens beyond the node
    options._timeout = timeout
    return dist.ProcessGroupGloo(file_store, rank, size, options)


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """`call()`, in a thread that is left behind if it has not ended in time: NCCL may block without a limit.

    Raises:
        `TimeoutError`: then.
    """
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.extend((call(), None))
        except Exception as error:
            outcome.extend((None, error))

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"not done after {seconds:.0f} s")
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
