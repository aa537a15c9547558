"""Exit codes of a rank. All ranks of a run that failed leave with the code of the first failure.

`accelerate launch` and torchrun turn every one of them into 1, so a node's local main process also writes its code
into `_multinode/ending-node<k>.json`.
"""

from ..errors import ConfigurationError, DiskError, EngineError, HubPushError, PeerFailureError

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
)


def code_of(error: BaseException) -> int:
    """Return the exit code of an error of this library; `OTHER` for any other error."""
    return next((code for kind, code in _OF_ERRORS if isinstance(error, kind)), OTHER)
