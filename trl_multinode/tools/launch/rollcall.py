"""Roll-call: all nodes meet at the address and port of the launch, before its launcher listens there.

The host with the address `main_process_ip` holds the roll-call; every node, this one too, joins it as a client. So it
also works, and says so, if the nodes of rank 0 and of the address are not the same. When all are here, the port is
closed first, and only then do the nodes get the verdict: a launcher never meets the roll-call of another node. Clients
close their connections first, which leaves the port of node 0 free for the launcher.

Messages are lines of JSON with a longest length. Torchrun's store, on the same port, trusts its network as much.
"""

import asyncio
import errno
import socket
import sys
import time
from contextlib import suppress

from ...run.endings.exit_codes import CONFIGURATION, PEER_LOST
from ..check.ports import owner_of
from .attendance import LONGEST_LINE, Hello, State, Verdict, encode, printable
from .meeting import CONNECT_S, RETRY_S, Meeting, Place, receive

OTHER_PORT = (
    ". End the program that has it, or pass another --main_process_port, the same on every node"
)
QUIET_S = 2.0  # in which the nodes of one job start
STRANGER_S = 15.0  # a former run may still hold the port for so long


async def call(place: Place, hello: Hello) -> Verdict:
    """Take part in a roll-call as `hello`, print its lines and its verdict, and return the verdict."""
    node = _Node(place, hello)
    serving = asyncio.create_task(node.serve())
    try:
        verdict = await asyncio.wait_for(node.attend(), place.timeout_s)
    except TimeoutError:
        verdict = node.too_late()
    for line in verdict.lines:
        say(printable(line))
    if node.meeting is not None:
        await node.meeting.end(verdict)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    return verdict


def say(text: str) -> None:
    """Print a line of the roll-call at once."""
    print(f"roll-call: {text}", file=sys.stdout, flush=True)


class _Node:
    """One node's part: client, and server if it has the address."""

    def __init__(self, place: Place, hello: Hello):
        self.place, self.hello = place, hello
        self.meeting: Meeting | None = None
        self._start = time.monotonic()
        self._trouble = ""  # the reason why this node is not connected
        self._stranger_since: float | None = None
        self._local: bool | None = (
            None  # whether the address of the launch is one of this host, once that is known
        )
        self._port_error = (
            ""  # the reason why this node, which may hold the roll-call, cannot listen
        )
        self._state = ""
        self._joined = False

    # ---- client -----------------------------------------------------------------------------------------------------

    async def attend(self) -> Verdict:
        """Join until there is a verdict. Print why this node has not: when the reason changes, and in intervals."""
        said, at = "", 0.0
        while True:
            verdict = await self._join()
            if verdict is not None:
                return verdict
            now = time.monotonic()
            seconds, kind = now - self._start, self._trouble.partition(" (")[0]
            is_due = kind != said or now - at >= self.place.every_s
            if is_due and seconds >= QUIET_S:
                said, at = kind, now
                say(f"{self._trouble}; {seconds:.0f} of {self.place.timeout_s:.0f} s")
            await asyncio.sleep(RETRY_S)

    async def _join(self) -> Verdict | None:
        address, port = self.place.address, self.place.port
        try:
            opening = asyncio.open_connection(address, port, limit=LONGEST_LINE)
            streams = await asyncio.wait_for(opening, CONNECT_S)
        except socket.gaierror as error:
            self._trouble = f"this node cannot resolve main_process_ip {address} ({error.strerror})"
            return None
        except (OSError, TimeoutError) as error:
            if self._port_error:
                return self._met_a_stranger()
            reason = (
                f"no answer within {CONNECT_S:.0f} s"
                if isinstance(error, TimeoutError)
                else str(error)
            )
            self._trouble = (
                f"nobody holds the roll-call at {address}:{port} yet ({reason}){self._misplaced()}"
            )
            return None
        return await self._converse(*streams)

    async def _converse(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Verdict | None:
        where = f"{self.place.address}:{self.place.port}"
        try:
            if not isinstance(await receive(reader, CONNECT_S), State):
                return self._met_a_stranger()
            self._stranger_since, self._trouble, self._joined = None, "", True
            writer.write(encode(self.hello))
            while (message := await receive(reader)) is not None:
                if isinstance(message, Verdict):
                    return message
                if isinstance(message, State):
                    self._state = printable(message.text)
                    say(self._state)
            self._trouble = f"the roll-call at {where} ended without a verdict"
        except OSError as error:
            self._trouble = f"the roll-call at {where} was lost ({error})"
        finally:
            self._joined = False
            writer.close()
        return None

    def _met_a_stranger(self) -> Verdict | None:
        place, now = self.place, time.monotonic()
        self._stranger_since = self._stranger_since or now
        what = f"another program, or a run that has already begun, answers at {place.address}:{place.port}"
        self._trouble = self._port_error or f"{what}{OTHER_PORT}"
        late = now - self._stranger_since >= STRANGER_S
        return Verdict(CONFIGURATION, [f"error: {self._trouble}"]) if late else None

    def _misplaced(self) -> str:
        place, local = self.place, self._local
        if self.hello.rank == 0 and local is False:
            return (
                f"; this node has machine_rank 0, but {place.address} is not an address of it"
                f": another node must have rank 0, or --main_process_ip must be this node's address"
            )
        if self.hello.rank != 0 and local:
            return f"; {place.address} is this node's own address, but it has machine_rank {self.hello.rank}, not 0"
        return ""

    def too_late(self) -> Verdict:
        """Return the verdict of this node when its time is over."""
        limit = f"the limit of {self.place.timeout_s:.0f} s is over (--timeout)"
        if self.meeting is not None and self.meeting.attendance.joined:
            return Verdict(PEER_LOST, [f"error: {self.meeting.state()}; {limit}"])
        code = CONFIGURATION if "cannot resolve" in self._trouble else PEER_LOST
        return Verdict(
            code, [f"error: {self._trouble or self._state or 'the roll-call had no end'}; {limit}"]
        )

    # ---- server -----------------------------------------------------------------------------------------------------

    def _is_local(self) -> bool:
        """Return whether the address of the launch is one of this host."""
        with suppress(OSError):
            for family, kind, _, _, address in socket.getaddrinfo(
                self.place.address, 0, type=socket.SOCK_STREAM
            ):
                with socket.socket(family, kind) as probe, suppress(OSError):
                    probe.bind(address)
                    return True
        return False

    async def serve(self) -> None:
        """Hold the roll-call as soon as the port is free, if this node has the address or is the one of rank 0.

        Others may reach rank 0 by an address that is not its own, as that of a service of Kubernetes.
        """
        while True:
            self._local = await asyncio.to_thread(self._is_local)  # it looks up a name
            if not self._joined and (self._local or self.hello.rank == 0):
                meeting = Meeting(self.place, self.hello)
                try:
                    await meeting.open()
                except OSError as error:
                    self._port_error = await asyncio.to_thread(self._cannot_listen, error)
                else:
                    self.meeting, self._port_error = meeting, ""
                    await meeting.report()
            await asyncio.sleep(RETRY_S)

    def _cannot_listen(self, error: OSError) -> str:
        owner = owner_of(self.place.port) if error.errno == errno.EADDRINUSE else ""
        if owner:
            return f"port {self.place.port} is taken on this node by {owner}{OTHER_PORT}"
        return f"this node cannot listen on port {self.place.port} ({error.strerror}){OTHER_PORT}"
