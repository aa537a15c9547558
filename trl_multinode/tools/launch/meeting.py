"""Server of a roll-call: it collects the nodes, sends them the state, and at the end the verdict."""

import asyncio
import errno
import socket
import time
from dataclasses import dataclass

import msgspec

from .attendance import LONGEST_LINE, Attendance, Hello, Message, State, Verdict, encode

RETRY_S = 0.5
CONNECT_S = 5.0  # for a connection, and for the first message on it


@dataclass(frozen=True)
class Place:
    """Address and times of a roll-call."""

    address: str
    port: int
    timeout_s: float
    every_s: float = 10.0  # between two lines of progress
    settle_s: float = 1.0  # for a second node of some rank, after all are here
    linger_s: float = 10.0  # in which nodes that come after an error get it too


class Meeting:
    """Server of a roll-call.

    Args:
        place ([`Place`]):
            Address and times.
        host ([`Hello`]):
            Node that holds it.
    """

    def __init__(self, place: Place, host: Hello):
        self._place = place
        self.attendance = Attendance(host, place.address)
        self._start = time.monotonic()
        self._writers: dict[asyncio.StreamWriter, Hello] = {}
        self._server: asyncio.Server | None = None
        self._deciding: asyncio.Task | None = None
        self._verdict: Verdict | None = None

    async def open(self) -> None:
        """Listen on the port.

        Raises:
            `OSError`: if the port is taken.
        """
        self._server = await asyncio.start_server(
            self._welcome, sock=_listen(self._place.port), limit=LONGEST_LINE
        )

    def state(self) -> str:
        return self.attendance.state(time.monotonic() - self._start)

    async def report(self) -> None:
        """Send the state to all nodes in intervals, until the verdict."""
        while self._verdict is None:
            await asyncio.sleep(self._place.every_s)
            if self._verdict is None:
                self._send(State(self.state()))

    async def end(self, verdict: Verdict) -> None:
        """Give all nodes a verdict, wait until they have read it, and close."""
        self._tell(verdict)
        if verdict.code != 0 and self.attendance.joined:
            waits_until = time.monotonic() + self._place.linger_s
            while time.monotonic() < waits_until and self.attendance.missing:
                await asyncio.sleep(RETRY_S / 5)
        self._close()
        waits_until = time.monotonic() + CONNECT_S
        # a node that leaves first keeps the port free
        while self._writers and time.monotonic() < waits_until:
            await asyncio.sleep(RETRY_S / 10)
        for writer in list(self._writers):
            writer.transport.abort()

    def _tell(self, verdict: Verdict) -> None:
        if self._verdict is None:
            self._verdict = verdict
            if verdict.code == 0:
                self._close()  # before any node may launch
            self._send(verdict)

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()

    def _send(self, message: Message) -> None:
        for writer in list(self._writers):
            writer.write(encode(message))

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(encode(State()))
            hello = await receive(reader, CONNECT_S)
            if isinstance(hello, Hello):
                await self._host(hello, reader, writer)
        except OSError:
            pass  # that connection is lost, and with it the node
        finally:
            writer.close()

    async def _host(
        self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._writers[writer] = hello
        self.attendance.joined.append(hello)
        if self._verdict is not None:
            writer.write(encode(self._verdict))
        elif self._deciding is None and self.attendance.verdict(0.0) is not None:
            self._deciding = asyncio.create_task(self._decide())
        try:
            # a node sends nothing more; it closes after the verdict, or has left before it
            await reader.read(1)
        finally:
            del self._writers[writer]
            if self._verdict is None:
                self.attendance.joined.remove(hello)
                self._send(State(f"node {hello.name} has left the roll-call; {self.state()}"))

    async def _decide(self) -> None:
        await asyncio.sleep(self._place.settle_s)
        self._deciding = None
        verdict = self.attendance.verdict(time.monotonic() - self._start)
        if verdict is not None:  # it is `None` if a node has left meanwhile
            self._tell(verdict)


def _listen(port: int) -> socket.socket:
    """Return a socket that listens on all addresses, and leaves the port to the launcher when it is closed."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # IPv6 is switched off
                raise
    return socket.create_server(("", port))


async def receive(reader: asyncio.StreamReader, limit_s: float | None = None) -> Message | None:
    """Return the next message; `None` at the end of the stream, or if none comes in time, or if it is no message."""
    try:
        return msgspec.json.decode(await asyncio.wait_for(reader.readline(), limit_s), type=Message)
    except (TimeoutError, ValueError):  # the line is too long, or another program has sent it
        return None
