"""One run per `output_dir`: two would mix their checkpoints and delete each other's.

Rank 0 holds a lock on a file in the folder; the kernel releases it with the process. A lock is not seen on other
hosts, so rank 0 also writes `owner.json` every 10 s. A run on another host that finds one waits for 30 s: if the file
changes, another run writes there; if not, its owner is dead.
"""

import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import ConfigurationError
from ..wire.locks import machine
from .endings.ending import write_whole
from .endings.exit_codes import CONFIGURATION
from .reporter import report

REWRITE_EVERY_S = 10.0
TAKEN_OVER_AFTER_S = 30.0
DYING_S = 3.0  # time for the process of an earlier launch to end
POLL_S = 0.2

_owned: dict[Path, "OutputOwner"] = {}  # of this process


def claim(folder: Path, fail: Callable[..., None]) -> "OutputOwner":
    """Claim a folder for this process, whose trainers share the claim.

    Args:
        folder (`Path`):
            Folder of this library's files in `output_dir`; it exists.
        fail (`Callable[..., None]`):
            Function that ends the run later, given a cause and `code`.

    Raises:
        `ConfigurationError`: if another run writes there; the message names its host and pid.
    """
    path = folder.resolve()
    owner = _owned.get(path)
    if owner is None or owner.pid != os.getpid():
        owner = OutputOwner(path, fail)
        owner.claim()
        _owned[path] = owner
    owner.num_trainers += 1
    return owner


class OutputOwner:
    """Claim of this process on a folder. `claim` (the function) has the only one of a folder."""

    def __init__(self, folder: Path, fail: Callable[..., None]):
        self.pid = os.getpid()
        self.num_trainers = 0
        self._folder = folder
        self._fail = fail
        self._file = folder / "owner.json"
        self._token = secrets.token_hex(8)
        self._count = 0
        # not closed before the end: that would release the lock
        self._lock = open(folder / "owner.lock", "wb")
        self._released = threading.Event()

    def claim(self) -> None:
        """Take the lock and write the file, or raise `ConfigurationError`."""
        deadline = time.monotonic() + DYING_S
        while not self._try_lock():
            if time.monotonic() > deadline:
                raise self._refusal(self._read())
            time.sleep(POLL_S)
        try:
            self._wait_for_other_host()
        except BaseException:
            self._lock.close()
            raise
        self._write()
        threading.Thread(target=self._keep, name="owner", daemon=True).start()

    def release(self) -> None:
        """Give the folder up when the last trainer of this process is closed."""
        self.num_trainers -= 1
        if self.num_trainers > 0 or self.pid != os.getpid() or self._released.is_set():
            return
        self._released.set()
        _owned.pop(self._folder, None)
        if self._is_mine(self._read()):
            with suppress(OSError):
                self._file.unlink()
        self._lock.close()

    # ---- the lock, on this host -------------------------------------------------------------------------------------

    def _try_lock(self) -> bool:
        """Return whether no other process of this host holds the lock, or whether the file system has no locks."""
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in (errno.EACCES, errno.EAGAIN)
        return True

    # ---- the file, for other hosts ----------------------------------------------------------------------------------

    def _wait_for_other_host(self) -> None:
        """Wait until the file of a run on another host has not changed for 30 s.

        Raises:
            `ConfigurationError`: if it changes.
        """
        first = self._read()
        # that process is dead, because the lock was free
        if first is None or first.get("boot") == machine():
            return
        report(
            f"{self._folder.parent} belonged to a run on {first.get('host')} (pid {first.get('pid')}) that has not "
            f"ended well: waiting {TAKEN_OVER_AFTER_S:.0f} s to see whether it still runs"
        )
        # counts looks: seconds pass while hosts are suspended
        for _ in range(round(TAKEN_OVER_AFTER_S / POLL_S)):
            time.sleep(POLL_S)
            if (now := self._read()) is None:
                return
            if now != first:
                raise self._refusal(now)

    def _refusal(self, owner: dict[str, Any] | None) -> ConfigurationError:
        host, pid = (owner.get("host"), owner.get("pid")) if owner else ("this host", "unknown")
        return ConfigurationError(
            f"`output_dir` {self._folder.parent} is in use by another run: host {host}, pid {pid}. Two runs "
            "would mix their checkpoints.",
            setting="output_dir",
            got=self._folder.parent,
            cure="Stop that run, or use another `output_dir`.",
        )

    def _read(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def _write(self) -> None:
        self._count += 1
        content = {
            "host": socket.gethostname(), "pid": self.pid, "boot": machine(), "token": self._token,
            "count": self._count,
        }  # fmt: skip
        with suppress(OSError):  # a full disk; the lock still holds
            write_whole(self._file, content)

    def _is_mine(self, content: dict[str, Any] | None) -> bool:
        return content is None or content.get("token") == self._token

    def _keep(self) -> None:
        """Write the file again and again. A run that was suspended for long may find that it lost the folder."""
        while not self._released.wait(REWRITE_EVERY_S):
            if not self._is_mine(found := self._read()):
                self._fail(f"ConfigurationError: {self._refusal(found)}", code=CONFIGURATION)
                return
            self._write()
