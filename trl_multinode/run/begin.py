"""First acts of a trainer on its node: a folder that can be written, its owner, the ending file."""

import errno
from collections.abc import Callable
from pathlib import Path

from ..errors import ConfigurationError
from .owner import claim
from .reporter import warn
from .watch.watchdog import Watchdog

FULL = {errno.ENOSPC, errno.EDQUOT}


def begin_run(
    watch: Watchdog, folder: Path, step: Callable[[], int], start_timeout_s: float
) -> None:
    """Check and claim `output_dir`, before anything large is loaded. Every rank calls it.

    Args:
        watch ([`Watchdog`]):
            Watch of this trainer.
        folder (`Path`):
            Folder of this library's files in `output_dir`.
        step (`Callable[[], int]`):
            Function that returns the optimizer steps done.
        start_timeout_s (`float`):
            Limit for ranks that have not imported this library.

    Raises:
        `ConfigurationError` or `OSError`: if the folder cannot be written on this node, or belongs to another run.
    """
    topology = watch.topology
    watch.of_process.arrivals.limit_s = start_timeout_s
    if topology.is_local_main:
        check_writable(folder, topology.node)
        watch.ending.begin(folder)
    watch.ending.phase, watch.ending.step = watch.phase, step
    if topology.rank == 0:
        watch.closings.append(claim(folder, watch.report).release)


def check_writable(folder: Path, node: int) -> None:
    """Check that files can be made in a folder, which is made if it is missing. A full disk is only a warning here.

    Raises:
        `ConfigurationError`: if it cannot be made or written.
        `OSError`: the same on a read-only file system.
    """
    probe = folder / f"probe-node{node}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = error.strerror or error
        text = f"node {node} cannot write to `output_dir` {folder.parent}: {reason}"
        if error.errno in FULL:
            warn(
                f"{text}. The run goes on, and fails at its first checkpoint unless space is freed."
            )
            return
        cure = "Mount it writable on every node, or use another `output_dir`."
        if error.errno == errno.EROFS:
            raise OSError(errno.EROFS, f"{text}. {cure}") from error
        raise ConfigurationError(
            f"{text}.", setting="output_dir", got=folder.parent, cure=cure
        ) from error
