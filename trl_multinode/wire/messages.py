"""Protocol between a rank and an engine: length-prefixed msgspec structs on a stream socket.

Token ids and log-probs are raw int32 and float32 buffers: packed arrays cost 0.14 microseconds per token, nested lists
as JSON 5.7 microseconds and 97 bytes. Nothing is pickled. End of file means that the other process has ended.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

# the engines take bucket k-1 from one slot while the sender writes bucket k into the other
NUM_SLOTS = 2
LEVEL = "VLLM_LOGGING_LEVEL"  # environment variable of an engine, for the time of its start
LATER_LEVEL = "TRL_MULTINODE_VLLM_LOGGING_LEVEL"  # level of vLLM's log once the engine has started
# Errors that a failure raises in the rank, by the names of their classes
ErrorName = Literal[
    "EngineError",  # none of the others
    "EngineDiedError",  # a process of the engine ended
    "EngineLeavingError",  # the engine takes no new rows; another one may
    "EngineRefusedError",  # the engine cannot serve the request
    "WeightSyncError",  # the engine's weights are mixed, dummy or of another version
    "WeightVersionError",  # the workers committed another version than the one sent
    # The weights are mixed, because the rank that sent an update ended before the commit. The rank that gets it
    # reports it later than a cause, which is the end of the sender's process.
    "PeerFailureError",
]
# suffixes that only the names of LoRA tensors have
ADAPTER_TENSORS = (
    ".lora_A.weight",
    ".lora_B.weight",
)


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages, with the id of the request that a message belongs to."""

    request_id: int = 0  # chosen by the rank, unique within its connection


class WeightVersion(msgspec.Struct, frozen=True, order=True):
    """Version of the weights. `update` identifies it; `step` is information for the reader of a log."""

    update: int = 0  # number of this weight update in the run, 1 for the first; 0: no update yet
    step: int = 0  # optimizer steps done when the weights were sent

    def __str__(self) -> str:
        return f"update {self.update} (step {self.step})"


class VersionSpan(msgspec.Struct, frozen=True):
    """Consecutive tokens of a completion that the weights of one update sampled."""

    update: int
    step: int  # optimizer steps done when the weights were sent
    end: int  # index after the last of these tokens; the next span starts there, the first one at 0


class TensorRange(msgspec.Struct, frozen=True):
    """Range of a flattened tensor that is larger than a bucket: the same interval of all its equal pieces.

    So every rank of a sharded model contributes as much to each range, and one all-gather of equal parts makes it. The
    padding is at the end of the tensor, so a range without its padding is the first `count` elements of it.
    """

    pieces: int  # into which the tensor is cut, in order: one per training rank
    elements: int  # of every piece, the padding of the last ones included
    first: int  # element of every piece at which the range begins
    end: int  # first element of every piece after the range

    @property
    def is_first(self) -> bool:
        """Return whether no range of the tensor precedes this one."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Return whether the tensor is complete with this range."""
        return self.end == self.elements

    def intervals(self, numel: int) -> list[tuple[int, int]]:
        """Return where the range of each piece begins and ends in a flattened tensor of `numel` elements."""
        starts = range(0, self.pieces * self.elements, self.elements)
        return [(min(start + self.first, numel), min(start + self.end, numel)) for start in starts]

    def count(self, numel: int) -> int:
        """Return how many elements of a tensor of `numel` elements are in the range."""
        return sum(end - first for first, end in self.intervals(numel))


class Parts(msgspec.Struct, frozen=True):
    """Tensors of a checkpoint that transformers holds fused in one: equal parts along a dimension."""

    names: tuple[str, ...]  # in the checkpoint; "*" stands for each index of the first dimension
    dim: int = 0  # dimension that is cut into as many parts as there are names


class TensorSpec(msgspec.Struct, frozen=True):
    """Name, type and position of one tensor, or of a range of it, inside a slot."""

    name: str  # as in the checkpoint
    dtype: str  # as stored in the slot: torch's name without "torch."
    shape: tuple[int, ...]  # full, unsharded
    offset: int  # bytes from the start of the slot
    num_bytes: int  # in the slot
    range: TensorRange | None = None  # `None`: the whole tensor
    parts: Parts | None = None  # of a fused tensor, which no checkpoint holds

    @property
    def end(self) -> int:
        """First byte of the slot after the tensor."""
        return self.offset + self.num_bytes

    @property
    def shape_in_slot(self) -> tuple[int, ...]:
        """Shape of what is in the slot: that of the tensor, or the length of a flat range."""
        return self.shape if self.range is None else (self.range.count(math.prod(self.shape)),)


class Image(msgspec.Struct, frozen=True):
    """Image as raw bytes, with PIL's mode and size."""

    data: bytes
    mode: str
    size: tuple[int, int]  # (width, height) in pixels


class EngineSpec(msgspec.Struct, frozen=True):
    """Settings of an engine process, which the local main process writes to a JSON file."""

    index: int  # number of the engine on its node
    folder: str  # private folder of the run
    owner_pid: int
    engine_args: dict  # keywords of vLLM's EngineArgs
    start: int = 0  # number of restarts before this process
    state_path: str = ""  # the engine records its states here, for timelines; empty: it does not
    node: int = 0
    attempt: int = 1  # number of the start of a trainer with this `output_dir`

    @property
    def socket_path(self) -> Path:
        """Socket on which the engine serves the ranks."""
        return Path(self.folder) / f"engine{self.index}.sock"

    @property
    def report_folder(self) -> Path:
        """Folder in which vLLM's processes report their pids."""
        return Path(self.folder) / f"pids{self.index}"

    @property
    def failure_path(self) -> Path:
        """File into which the engine writes the reason of its end, for the node's ranks."""
        return self.socket_path.with_suffix(".failure")

    @property
    def shared_memory_record(self) -> Path:
        """File that lists the segments that vLLM may leave behind."""
        return self.socket_path.with_suffix(".shm")

    @property
    def labels(self) -> dict[str, int]:
        """Fields of every line about the engine's states."""
        return {
            "node": self.node,
            "engine": self.index,
            "process": self.start,
            "attempt": self.attempt,
        }


# ---- rank -> engine -------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a connection, answered by `Ready`."""


class Generate(Message, frozen=True):
    """Request to complete a prompt `num_completions` times; answered by `Completions`, with `Progress` before it."""

    prompt: bytes  # int32 (P,)
    num_completions: int
    max_tokens: int
    sampling: dict  # keywords of vLLM's SamplingParams
    seed: int | None = None  # completion i samples with seed + i
    images: tuple[Image, ...] = ()
    min_update: int = 0  # generation starts once this weight update has been attempted


class Serving(msgspec.Struct, frozen=True):
    """Settings of an engine's endpoint for agents, which all sessions share."""

    tool_call_parser: str | None = None  # vLLM's name
    reasoning_parser: str | None = None  # vLLM's name
    chat_template_kwargs: dict = {}


class OpenSession(Message, frozen=True):
    """Request to serve an agent over HTTP until `CloseSession`, or the connection's end; answered by `Endpoint`."""

    key: str  # the agent sends it as its API key
    max_calls: int  # further ones are refused
    max_tokens: int  # of a call's completion
    sampling: dict  # keywords of vLLM's SamplingParams; they replace those of the agent
    seed: int | None = None  # from which the seed of each call is computed
    min_update: int = 0  # calls wait until this weight update has been attempted
    serving: Serving = Serving()


class CloseSession(Message, frozen=True):
    """Request to cancel the open calls of a session and to refuse further ones; answered by `Calls`."""

    key: str


class Peek(Message, frozen=True):
    """Request for the tokens that this connection's open `Generate` requests of one completion have made so far;
    answered by `Completions` with their `request_ids`."""


class Await(Message, frozen=True):
    """Request for a `Done` as soon as weight update `min_update` has been attempted."""

    min_update: int


class Drain(Message, frozen=True):
    """Request to refuse every further `Generate`, of any connection; answered by `Done` at once."""


class Score(Message, frozen=True):
    """Request for a sequence's log-probs under the engine's current weights; answered by `Completions`."""

    prompt: bytes  # int32 (P,)
    temperature: float = 1.0  # log-probs are those of the logits divided by it
    images: tuple[Image, ...] = ()
    min_update: int = 0  # as in `Generate`


class OpenSlots(Message, frozen=True):
    """Request to open the staging slots, sent once per transport that is tried."""

    transport: str  # name of the transport
    memory: msgspec.Raw  # the transport's own message, as msgpack
    sizes: tuple[int, ...]  # bytes of each slot
    buckets: tuple[tuple[TensorSpec, ...], ...]
    signals: str = ""  # socket through which the workers and the sender tell each other of buckets
    engine: int = 0  # index of the engine


class UpdateWeights(Message, frozen=True):
    """Request for a whole weight update: the workers follow the sender's signals from bucket to bucket, and commit.

    `Done` carries the version that they committed.
    """

    version: WeightVersion
    turn: int = 0  # number of the update on these slots, by which workers know its signals
    # earlier buckets hold frozen weights, which are not sent again; 0 in a full update, such as the first
    first_bucket: int = 0
    # freeze running completions, which the new weights continue; otherwise the update waits until none is running
    in_flight: bool = False
    # compute the keys and values of frozen completions again, with the new weights
    recompute_kv: bool = False


class CheckSlot(Message, frozen=True):
    """Self test of a transport: every worker reads the slot's first bytes; a wrong checksum gives a `Failure`."""

    slot: int
    num_bytes: int
    crc: int  # zlib.crc32 of the bytes


class Shutdown(Message, frozen=True):
    """Request to shut down cleanly; the engine replies with `Done` and exits."""


# ---- engine -> rank -------------------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """Properties of an engine that serves; the answer to `Hello`."""

    pid: int
    max_model_len: int  # tokens, prompt and completion together
    # vLLM's "v1" or "v2", which compute samples and prompt log-probs by different code
    model_runner: str = ""
    serves_lora: bool = False  # the engine accepts adapters separately from the weights
    slots: int = 1  # completions that the engine can generate at once
    # reason why log-probs of truncated samples are not over the whole vocabulary
    truncated_logprobs: str = ""
    start: int = 0  # number of restarts before this process


class Progress(Message, frozen=True):
    """Progress report, sent at most once a second and only if the engine has made tokens since the last one."""


class Completion(msgspec.Struct, frozen=True):
    """Tokens of one completion, their log-probs and their weights."""

    tokens: bytes  # int32 (T,)
    logprobs: bytes  # float32 (T,)
    versions: tuple[VersionSpan, ...]
    request_id: int = 0  # of a completion under way in an answer to `Peek`


class Completions(Message, frozen=True):
    """Completions of a prompt, one after the other; the answer to `Generate` and `Score`."""

    rows: tuple[Completion, ...]


class Endpoint(Message, frozen=True):
    """Address of an engine's endpoint for agents; the answer to `OpenSession`."""

    port: int  # on the loopback address
    model: str  # name under which it serves the model
    # why a message that comes back does not get its recorded ids; empty if it does
    forks_because: str = ""


class Call(msgspec.Struct, frozen=True):
    """One call of an agent that has ended: its prompt as the engine computed it, and what it sampled."""

    prompt: bytes  # int32 (P,)
    completion: Completion
    replaced: int = 0  # earlier messages of the prompt that got their recorded ids


class Calls(Message, frozen=True):
    """Calls of a session in the order of their ends; the answer to `CloseSession`."""

    calls: tuple[Call, ...]
    num_refused: int = 0  # calls that got an error for what they asked for, or were too many
    num_cancelled: int = 0  # calls that the agent gave up, or that were open at the end
    # sampling settings that calls had, and that the trainer's replaced
    overridden: tuple[str, ...] = ()


class EngineTimes(msgspec.Struct, frozen=True):
    """Sums of seconds since an engine's start."""

    clock_s: float = 0.0  # all seconds
    busy_s: float = 0.0  # seconds with at least one `Generate` or `Score` running and not frozen
    # seconds that each completion ran, not frozen, divided by the engine's slots
    slot_s: float = 0.0
    tail_s: float = 0.0  # part of `busy_s` with fewer than 10 % of the completions that ran at once since it was idle
    frozen_s: float = 0.0  # seconds in which weight updates froze running completions
    load_s: float = 0.0  # seconds that the slowest worker took for the buckets of weight updates
    commit_s: float = 0.0  # seconds of their commits, in which the workers pack the weights


class Done(Message, frozen=True):
    """Reply to a successful request that has no reply type of its own."""

    version: WeightVersion
    times: EngineTimes = EngineTimes()
    # greatest share of the key-value cache in use between the last two weight updates
    kv_use: float = 0.0
    num_open: int = 0  # `Generate` requests and calls of agents that have no reply yet
    tokens: int = 0  # completion tokens since the engine's start


class Failure(Message, frozen=True):
    """Failure of a request. The engine may still run; only its process shows whether it does."""

    message: str
    error: ErrorName = "EngineError"


RowRequest = Hello | Await | Peek | Generate | Score  # what a rank of another node may send
Request = (
    RowRequest
    | OpenSession
    | CloseSession
    | Drain
    | OpenSlots
    | CheckSlot
    | UpdateWeights
    | Shutdown
)
Reply = Ready | Progress | Completions | Endpoint | Calls | Done | Failure


def pack_ids(ids: Sequence[int] | np.ndarray) -> bytes:
    """Convert a `list[int]` or an array to int32 bytes."""
    return np.asarray(ids, dtype=np.int32).tobytes()


def unpack_ids(data: bytes) -> np.ndarray:
    """Return int32 bytes as a read-only array, without a copy."""
    return np.frombuffer(data, dtype=np.int32)


def unpack_floats(data: bytes) -> np.ndarray:
    """Return float32 bytes as a read-only array, without a copy."""
    return np.frombuffer(data, dtype=np.float32)
