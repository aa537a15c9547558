"""CPU cores of engines: those of the launcher, and not those to which a rank is bound.

A process inherits the cores of the thread that starts it. `accelerate launch --enable_cpu_affinity` binds each rank to
the cores beside its GPU when its `Accelerator` is made, and `torchrun --numa-binding` starts ranks through numactl.
Their launcher keeps all cores of the task, as SLURM or the container set them. An engine has another GPU than rank 0,
often beside other cores, and serves all ranks of the node.
"""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from ..run.limits import launchers


def engine_cores(launched: bool) -> set[int]:
    """Return the cores that an engine of this rank's node may use: the launcher's, or the rank's own if it has more.

    Args:
        launched (`bool`):
            Whether a launcher has started this process.
    """
    found = os.sched_getaffinity(os.getpid())
    for pid in launchers()[-1:] if launched else ():
        with suppress(OSError):  # it has ended
            found = max(os.sched_getaffinity(pid), found, key=len)
    return found


@contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """Give these cores to the processes that this thread starts inside, as far as the system allows it.

    Args:
        cores (`Collection[int]`):
            Cores; without any nothing changes.
    """
    before = os.sched_getaffinity(0)
    with suppress(OSError):  # none of them is in this container's set
        os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
