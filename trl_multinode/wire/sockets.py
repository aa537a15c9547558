"""Exact reads from stream sockets, and the kernel's checks of a TCP link."""

import asyncio
import socket
import time

KEEP_ALIVE_S = 15  # between two probes of an idle connection
# of one read, so that memory grows with what has come and not with what was announced
PIECE_BYTES = 1 << 18


def notice_cuts(stream: socket.socket, limit_s: float) -> None:
    """Let the kernel probe a TCP connection while it is idle, and end it once the peer has been silent for `limit_s`.

    Without it, a cut link would be noticed after a quarter of an hour, and by a process that only waits never.
    """
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        stream.setsockopt(socket.IPPROTO_TCP, option, KEEP_ALIVE_S)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limit_s * 1000))


def is_overdue(error: OSError) -> bool:
    """Return whether a call took longer than its socket may wait; the end of a cut link has a number."""
    return isinstance(error, TimeoutError) and error.errno is None


def read_exactly(stream: socket.socket, num_bytes: int, deadline: float) -> bytearray:
    """Read so many bytes and none of those behind them, until `deadline` of `time.monotonic`.

    Raises:
        `EOFError`: if the stream ends before.
        `OSError`: if the connection breaks, or if they do not arrive in time (`is_overdue`).
    """
    data = bytearray(num_bytes)
    rest = memoryview(data)
    while rest:
        stream.settimeout(max(deadline - time.monotonic(), 0.001))
        received = stream.recv_into(rest)
        if not received:
            raise EOFError("the stream has ended")
        rest = rest[received:]
    return data


async def receive_exactly(stream: socket.socket, num_bytes: int) -> bytearray:
    """Read so many bytes from a socket that does not block; raise `EOFError` if the stream ends before."""
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < num_bytes:
        piece = await loop.sock_recv(stream, min(num_bytes - len(data), PIECE_BYTES))
        if not piece:
            raise EOFError("the stream has ended")
        data += piece
    return data
