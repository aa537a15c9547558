"""What a rank and an engine of its node say to each other: msgspec structs, length-prefixed, on a unix stream.

Token ids and log-probs are raw int32 and float32 buffers: nested lists as JSON cost 97 bytes and 5.7 microseconds a
token, packed arrays 0.14. No pickle anywhere. End of file is the death notice of the other side.
"""

import asyncio
import socket
import struct
import time
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from ..errors import EngineDiedError, EngineStalledError

LENGTH = struct.Struct("<Q")
NUM_SLOTS = 2  # the engine loads bucket k-1 from one while bucket k is written into the other
MAX_FRAME_BYTES = 1 << 31  # a longer one is a corrupt length, not a message
ADAPTER_TENSORS = (".lora_A.weight", ".lora_B.weight")  # names of a LoRA adapter end so; no others do


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base: every message names the request it belongs to."""

    request_id: int = 0  # chosen by the rank, unique within its connection


class WeightVersion(msgspec.Struct, frozen=True, order=True):
    """Which weights: identity is `update`; `step` is for people."""

    update: int = 0  # number of this weight update in the run, 1 for the first; 0: no update yet
    step: int = 0  # optimizer steps done when it was sent

    def __str__(self) -> str:
        return f"update {self.update} (step {self.step})"


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor inside a slot."""

    name: str  # as in the checkpoint
    dtype: str  # torch's name without "torch.", as it lies in the slot
    shape: tuple[int, ...]  # full, unsharded
    offset: int  # bytes from the start of the slot
    num_bytes: int


class HostMemory(msgspec.Struct, frozen=True, tag=True):
    """Slots are files in shared memory, which the sender unlinks once they are mapped."""

    paths: tuple[str, ...]  # one per slot


class DeviceMemory(msgspec.Struct, frozen=True, tag=True):
    """Slots are memory of the sender's GPU, opened by CUDA IPC."""

    handles: tuple[tuple, ...]  # per slot: what `torch.UntypedStorage._new_shared_cuda` takes after the device
    device: int  # the sender's GPU among those that the engine sees


class Broadcast(msgspec.Struct, frozen=True, tag=True):
    """Slots are memory of each worker's own device; a bucket arrives as a broadcast from rank 0 of a process group."""

    backend: str  # "nccl" or "gloo"
    store: str  # file by which the group's processes find each other, in the run's private folder
    size: int  # sender and all workers of the node's engines
    first_rank: int  # of this engine's workers
    timeout_s: float  # for every broadcast


SlotMemory = HostMemory | DeviceMemory | Broadcast


class Image(msgspec.Struct, frozen=True):
    """An image as PIL holds it."""

    data: bytes
    mode: str
    size: tuple[int, int]  # (width, height) in pixels


# ---- rank -> engine -------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a connection, answered by `Ready`."""

    rank: int


class Generate(Message, frozen=True):
    """One prompt, `num_completions` times; answered by `Completions`, with `Progress` before it."""

    prompt: bytes  # int32 (P,)
    num_completions: int
    max_tokens: int
    sampling: dict  # keywords of vLLM's SamplingParams
    seed: int | None = None  # completion i samples with seed + i
    images: tuple[Image, ...] = ()
    min_update: int = 0  # wait until this weight update was attempted


class Await(Message, frozen=True):
    """Answered by `Done` as soon as weight update `min_update` was attempted."""

    min_update: int


class Score(Message, frozen=True):
    """Log-probs that the engine's present weights give to a sequence; answered by `Completions`."""

    prompt: bytes  # int32 (P,)


class OpenSlots(Message, frozen=True):
    """Open the staging slots, once per transport that is tried."""

    memory: SlotMemory
    slot_bytes: int
    buckets: tuple[tuple[TensorSpec, ...], ...]


class BeginUpdate(Message, frozen=True):
    version: WeightVersion
    # Buckets before this one stay as they are: frozen weights, of which only the first update has any
    first_bucket: int = 0


class LoadBucket(Message, frozen=True):
    """The slot holds this bucket. After `Done` every tensor was copied out and the slot may be written again."""

    bucket: int
    slot: int


class CheckSlot(Message, frozen=True):
    """Self test of a transport: every worker takes the slot's first bytes; another checksum is a `Failure`."""

    slot: int
    num_bytes: int
    crc: int  # zlib.crc32 of the bytes


class CommitUpdate(Message, frozen=True):
    """All buckets were sent; `Done` carries the version that the workers committed."""


class Digest(Message, frozen=True):
    """Which weights are in the engine, bit by bit and without adapters; answered by `Digests`."""


class Shutdown(Message, frozen=True):
    """End in good order; the engine answers `Done` and goes."""


# ---- engine -> rank -------------------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    pid: int
    max_model_len: int  # tokens, prompt and completion together
    dtype: str
    vllm_version: str
    processes: tuple[int, ...]  # pids of the vLLM processes below the engine
    serves_lora: bool = False  # whether it takes adapters apart from the weights
    model_runner: str = ""  # vLLM's "v1" or "v2": sampler and prompt log-probs are different code


class Progress(Message, frozen=True):
    """A sign of work, at most once a second: sent only when tokens were made since the last one."""

    tokens: int  # made by this engine since its start


class Completions(Message, frozen=True):
    lengths: bytes  # int32 (n,)
    tokens: bytes  # int32 (sum of lengths,)
    logprobs: bytes  # float32 (sum of lengths,)
    version: WeightVersion  # as committed by the engine's workers
    seconds: float  # busy with this request, by the engine's clock


class Done(Message, frozen=True):
    version: WeightVersion
    seconds: float
    busy_s: float = 0.0  # since the engine's start: time with at least one request that makes tokens
    clock_s: float = 0.0  # since the engine's start


class Digests(Message, frozen=True):
    workers: tuple[str, ...]  # SHA-256 of each worker's weights, adapters left out


class Failure(Message, frozen=True):
    """The request failed. Whether the engine lives on, its process says."""

    error: str  # name of a class in `errors`
    message: str


Request = (
    Hello
    | Await
    | Generate
    | Score
    | OpenSlots
    | CheckSlot
    | BeginUpdate
    | LoadBucket
    | CommitUpdate
    | Digest
    | Shutdown
)
Reply = Ready | Progress | Completions | Done | Digests | Failure

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)

M = TypeVar("M")


def pack_ids(ids) -> bytes:
    """`list[int]` or array -> int32 bytes."""
    return np.asarray(ids, dtype=np.int32).tobytes()


def unpack_ids(data: bytes) -> np.ndarray:
    """int32 bytes -> read-only array, no copy."""
    return np.frombuffer(data, dtype=np.int32)


def unpack_floats(data: bytes) -> np.ndarray:
    """float32 bytes -> read-only array, no copy."""
    return np.frombuffer(data, dtype=np.float32)


def frame(message: Message) -> bytes:
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def _body_length(header: bytes | bytearray) -> int:
    (length,) = LENGTH.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise EngineDiedError(f"Corrupt frame: it claims {length} bytes (limit {MAX_FRAME_BYTES}).")
    return length


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """The next request, or `None` at end of file."""
    try:
        header = await reader.readexactly(LENGTH.size)
        return _request_decoder.decode(await reader.readexactly(_body_length(header)))
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return None


def reason_of_end(failure_path: Path) -> str | None:
    """What an engine that ended said of it; waits half a second, because it says it while it goes."""
    for _ in range(20):
        if failure_path.exists() and (reason := failure_path.read_text()):
            return reason
        time.sleep(0.025)
    return None


class Connection:
    """A rank's blocking end of the stream. One thread at a time.

    Args:
        path (`str`):
            The engine's socket.
        name (`str`):
            Who is at the other end, for messages ("engine 0 of node 1").
        log_path (`Path`):
            Its log, for messages.
        connect_timeout_s (`float`):
            Deadline for connecting.
    """

    def __init__(self, path: str, name: str, log_path: Path, connect_timeout_s: float = 30.0):
        self.name = name
        self.log_path = log_path
        self._socket_path = Path(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(connect_timeout_s)
        deadline = time.monotonic() + connect_timeout_s
        while (error := self._connect(path)) is not None:
            # An engine is between `bind` and `listen` for a moment: the socket is there and refuses
            if not isinstance(error, ConnectionRefusedError) or time.monotonic() > deadline:
                raise EngineDiedError(f"{name}: cannot connect to its socket ({error}). Log: {log_path}") from error
            time.sleep(0.05)

    def _connect(self, path: str) -> OSError | None:
        try:
            self._socket.connect(path)
            return None
        except OSError as error:
            return error

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, timeout_s: float) -> None:
        """Raises `EngineDiedError` if the other end is gone, `EngineStalledError` if it does not read."""
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(frame(message))
        except TimeoutError as error:
            raise EngineStalledError(
                f"{self.name} did not take a message for {timeout_s:.0f} s. Log: {self.log_path}"
            ) from error
        except OSError as error:
            raise self.ended(f"closed the connection ({error})") from error

    def receive(self, timeout_s: float) -> Reply:
        """The next reply; raises `EngineStalledError` when none came in time."""
        deadline = time.monotonic() + timeout_s
        length = _body_length(self._read(LENGTH.size, deadline, timeout_s))
        body = self._read(length, deadline, timeout_s)
        try:
            return _reply_decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise EngineDiedError(f"{self.name} sent a corrupt message ({error}). Log: {self.log_path}") from error

    def _read(self, num_bytes: int, deadline: float, timeout_s: float) -> bytearray:
        """So many bytes and not one of the next reply: nothing lies here unseen while a selector waits."""
        data = bytearray(num_bytes)
        rest = memoryview(data)
        while rest:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                received = self._socket.recv_into(rest)
            except TimeoutError as error:
                raise EngineStalledError(
                    f"{self.name} said nothing for {timeout_s:.0f} s. Log: {self.log_path}"
                ) from error
            except OSError as error:
                raise self.ended(f"broke the connection ({error})") from error
            if not received:
                raise self.ended("ended")
            rest = rest[received:]
        return data

    def ended(self, symptom: str) -> EngineDiedError:
        """The error for an engine that is gone, with its own words if it left any."""
        reason = reason_of_end(self._socket_path.with_suffix(".failure"))
        what = f"ended: {reason}" if reason else symptom
        return EngineDiedError(f"{self.name} {what}. Log: {self.log_path}")

    def close(self) -> None:
        self._socket.close()
