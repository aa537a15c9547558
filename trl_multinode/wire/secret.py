"""Secret of a pool: what the processes of a run on several nodes prove to each other before they talk."""

import hmac
import os
import stat

from ..errors import ConfigurationError

SECRET = "TRL_MULTINODE_SECRET"  # noqa: S105 - the name of a variable
SECRET_FILE = "TRL_MULTINODE_SECRET_FILE"  # noqa: S105
MIN_BYTES = 16
CURE = "Make one with `(umask 077; head -c 32 /dev/urandom | base64 > FILE)`, and copy it to every node."


class Secret:
    """Key that all processes of a pool have. No text shows it.

    Args:
        key (`bytes`):
            Secret bytes, 16 at least.
    """

    def __init__(self, key: bytes):
        self._key = key

    def proof(self, direction: bytes, content: bytes) -> bytes:
        """Return the HMAC-SHA256 of a content that goes in a direction, a label of four bytes."""
        return hmac.digest(self._key, direction + content, "sha256")

    def proves(self, proof: bytes, direction: bytes, content: bytes) -> bool:
        """Return whether a proof is that of the content; the time that it takes says nothing."""
        return hmac.compare_digest(self.proof(direction, content), proof)


def pool_secret() -> Secret:
    """Return the secret from the file that `TRL_MULTINODE_SECRET_FILE` names, or else from `TRL_MULTINODE_SECRET`.

    White space around it does not count.

    Raises:
        `ConfigurationError`: if there is none, if it is shorter than 16 bytes, or if another user could have read or
            written the file.
    """
    path = os.environ.get(SECRET_FILE)
    setting = SECRET_FILE if path else SECRET
    key = (_private_content(path) if path else os.fsencode(os.environ.get(SECRET, ""))).strip()
    if len(key) < MIN_BYTES:
        raise ConfigurationError(
            f"The secret of `{setting}` has {len(key)} bytes, expected at least {MIN_BYTES}.",
            setting=setting,
            got=len(key),
            expected=MIN_BYTES,
            cure=CURE,
        )
    return Secret(key)


def _private_content(path: str) -> bytes:
    """Return the content of a file that only this user can read."""
    try:
        file = open(path, "rb", opener=_open_plainly)
    except OSError as error:
        raise _refusal(path, f"cannot be opened ({error.strerror})") from None
    with file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise _refusal(path, "is no regular file")
        if found.st_uid != os.geteuid():
            raise _refusal(path, f"belongs to user {found.st_uid}")
        if found.st_mode & 0o077:
            raise _refusal(path, f"is open to other users (mode {stat.S_IMODE(found.st_mode):04o})")
        return file.read()


def _open_plainly(path: str, flags: int) -> int:
    """Open a file that is no link, which may lead to another user's, and do not wait for the writer of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _refusal(path: str, fault: str) -> ConfigurationError:
    return ConfigurationError(
        f"The file of the secret, {path}, {fault}.",
        setting=SECRET_FILE,
        got=fault,
        expected="a regular file of this user with mode 0600",
        cure=CURE,
    )
