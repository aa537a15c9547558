"""Protocol between a rank and an engine of its node: length-prefixed msgspec structs on a unix stream socket.

Token ids and log-probs are raw int32 and float32 buffers: packed arrays cost 0.14 microseconds per token, nested lists
as JSON 5.7 microseconds and 97 bytes. Nothing is pickled. End of file means that the other process has ended.
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
NUM_SLOTS = 2  # the engine loads bucket k-1 from one slot while the sender writes bucket k into the other
MAX_FRAME_BYTES = 1 << 31  # a greater length is a corrupt header
ADAPTER_TENSORS = (".lora_A.weight", ".lora_B.weight")  # endings of a LoRA tensor's name, and of no other


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages, with the id of the request that a message belongs to."""

    request_id: int = 0  # chosen by the rank, unique within its connection


class WeightVersion(msgspec.Struct, frozen=True, order=True):
    """Version of the weights. `update` identifies it; `step` is information for the reader of a log."""

    update: int = 0  # number of this weight update in the run, 1 for the first; 0: no update yet
    step: int = 0  # optimizer steps done when the weights were sent

    def __str__(self) -> str:
        return f"update {self.update} (step {self.step})"


class TensorSpec(msgspec.Struct, frozen=True):
    """Name, type and position of one tensor inside a slot."""

    name: str  # as in the checkpoint
    dtype: str  # as stored in the slot: torch's name without "torch."
    shape: tuple[int, ...]  # full, unsharded
    offset: int  # bytes from the start of the slot
    num_bytes: int


class HostMemory(msgspec.Struct, frozen=True, tag=True):
    """Slots in shared-memory files, which the sender unlinks once the workers have mapped them."""

    paths: tuple[str, ...]  # one per slot


class DeviceMemory(msgspec.Struct, frozen=True, tag=True):
    """Slots in the memory of the sender's GPU, which the workers open through CUDA IPC."""

    handles: tuple[tuple, ...]  # per slot: arguments of `torch.UntypedStorage._new_shared_cuda` after the device
    device: int  # index of the sender's GPU among those that the engine sees


class Broadcast(msgspec.Struct, frozen=True, tag=True):
    """Slots on each worker's own device; a bucket arrives as a broadcast from rank 0 of a process group."""

    backend: str  # "nccl" or "gloo"
    store: str  # file through which the group's processes find each other, in the run's private folder
    size: int  # number of processes: the sender and all workers of the node's engines
    first_rank: int  # lowest rank among this engine's workers
    timeout_s: float  # limit for every broadcast


SlotMemory = HostMemory | DeviceMemory | Broadcast


class Image(msgspec.Struct, frozen=True):
    """Image as raw bytes, with PIL's mode and size."""

    data: bytes
    mode: str
    size: tuple[int, int]  # (width, height) in pixels


# ---- rank -> engine -------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a connection, answered by `Ready`."""

    rank: int


class Generate(Message, frozen=True):
    """Request to complete a prompt `num_completions` times; answered by `Completions`, with `Progress` before it."""

    prompt: bytes  # int32 (P,)
    num_completions: int
    max_tokens: int
    sampling: dict  # keywords of vLLM's SamplingParams
    seed: int | None = None  # completion i samples with seed + i
    images: tuple[Image, ...] = ()
    min_update: int = 0  # generation starts once this weight update has been attempted


class Await(Message, frozen=True):
    """Request for a `Done` as soon as weight update `min_update` has been attempted."""

    min_update: int


class Score(Message, frozen=True):
    """Request for a sequence's log-probs under the engine's current weights; answered by `Completions`."""

    prompt: bytes  # int32 (P,)


class OpenSlots(Message, frozen=True):
    """Request to open the staging slots, sent once per transport that is tried."""

    memory: SlotMemory
    slot_bytes: int
    buckets: tuple[tuple[TensorSpec, ...], ...]


class BeginUpdate(Message, frozen=True):
    version: WeightVersion
    # Buckets before this one hold frozen weights, which are not sent again; a whole update, such as the first, has 0
    first_bucket: int = 0


class LoadBucket(Message, frozen=True):
    """Request to load a bucket from a slot. After `Done` every tensor is copied out and the slot may be rewritten."""

    bucket: int
    slot: int


class CheckSlot(Message, frozen=True):
    """Self test of a transport: every worker reads the slot's first bytes; a wrong checksum gives a `Failure`."""

    slot: int
    num_bytes: int
    crc: int  # zlib.crc32 of the bytes


class CommitUpdate(Message, frozen=True):
    """End of an update, after its last bucket; `Done` carries the version that the workers committed."""


class Digest(Message, frozen=True):
    """Request for checksums of the engine's weights, bit by bit and without adapters; answered by `Digests`."""


class Shutdown(Message, frozen=True):
    """Request to end in good order; the engine replies with `Done` and exits."""


# ---- engine -> rank -------------------------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    pid: int
    max_model_len: int  # tokens, prompt and completion together
    dtype: str
    vllm_version: str
    processes: tuple[int, ...]  # pids of the vLLM processes below the engine
    serves_lora: bool = False  # the engine accepts adapters separately from the weights
    model_runner: str = ""  # vLLM's "v1" or "v2", which compute samples and prompt log-probs by different code


class Progress(Message, frozen=True):
    """Sign of work, sent at most once a second and only if the engine has made tokens since the last one."""

    tokens: int  # tokens that this engine has made since its start


class Completions(Message, frozen=True):
    lengths: bytes  # int32 (n,)
    tokens: bytes  # int32 (sum of lengths,)
    logprobs: bytes  # float32 (sum of lengths,)
    version: WeightVersion  # as committed by the engine's workers
    seconds: float  # from the request's arrival to its last token, by the engine's clock


class Done(Message, frozen=True):
    version: WeightVersion
    seconds: float
    busy_s: float = 0.0  # time since the engine's start with at least one `Generate` or `Score` running
    clock_s: float = 0.0  # time since the engine's start


class Digests(Message, frozen=True):
    workers: tuple[str, ...]  # SHA-256 of each worker's weights, adapters left out


class Failure(Message, frozen=True):
    """Failure of a request. The engine may still run; only its process shows whether it does."""

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
    """Convert a `list[int]` or an array to int32 bytes."""
    return np.asarray(ids, dtype=np.int32).tobytes()


def unpack_ids(data: bytes) -> np.ndarray:
    """Return int32 bytes as a read-only array, without a copy."""
    return np.frombuffer(data, dtype=np.int32)


def unpack_floats(data: bytes) -> np.ndarray:
    """Return float32 bytes as a read-only array, without a copy."""
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
    """Read the next request; return `None` at end of file."""
    try:
        header = await reader.readexactly(LENGTH.size)
        return _request_decoder.decode(await reader.readexactly(_body_length(header)))
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return None


def reason_of_end(failure_path: Path) -> str | None:
    """Return the reason that an ended engine wrote, if any; wait up to 0.5 s, because it writes while it exits."""
    for _ in range(20):
        if failure_path.exists() and (reason := failure_path.read_text()):
            return reason
        time.sleep(0.025)
    return None


class Connection:
    """Blocking end of the stream in a rank. Only one thread may use it at a time.

    Args:
        path (`str`):
            Path of the engine's socket.
        name (`str`):
            Name of the engine, for error messages ("engine 0 of node 1").
        log_path (`Path`):
            Log of the engine, for error messages.
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
            # Between the engine's `bind` and `listen` the socket exists and refuses connections for a moment
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
        """Send a message; raise `EngineDiedError` if the engine ended, `EngineStalledError` if it does not read."""
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
        """Return the next reply; raise `EngineStalledError` if it does not arrive in time."""
        deadline = time.monotonic() + timeout_s
        length = _body_length(self._read(LENGTH.size, deadline, timeout_s))
        body = self._read(length, deadline, timeout_s)
        try:
            return _reply_decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise EngineDiedError(f"{self.name} sent a corrupt message ({error}). Log: {self.log_path}") from error

    def _read(self, num_bytes: int, deadline: float, timeout_s: float) -> bytearray:
        """Read exactly `num_bytes`: a selector would not report bytes of the next reply that were buffered here."""
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
        """Return the error for an engine that has ended, with the reason that it wrote, if any."""
        reason = reason_of_end(self._socket_path.with_suffix(".failure"))
        what = f"ended: {reason}" if reason else symptom
        return EngineDiedError(f"{self.name} {what}. Log: {self.log_path}")

    def close(self) -> None:
        self._socket.close()
