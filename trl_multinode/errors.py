"""Every error this library raises on purpose.

    MultiNodeError (RuntimeError)
    ├── ConfigurationError (also ValueError)   found before a weights file is opened
    ├── EngineError
    │   ├── EngineStartError                   did not come up, or not in time
    │   ├── EngineDiedError                    a process of the engine ended
    │   ├── EngineStalledError                 no token for `engine_stall_timeout` seconds
    │   ├── EngineRefusedError                 a request that the engine cannot serve
    │   └── PromptTooLongError (also ValueError)
    ├── WeightSyncError                        an update failed; the engine must not serve
    │   ├── WeightVersionError                 a reply was made with other weights than expected
    │   └── LogprobDivergenceError             engine and trainer disagree: some weights are stale
    ├── SavedWeightsError                      saved weights are not the trained model; nothing is pushed
    ├── HubPushError                           a push failed; raised if `hub_push_must_succeed`
    └── PeerFailureError                       another rank, launcher or node failed first

A message says where (node, rank), what (got, expected) and the cure (the setting or command).
"""


class MultiNodeError(RuntimeError):
    """Base of all errors below."""


class ConfigurationError(MultiNodeError, ValueError):
    """A setting, or the way the run was launched, cannot work."""


class EngineError(MultiNodeError):
    """Something is wrong with an engine of this node."""


class EngineStartError(EngineError):
    """The engine did not come up, or not within `engine_start_timeout`."""


class EngineDiedError(EngineError):
    """The engine, or one of vLLM's own processes in it, ended."""


class EngineStalledError(EngineError):
    """The engine is alive but made no token for `engine_stall_timeout` seconds while it had work."""


class EngineRefusedError(EngineError):
    """The engine understood the request and cannot serve it."""


class PromptTooLongError(EngineError, ValueError):
    """A prompt leaves no room for a completion in the engine's context."""


class WeightSyncError(MultiNodeError):
    """A weight update failed half-way: the engine holds mixed weights and must not serve."""


class WeightVersionError(WeightSyncError):
    """A reply was made with other weights than the trainer has."""


class LogprobDivergenceError(WeightSyncError):
    """The engine's log-probs and the trainer's disagree by more than sampling noise: some weights are stale."""


class SavedWeightsError(MultiNodeError):
    """The weights in a folder are not the trained model: keys, shapes, types or bytes are wrong."""


class HubPushError(MultiNodeError):
    """The Hub did not take a push, or a repository could not be created; what was saved is untouched."""


class PeerFailureError(MultiNodeError):
    """Another rank, a launcher or a node failed first."""
