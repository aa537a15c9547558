"""Exit codes of a rank. All ranks of a run that failed leave with the code of the first failure.

`accelerate launch` and torchrun turn every one of them into 1, so a node's local main process also writes its code
into `_multinode/ending-node<k>.json`.
"""

from ...errors import (
    ConfigurationError,
    DiskError,
    EngineDiedError,
    EngineError,
    HubPushError,
    MultiNodeError,
    PeerFailureError,
    RolloutError,
)
from ..disk import OF_A_DISK
from .error_text import text_of_error
from .user_code import is_users

OTHER = 1  # none of the causes below
CONFIGURATION = 3  # a setting, or the way the run was launched
PEER_LOST = 4  # a rank, a launcher or a node ended, or was silent for too long
ENGINE = 5
USER_CODE = 6  # a reward function, a tool or the script
DISK = 7  # full, or read-only
PUSH = 8  # the training is complete and saved, but a push to the Hub failed
PREEMPTED = 143  # 128 + SIGTERM, as shells and batch systems expect

_OF_ERRORS: tuple[tuple[type[BaseException], int], ...] = (
    (ConfigurationError, CONFIGURATION),
    (PeerFailureError, PEER_LOST),
    (EngineError, ENGINE),
    (DiskError, DISK),
    (HubPushError, PUSH),
    (RolloutError, USER_CODE),
    (MultiNodeError, OTHER),
)


def code_of(error: BaseException, has_trainer: bool = True) -> int:
    """Return the exit code of an error.

    Args:
        error (`BaseException`):
            Error with its traceback.
        has_trainer (`bool`, *optional*, defaults to `True`):
            Whether a trainer exists. Before that, every error of no other kind is the script's.
    """
    for kind, code in _OF_ERRORS:
        if isinstance(error, kind):
            return code
    if isinstance(error, KeyboardInterrupt):
        return OTHER
    if isinstance(error, SystemExit) or (has_trainer and is_users(error)):
        return USER_CODE
    if isinstance(error, OSError) and error.errno in OF_A_DISK:
        return DISK
    if is_symptom(error):
        return PEER_LOST
    return OTHER if has_trainer else USER_CODE


def is_symptom(error: BaseException) -> bool:
    """Return whether another process's end caused the error: an engine's end of file, a collective without a peer."""
    if isinstance(error, EngineDiedError | PeerFailureError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = text_of_error(error)
    return any(word in text for word in ("gloo", "NCCL", "Connection"))
