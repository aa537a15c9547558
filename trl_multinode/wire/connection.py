"""Framing of the protocol: length-prefixed msgspec structs on a unix stream socket, and a rank's blocking end of it.

Nothing is pickled. End of file means that the other process has ended.
"""

import asyncio
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from ..errors import EngineDiedError, EngineStalledError
from .messages import Hello, Message, Reply, Request

LENGTH = struct.Struct("<Q")
MAX_FRAME_BYTES = 1 << 31  # a greater length is a corrupt header
MAX_HELLO_BYTES = 1 << 12  # of the first request on a connection; it has 30

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)


def frame(message: Message) -> bytes:
    """Encode a message with its length in front."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def _body_length(header: bytes | bytearray, limit: int = MAX_FRAME_BYTES) -> int:
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
        return _request_decoder.decode(await reader.readexactly(_body_length(header, limit)))
    except (asyncio.IncompleteReadError, ConnectionResetError):
        return None


def reason_of_end(failure_path: Path) -> str | None:
    """Return the reason that an ended engine wrote, if any; wait up to 0.5 s, because it writes while it exits."""
    for _ in range(20):
        with suppress(OSError):  # not written yet, or removed because the engine is started again
            if reason := failure_path.read_text():
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
        try:
            self._connect(path, time.monotonic() + connect_timeout_s)
        except OSError as error:
            folder = self._socket_path.parent
            gone = "" if folder.is_dir() else f" {folder} was removed, by a cleaner perhaps."
            raise EngineDiedError(
                f"{name}: cannot connect to its socket ({error}).{gone} Log: {log_path}"
            ) from error

    def _connect(self, path: str, deadline: float) -> None:
        while True:
            try:
                return self._socket.connect(path)
            except ConnectionRefusedError:
                # For a moment between the engine's `bind` and `listen` the socket exists but refuses connections
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message, timeout_s: float) -> None:
        """Send a message; raise `EngineDiedError` if the engine ended, `EngineStalledError` if it does not read."""
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(frame(message))
        except TimeoutError as error:
            raise EngineStalledError(
                f"{self.name} did not read a message for {timeout_s:.0f} s. Log: {self.log_path}"
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
            raise EngineDiedError(
                f"{self.name} sent a corrupt message ({error}). Log: {self.log_path}"
            ) from error

    def _read(self, num_bytes: int, deadline: float, timeout_s: float) -> bytearray:
        """Read exactly `num_bytes`: a selector would not report bytes of the next reply that are buffered here."""
        data = bytearray(num_bytes)
        rest = memoryview(data)
        while rest:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                received = self._socket.recv_into(rest)
            except TimeoutError as error:
                raise EngineStalledError(
                    f"{self.name} sent nothing for {timeout_s:.0f} s. Log: {self.log_path}"
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
        """Write the reason for an end that the engine cannot explain itself, unless there is one."""
        with suppress(OSError), open(self._socket_path.with_suffix(".failure"), "x") as file:
            file.write(reason)

    def close(self) -> None:
        self._socket.close()
