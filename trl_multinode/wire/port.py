"""Port of a node: the one address on which its processes can be reached from other nodes of the pool."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping

from .handshake import SERVICE, Facts, Pool, PortAddress, Verdict, check_peer
from .sockets import notice_cuts

PROOF_S = 5.0  # for the handshake of a connection
MAX_UNPROVEN = 64  # connections at once that have not proved the secret; further ones wait in the kernel's queue
MAX_NAMED = 64  # peers whose connection was closed that are reported
MAX_REASON = 200  # characters
# silence after which a link is given up; a rank may hold the interpreter for a minute
PEER_S = 120.0
ACCEPT_AGAIN_S = 0.1

Service = Callable[[socket.socket], Awaitable[None]]


class Port:
    """Listener of a node, which passes connections on to services once their peers have proved the secret.

    ```python
    port = Port("10.0.0.4", 3, pool_of(store), row_services(sockets), report)
    publish(port.address)
    await port.serve()      # until its task is cancelled
    ```

    Args:
        host (`str`):
            Address of this host on which to listen, and the only one; `run/addresses.py: route_to` returns it.
        node (`int`):
            Number of this node.
        pool (`Pool`):
            Secret and facts of the run.
        services (`Mapping[str, Service]`):
            Coroutine functions by name. They get a connected socket that does not block, which the port closes.
        report (`Callable[[str], None]`):
            Function that prints a line. Connections of a peer that are closed cost one line for its address, and one
            more if it has the secret.
    """

    def __init__(
        self,
        host: str,
        node: int,
        pool: Pool,
        services: Mapping[str, Service],
        report: Callable[[str], None],
    ):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._listener.setblocking(False)
        self.address = PortAddress(node, host, self._listener.getsockname()[1])
        self._secret = pool.secret
        self._facts = {**pool.facts, "node": str(node)}
        self._services = services
        self._report = report
        self._room = asyncio.Semaphore(MAX_UNPROVEN)
        self._named: set[str] = set()

    async def serve(self) -> None:
        """Serve until this task is cancelled; all connections are closed by then."""
        loop = asyncio.get_running_loop()
        with self._listener:
            async with asyncio.TaskGroup() as connections:
                while True:
                    try:
                        stream, (host, *_) = await loop.sock_accept(self._listener)
                    except OSError:  # the peer has left, or this process has no descriptor left
                        await asyncio.sleep(ACCEPT_AGAIN_S)
                        continue
                    await self._room.acquire()
                    connections.create_task(self._serve_one(stream, host))

    async def _serve_one(self, stream: socket.socket, host: str) -> None:
        with stream:
            try:
                async with asyncio.timeout(PROOF_S):
                    service = await check_peer(stream, self._secret, self._judge)
            except Exception as error:  # whatever a peer without the secret sends
                self._name(host, error)
                return
            finally:
                self._room.release()
            notice_cuts(stream, PEER_S)
            try:
                await self._services[service](stream)
            except* (OSError, EOFError):
                pass  # one of both ends has left
            except* Exception as group:
                self._name(f"{host}, which has the secret", group.exceptions[0])

    def _judge(self, facts: Facts) -> Verdict:
        if facts.get(SERVICE) not in self._services:
            return SERVICE, ", ".join(self._services)
        differing = dict(self._facts.items() ^ facts.items()).keys() - {SERVICE}
        name = min(differing, default="")
        return name, self._facts.get(name, "")

    def _name(self, who: str, error: Exception) -> None:
        """Report a peer whose connection is closed, unless it was named before: a flood must not fill a log."""
        if who not in self._named and len(self._named) < MAX_NAMED:
            self._named.add(who)
            why = f"{type(error).__name__}: {error}"[:MAX_REASON]
            self._report(
                f"{self.address} closes a connection of {who} ({why}). Later ones are not reported."
            )
