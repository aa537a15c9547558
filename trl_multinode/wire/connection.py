"""Framing of the protocol: length-prefixed msgspec structs on a stream socket, and a rank's blocking end of it.

The socket is a unix one of the node, or leads to the port of another node (`handshake.py`). Nothing is pickled. End of
file means that the other process has ended.
"""

import asyncio
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from ..errors import EngineDiedError, EngineStalledError
from .messages import Hello, Message, Reply, Request
from .sockets import is_overdue, read_exactly, receive_exactly

LENGTH = struct.Struct("<Q")
MAX_FRAME_BYTES = 1 << 31  # a greater length is a corrupt header
MAX_HELLO_BYTES = 1 << 12  # of the first request on a connection; it has 30

_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)


def with_length(body: bytes) -> bytes:
    """Return bytes with their number in front."""
    return LENGTH.pack(len(body)) + body


def frame(message: Any) -> bytes:
    """Encode a message with its length in front."""
    return with_length(msgspec.msgpack.encode(message))


def body_length(header: bytes | bytearray, limit: int = MAX_FRAME_BYTES) -> int:
    """Return the length that a header claims; raise `EngineDiedError` if it is above the limit."""
    (length,) = LENGTH.unpack(header)
    if length > limit:
        raise EngineDiedError(f"Corrupt frame: it claims {length} bytes (limit {limit}).")
    return length


async def read_hello(reader: asyncio.StreamReader, timeout_s: float) -> Hello | None:
    """Read the first request, which must be a `Hello`; return `None` at end of file.

    Raises:
        `EngineDiedError`, `msgspec.MsgspecError`, `TimeoutError`: if something else arrives, or nothing in time.
    """
    request = await asyncio.wait_for(read_request(reader, MAX_HELLO_BYTES), timeout_s)
    if not isinstance(request, Hello | None):
        raise EngineDiedError(f"{type(request).__name__} is no first request, expected Hello.")
    return request


async def read_request(
    reader: asyncio.StreamReader, limit: int = MAX_FRAME_BYTES
) -> Request | None:
    """Read the next request, of at most `limit` bytes; return `None` at end of file."""
    try:
        header = await reader.readexactly(LENGTH.size)
        return _request_decoder.decode(await reader.readexactly(body_length(header, limit)))
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return None


async def receive_body(stream: socket.socket, limit: int = MAX_FRAME_BYTES) -> bytearray:
    """Read the next frame from a socket that does not block, and return it without its length."""
    return await receive_exactly(
        stream, body_length(await receive_exactly(stream, LENGTH.size), limit)
    )


def read_body(stream: socket.socket, deadline: float, limit: int = MAX_FRAME_BYTES) -> bytearray:
    """Read the next frame, as [`read_exactly`] reads, and return it without its length."""
    length = body_length(read_exactly(stream, LENGTH.size, deadline), limit)
    return read_exactly(stream, length, deadline)


def reason_of_end(failure_path: Path) -> str | None:
    """Return the reason that an ended engine wrote, if any; wait up to 0.5 s, because it writes while it exits."""
    for _ in range(20):
        with suppress(OSError):  # not written yet, or removed because the engine is started again
            if reason := failure_path.read_text():
                return reason
        time.sleep(0.025)
    return None


class Connection:
    """Blocking end of the stream in a rank, as `connect` returns it. Only one thread may use it at a time.

    Args:
        stream (`socket.socket`):
            Connected socket.
        name (`str`):
            Name of the engine, for error messages ("engine 0 of node 1").
        log_path (`Path`):
            Log of the engine, for error messages.
        failure_path (`Path`, *optional*):
            File in which an ended engine of this node has written the reason. `None`: the engine is on another node.
    """

    def __init__(
        self, stream: socket.socket, name: str, log_path: Path, failure_path: Path | None = None
    ):
        self.name = name
        self.log_path = log_path
        self._failure_path = failure_path
        self._socket = stream

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, timeout_s: float) -> None:
        """Send a message; raise `EngineDiedError` if the engine ended, `EngineStalledError` if it does not read."""
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(frame(message))
        except OSError as error:
            if is_overdue(error):
                raise EngineStalledError(
                    f"{self.name} did not read a message for {timeout_s:.0f} s. Log: {self.log_path}"
                ) from error
            raise self.ended(f"closed the connection ({error})") from error

    def receive(self, timeout_s: float) -> Reply:
        """Return the next reply; raise `EngineStalledError` if it does not arrive in time."""
        try:
            # no byte more: a selector would not report those of the next reply that are buffered here
            body = read_body(self._socket, time.monotonic() + timeout_s)
        except OSError as error:
            if is_overdue(error):
                raise EngineStalledError(
                    f"{self.name} sent nothing for {timeout_s:.0f} s. Log: {self.log_path}"
                ) from error
            raise self.ended(f"broke the connection ({error})") from error
        except EOFError:
            raise self.ended("ended") from None
        try:
            return _reply_decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise EngineDiedError(
                f"{self.name} sent a corrupt message ({error}). Log: {self.log_path}"
            ) from error

    def ended(self, symptom: str) -> EngineDiedError:
        """Return the error for an engine that has ended, with the reason that it wrote, if any."""
        reason = None if self._failure_path is None else reason_of_end(self._failure_path)
        what = f"ended: {reason}" if reason else symptom
        return EngineDiedError(f"{self.name} {what}. Log: {self.log_path}")

    def at_end(self) -> bool:
        """Return whether the engine has closed the connection; without waiting."""
        self._socket.settimeout(0.0)
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def explain_end(self, reason: str) -> None:
        """Write the reason for an end that an engine of this node cannot explain itself, unless there is one."""
        assert self._failure_path is not None
        with suppress(OSError), open(self._failure_path, "x") as file:
            file.write(reason)

    def close(self) -> None:
        self._socket.close()


def connect(path: str | Path, name: str, log_path: Path, timeout_s: float = 30.0) -> Connection:
    """Connect to an engine of this node.

    Args:
        path (`str` or `Path`):
            Path of the engine's socket.
        name (`str`), log_path (`Path`):
            As in [`Connection`].
        timeout_s (`float`, *optional*, defaults to 30.0):
            Deadline for connecting, in seconds.

    Raises:
        `EngineDiedError`: if no engine listens there.
    """
    path = Path(path)
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.settimeout(timeout_s)
    try:
        _connect(stream, str(path), time.monotonic() + timeout_s)
    except OSError as error:
        stream.close()
        gone = "" if path.parent.is_dir() else f" {path.parent} was removed, by a cleaner perhaps."
        raise EngineDiedError(
            f"{name}: cannot connect to its socket ({error}).{gone} Log: {log_path}"
        ) from error
    return Connection(stream, name, log_path, path.with_suffix(".failure"))


def _connect(stream: socket.socket, path: str, deadline: float) -> None:
    while True:
        try:
            return stream.connect(path)
        except ConnectionRefusedError:
            # For a moment between the engine's `bind` and `listen` the socket exists but refuses connections
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
