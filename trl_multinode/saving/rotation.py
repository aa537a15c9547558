"""Files of checkpoints on disk: synced before a checkpoint counts as finished, renamed before one is deleted.

transformers deletes old checkpoints while it saves a new one, and in place. A run killed there would leave a new
checkpoint that is not marked as finished yet, and an old one with some of its files.
"""

import errno
import os
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from ..run.reporter import warn

DELETING = "deleting-"
# files that each rank writes for itself
OF_A_RANK = re.compile(r"(?:zero_pp_rank_|rollouts_rank|rng_state_)(\d+)")
# of file systems that have no such call
CANNOT_SYNC = (
    errno.EINVAL,
    errno.ENOTSUP,
    errno.ENOSYS,
    errno.EBADF,
)


# ---- sync to disk ---------------------------------------------------------------------------------------------------


def sync_tree(folder: Path) -> None:
    """Write every file and folder below `folder`, and its own entry, to disk.

    Every rank calls it after its own files are complete; a rank cannot tell them from those of the other ranks. A file
    without unwritten pages costs only the call.
    """
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(parent, name))
        sync(Path(parent))
    sync(folder.parent)


def sync(path: Path) -> None:
    """Write one file or folder to disk; a missing one is ignored, because other ranks rename their temporary files."""
    try:
        number = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in CANNOT_SYNC:
            error.filename = str(path)
            raise
    finally:
        os.close(number)


# ---- deletion -------------------------------------------------------------------------------------------------------


def delete(folders: Iterable[Path], trash: Path) -> None:
    """Move folders to `trash` under another name, and then delete everything there that has such a name.

    The rename is one operation: no folder ever has the name of a checkpoint and only some of its files. `trash` is a
    folder that Hub pushes exclude. A folder that cannot be moved stays as it is, with a warning.
    """
    for folder in folders:
        try:
            folder.rename(trash / f"{DELETING}{folder.name}-{time.time_ns()}")
        except FileNotFoundError:
            pass  # another node that shares the folder was faster
        except OSError as error:
            warn(f"{folder} cannot be deleted, and stays beside the newer checkpoints: {error}.")
        sync(folder.parent)
    sync(trash)
    delete_leftovers(trash)


def delete_leftovers(trash: Path) -> None:
    """Delete what a run was deleting when it ended."""
    for folder in trash.glob(f"{DELETING}*"):
        shutil.rmtree(folder, ignore_errors=True)


def by_age(folders: list[Path]) -> list[Path]:
    """Sort checkpoints, given by step, from old to new as transformers does: by time, unless all are about equal."""
    times = {folder: _modified(folder) for folder in folders}
    if times and max(times.values()) - min(times.values()) < 1:  # file systems that keep no times
        return folders
    return sorted(folders, key=lambda folder: times[folder])


def step_of(folder: Path) -> int:
    """Return the optimizer step in the name of a checkpoint."""
    return int(folder.name.rpartition("-")[2])


def _modified(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:  # another node that shares the folder has just moved it
        return 0.0


def delete_files_of_other_launches(folder: Path, ranks: int, with_zero: bool) -> None:
    """Delete what no rank of this launch will write again in a checkpoint folder: files of higher ranks, ZeRO states.

    They would make the checkpoint look like one of the earlier launch. Ranks of this launch may be writing already.
    """
    for parent, _, files in os.walk(folder):
        for name in files:
            if (found := OF_A_RANK.search(name)) and int(found[1]) >= ranks:
                Path(parent, name).unlink(missing_ok=True)
    if not with_zero:
        for states in folder.glob("global_step*"):
            shutil.rmtree(states, ignore_errors=True)
        (folder / "latest").unlink(missing_ok=True)
