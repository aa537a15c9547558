"""All errors that this library raises on purpose.

    MultiNodeError (RuntimeError)
    ├── ConfigurationError (also ValueError)   found before a weights file is opened
    ├── EngineError
    │   ├── EngineStartError                   did not start, or was not ready in time
    │   ├── EngineDiedError                    a process of the engine ended
    │   ├── EngineStalledError                 no token for `engine_stall_timeout` seconds while it had work
    │   ├── EngineLeavingError                 it takes no new rows; handled inside, another engine gets them
    │   ├── EngineRefusedError                 a request that the engine cannot serve
    │   └── PromptTooLongError (also ValueError)
    ├── WeightSyncError                        an update failed; the engine must not serve
    │   ├── WeightVersionError                 a reply came from other weights than expected
    │   └── LogprobDivergenceError             log-probs of engine and trainer differ or are NaN
    ├── WeightsNotFiniteError                  a weight is NaN or infinite; found before a sync or a save
    ├── RolloutError                           a tool, an environment or a `rollout_func` failed, or nothing to learn
    ├── RehearsalError                         the longest rows do not fit in memory; found before step 1
    ├── SavedWeightsError                      saved weights are not the trained model; nothing is pushed
    ├── DiskError                          a disk is full or read-only
    ├── HubPushError                           a push failed; raised if `hub_push_must_succeed`
    └── PeerFailureError                       another rank, launcher or node failed first

Every message names the place (node, rank), the fault (got, expected) and the cure (the setting or command).
"""

from typing import Any


class MultiNodeError(RuntimeError):
    """Base class of all errors below."""


class ConfigurationError(MultiNodeError, ValueError):
    """
    The run cannot work with one of its settings, or with the way it was launched.

    Args:
        problem (`str`):
            Sentence about the fault. The message is this sentence with the place before it and the cure behind it.
        setting (`str`, *optional*):
            Name of the setting, argument, variable, data set or package at fault.
        got (*optional*), expected (*optional*):
            Value that was found, and the one that would work.
        cure (`str`, *optional*):
            Setting or command that works.
        node (`int`, *optional*), rank (`int`, *optional*):
            Place of the fault, if other nodes or ranks do not have it.
    """

    def __init__(
        self,
        problem: str,
        *,
        setting: str = "",
        got: Any = None,
        expected: Any = None,
        cure: str = "",
        node: int | None = None,
        rank: int | None = None,
    ):
        numbers = {"node": node, "rank": rank}
        place = ", ".join(
            f"{name} {number}" for name, number in numbers.items() if number is not None
        )
        super().__init__(" ".join(filter(None, [f"{place}:" if place else "", problem, cure])))
        self.setting, self.got, self.expected, self.cure = setting, got, expected, cure
        self.node, self.rank = node, rank


class EngineError(MultiNodeError):
    """An engine of this node failed or is not available."""


class EngineStartError(EngineError):
    """The engine did not start, or was not ready within `engine_start_timeout`."""


class EngineDiedError(EngineError):
    """The engine, or one of the vLLM processes it started, ended."""


class EngineStalledError(EngineError):
    """The engine is alive but generated no token for `engine_stall_timeout` seconds while it had work."""


class EngineLeavingError(EngineError):
    """The engine leaves the run and takes no new rows; the rank sends them to another one."""


class EngineRefusedError(EngineError):
    """The engine received a request that it cannot serve."""


class PromptTooLongError(EngineError, ValueError):
    """A prompt leaves no room for a completion in the engine's context."""


class WeightSyncError(MultiNodeError):
    """A weight update failed half-way, so the engine holds mixed weights and must not serve."""


class WeightVersionError(WeightSyncError):
    """A reply came from other weights than the trainer expected."""


class LogprobDivergenceError(WeightSyncError):
    """Log-probs of engine and trainer differ by more than sampling noise, or too many of them are NaN."""


class WeightsNotFiniteError(MultiNodeError):
    """A trained weight is NaN or infinite. The sync or the save that found it has not begun."""


class RolloutError(MultiNodeError):
    """A tool, an environment or a `rollout_func` failed with what TRL does not give to the model as an answer, or no
    rollout of a round has anything to teach."""


class RehearsalError(MultiNodeError):
    """The longest rows that the settings allow do not fit in memory. Training has not begun."""


class SavedWeightsError(MultiNodeError):
    """The weights in a folder are not the trained model: keys, shapes, dtypes or bytes are wrong."""


class DiskError(MultiNodeError):
    """A file could not be written, because a disk is full or read-only. Finished checkpoints are whole."""


class HubPushError(MultiNodeError):
    """A push to the Hub failed, or a repository could not be created; the saved files are untouched."""


class PeerFailureError(MultiNodeError):
    """Another rank, a launcher or a node failed first."""
