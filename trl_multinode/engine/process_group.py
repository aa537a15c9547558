"""Process group of one sender and the workers of its node's engines, separate from the training ranks' group."""

from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from typing import Any

import torch.distributed as dist

SELF_TEST_S = 30.0  # limit for the first transfer of a transport, connecting included


def pair_group(backend: str, store: str, rank: int, size: int, timeout_s: float) -> Any:
    """Join the group. With gloo this blocks until all processes have joined; NCCL connects in the first collective.

    It avoids `init_process_group`, because the caller has, or is about to get, a default group of its own, to which
    this group must not belong.

    Args:
        backend (`str`):
            `"nccl"`, or `"gloo"` on the loopback interface.
        store (`str`):
            Path of a file in a private folder, through which the processes find each other.
        rank (`int`), size (`int`):
            Rank of this process in the group, and size of the group. Rank 0 is the sender.
        timeout_s (`float`):
            Limit for joining, and for every collective of the group.

    Raises:
        `RuntimeError`: (torch's) if a process does not join in time.
    """
    timeout = timedelta(seconds=timeout_s)
    file_store = dist.FileStore(store, size)
    file_store.set_timeout(timeout)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(file_store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]  # no port is open beyond the node
    options._timeout = timeout
    return dist.ProcessGroupGloo(file_store, rank, size, options)


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """Run `call()` in a thread and return its result. A late thread is abandoned, because NCCL may block forever.

    Raises:
        `TimeoutError`: if the call does not end within `seconds`.
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
