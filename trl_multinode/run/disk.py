"""Name a full disk: the path and the free bytes, where another library reports neither.

The `OSError` of a write has no path. torch reports a full disk as "enforce fail ... unexpected pos 128 vs 0", and
safetensors in Rust's words. So the file systems to which a run writes are looked at after such an error.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import DiskError
from .endings.error_text import described, text_of_error

OF_A_DISK = {errno.ENOSPC: "full", errno.EDQUOT: "full (quota)", errno.EROFS: "read-only"}
# without an errno, in another error's text
CLEAR = (
    "No space left on device",
    "StorageFull",
    "Disk quota exceeded",
)
# of torch's writer, whatever the reason
VAGUE = (
    "inline_container",
    "PytorchStreamWriter",
    "iostream error",
)
# bytes; a file that did not fit may have been removed, or was larger than the rest
NEARLY_FULL = 16 * 2**20


def as_disk_error(error: BaseException, folders: Mapping[str, Path]) -> BaseException:
    """Return a [`DiskError`] in the place of an error whose cause is a full or read-only disk, else `error` itself.

    Args:
        error (`BaseException`):
            Error of the script or of a library.
        folders (`Mapping[str, Path]`):
            Folders to which the run writes, by the setting or variable that names them.
    """
    if isinstance(error, DiskError):
        return error
    each: BaseException | None = error
    while each is not None:
        if state := _state_of_disk(each):
            return _named(error, state, _file_of(each) or _nearly_full(folders) or folders)
        if _says(each, VAGUE) and (full := _nearly_full(folders)):
            return _named(error, "full", full)
        each = each.__cause__ or each.__context__
    return error


def _state_of_disk(error: BaseException) -> str:
    """Return what an error says of the disk; an empty text if it says nothing."""
    if isinstance(error, OSError) and error.errno in OF_A_DISK:
        return OF_A_DISK[error.errno]
    return "full" if _says(error, CLEAR) else ""


def _says(error: BaseException, words: Sequence[str]) -> bool:
    text = text_of_error(error)
    return any(word in text for word in words)


def _named(error: BaseException, state: str, paths: Mapping[str, Path]) -> DiskError:
    """Return the error for a disk on which these paths are, by the settings that name them."""
    where = "; ".join(
        f"{path}{setting and f' ({setting})'}, {_free(path)} bytes free"
        for setting, path in paths.items()
    )
    return DiskError(
        f"A file could not be written, because the disk is {state}: {where} ({described(error)}). Free "
        "some space, or choose another folder, and launch again; older checkpoints are whole."
    )


def _file_of(error: BaseException) -> dict[str, Path]:
    """Return the path that an `OSError` names, which belongs to no setting."""
    name = getattr(error, "filename", None)
    return {"": Path(os.fsdecode(name))} if isinstance(name, str | bytes) else {}


def _nearly_full(folders: Mapping[str, Path]) -> dict[str, Path]:
    found = {}
    for setting, path in folders.items():
        free = _free(path)
        if free is not None and free < NEARLY_FULL:
            found[setting] = path
    return found


def _free(path: Path) -> int | None:
    """Return the bytes that are free for this user at the path or above it; `None` if that is unknown."""
    for place in (path, *path.absolute().parents):
        try:
            return shutil.disk_usage(place).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def written_folders(output_dir: str) -> dict[str, Path]:
    """Return the folders to which every run writes."""
    return {
        "`output_dir`": Path(output_dir),
        "TMPDIR": Path(tempfile.gettempdir()),
        "shared memory": Path("/dev/shm"),
    }
