"""Secret of a pool: what the processes of a run on several nodes prove to each other before they talk."""

import hmac
import os
import stat

from ..errors import ConfigurationError

SECRET = "TRL_MULTINODE_SECRET"  # noqa: S105 - the name of a variable
SECRET_FILE = "TRL_MULTINODE_SECRET_FILE"  # noqa: S105
MIN_BYTES = 16


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
        `ConfigurationError`: if there is none, if it is shorter than 16 bytes, or if the file is a link, no regular
            file, another user's, or open to others.
    """
    path = os.environ.get(SECRET_FILE)
    try:
        key = _private_content(path) if path else os.fsencode(os.environ.get(SECRET, ""))
        key = key.strip()
        if len(key) < MIN_BYTES:
            raise PermissionError(f"it has {len(key)} bytes")
    except OSError as error:
        setting = SECRET_FILE if path else SECRET
        raise ConfigurationError(
            f"The secret of the run's nodes, `{setting}`, cannot be used: {error}.",
            setting=setting,
            got=str(error),
            expected=f"{MIN_BYTES} bytes or more, in a regular file of this user with mode 0600",
            cure="Make one with `(umask 077; head -c 32 /dev/urandom | base64 > FILE)`, copy it to every node, and "
            f"set `{SECRET_FILE}` to its path.",
        ) from None
    return Secret(key)


def _private_content(path: str) -> bytes:
    with open(path, "rb", opener=_open_plainly) as file:
        found = os.fstat(file.fileno())
        is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        if not is_own or found.st_mode & 0o077:
            raise PermissionError(
                f"{path} has mode {stat.filemode(found.st_mode)} and belongs to user {found.st_uid}"
            )
        return file.read()


def _open_plainly(path: str, flags: int) -> int:
    """Open a file that is no link, which may lead to another user's, and do not wait for the writer of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
