"""An agent's membership in a run: its connection to node 0, and its own port, in a thread."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ..engine.agents import AGENTS, Beat, Join, Serve, Start, exchange, receive, send
from ..engine.node_port import Background
from ..engine.remote_rows import row_services
from ..run.addresses import route_to
from ..wire.handshake import Pool, PortAddress, dial
from ..wire.messages import EngineTimes
from ..wire.port import PEER_S, Port, Service

DIAL_S = 10.0
START_S = 60.0  # for the files of a model's folder


class Member(Background):
    """Membership in a run, from the construction to `close` or to the end of the run.

    Args:
        node_0 (`PortAddress`), pool (`Pool`):
            Port of node 0, secret and facts of the run.
        join (`Join`):
            First message of this agent.
        report (`Callable[[str], None]`):
            Function that prints a line.

    Attributes:
        start (`Start`):
            What the engines start with.
        ended (`threading.Event`):
            Set once the run has ended, or its node 0 is silent.

    Raises:
        `ConfigurationError`: if the secrets differ, or if node 0 refuses the run or a version.
        `EngineDiedError`, `EOFError`, `OSError`: if the run has ended, or has not begun.
    """

    def __init__(self, node_0: PortAddress, pool: Pool, join: Join, report: Callable[[str], None]):
        self.ended = threading.Event()
        self._beat = Beat()
        self._services: dict[str, Service] = {}
        self._stream = dial(node_0, pool, AGENTS, DIAL_S)
        try:
            self._stream.setblocking(False)
            self.start = asyncio.run(self._join(join))
            # on the interface that leads to node 0, and on no other one
            host = route_to(node_0.host) or "127.0.0.1"
            self._port = Port(host, self.start.number, pool, self._services, report)
        except BaseException:
            self._stream.close()
            raise
        super().__init__(self._keep(), "member")

    async def _join(self, join: Join) -> Start:
        await send(self._stream, join, DIAL_S)
        return await receive(self._stream, Start, START_S)

    async def _keep(self) -> None:
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._port.serve())
                await exchange(self._stream, lambda: self._beat, lambda beat: None, PEER_S)
        except* (OSError, EOFError):
            pass  # the run has ended
        finally:
            self._stream.close()
            self.ended.set()

    def serve(self, sockets: Sequence[Path]) -> None:
        """Serve rows of the engines with these sockets from now on, and let node 0 know it."""
        self._services.update(row_services(sockets))
        serve = Serve(self._port.address, len(sockets))
        self._beat = msgspec.structs.replace(self._beat, serve=serve)

    def report_times(self, times: EngineTimes) -> None:
        """Let node 0 know how long the engines have been busy so far."""
        self._beat = msgspec.structs.replace(self._beat, times=times)

    def leave(self, why: str) -> None:
        """Let node 0 know that the engines take no new rows, and the reason."""
        self._beat = msgspec.structs.replace(self._beat, serve=None, why=why)
