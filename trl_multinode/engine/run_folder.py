"""Private folder of a run on one node."""

import os
import stat
import tempfile
from pathlib import Path

from ..errors import EngineError, EngineStartError
from ..wire.leftovers import OWNER_LOCK, PREFIX, remove_folder
from ..wire.locks import hold, release

MAX_SOCKET_PATH = 107  # bytes, the kernel's limit
UUID_LENGTH = 36  # vLLM gives its sockets such names
# descriptors for the removal, in a process that has none left: a leak is a usual way to end
RESERVED = 8


class RunFolder:
    """Private folder (0700) of this node and run: sockets, specs, pid reports, the engine's config-only model.

    The owner holds the lock of a file in it, and deletes it with `remove()`. If the owner was killed, the engines
    remove their sockets, and the last engine deletes the folder; if they were killed too, the next start does
    ([`remove_leftovers`]).
    """

    def __init__(self, node: int):
        prefix = f"{PREFIX}{node}_"
        path = _short_folder(prefix) or _short_folder(prefix, "/tmp")
        if path is None:
            folder = tempfile.gettempdir()
            raise EngineStartError(
                f"Node {node}: the temporary folder {folder} is too long for a unix socket "
                f"({len(folder)} characters, limit 44), and /tmp cannot be written. Set TMPDIR to a shorter one."
            )
        self.path = path
        hold(self.path / OWNER_LOCK)
        self._reserve = [os.open(os.devnull, os.O_RDONLY) for _ in range(RESERVED)]

    def remove(self) -> None:
        while self._reserve:
            os.close(self._reserve.pop())
        remove_folder(self.path)
        release(self.path / OWNER_LOCK)


def check_exists(folder: Path, node: int) -> None:
    """Raise `EngineStartError` if something has removed the folder, in which an engine is to be started again."""
    if not folder.is_dir():
        raise EngineStartError(
            f"Node {node}: {folder}, the private folder of this run, is gone, so its engines cannot be started "
            f"again. Exclude `{PREFIX}*` from the cleaner of temporary files, or set TMPDIR to another folder."
        )


def check_private(folder: Path) -> None:
    """Check a folder that the store names, because whoever reaches the store can write there.

    Raises:
        `EngineError`: if it is no folder of this user to which nobody else has access.
    """
    try:
        found = folder.lstat()
    except OSError as error:
        raise EngineError(
            f"The run's folder {folder} cannot be opened ({error}). Was it removed?"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise EngineError(
            f"The store of the run names {folder} as the folder of this node's engines, which is no private folder "
            "(0700) of this user. Start all ranks of a node as one user, and look who else can reach the store."
        )


def _short_folder(prefix: str, parent: str | None = None) -> Path | None:
    """Return a new folder that has room for a socket of vLLM, or `None` if `parent` is too long or read-only."""
    try:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    except OSError:
        if parent is None:
            raise
        return None
    if len(str(path)) + 1 + UUID_LENGTH <= MAX_SOCKET_PATH:
        return path
    path.rmdir()
    return None
