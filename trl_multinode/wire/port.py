"""Port of a node: the one address on which its processes can be reached from other nodes of the pool."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping

from .handshake import Claim, Pool, PortAddress, Verdict, check_peer, identity_at
from .sockets import notice_cuts

PROOF_S = 5.0  # for the handshake of a connection
MAX_UNPROVEN = 64  # connections at once that have not proved the secret
MAX_NAMED = 64  # addresses of refused peers that are reported
PEER_S = (
    120.0  # silence after which a link is given up; a rank may hold the interpreter for a minute
)
BACKLOG = 128
MAX_REASON = 200  # characters
ACCEPT_AGAIN_S = 0.1

Service = Callable[[socket.socket], Awaitable[None]]


class Port:
    """Listener of a node, which passes connections on to services once their peers have proved the secret.

    ```python
    port = Port("10.0.0.4", 3, pool, row_services(sockets), report)
    publish(port.address)
    await port.serve()      # until its task is cancelled
    ```

    Args:
        host (`str`):
            Address of this host on which to listen, and the only one; `run/addresses.py: route_to` returns it.
        node (`int`):
            Number of this node.
        pool (`Pool`):
            Secret, and facts that peers must agree on.
        services (`Mapping[tuple[str, int], Service]`):
            Coroutine functions by role and index of the engine. They get a connected socket, which the port closes.
        report (`Callable[[str], None]`):
            Function that prints a line. A peer without the secret causes one line for its address, never more.
    """

    def __init__(
        self,
        host: str,
        node: int,
        pool: Pool,
        services: Mapping[tuple[str, int], Service],
        report: Callable[[str], None],
    ):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self._listener.setblocking(False)
        self.address = PortAddress(node, host, self._listener.getsockname()[1])
        self._secret = pool.secret
        self._identity = identity_at(pool, node)
        self._services = services
        self._report = report
        self._unproven: set[asyncio.Task | None] = set()
        self._named: set[str] = set()  # addresses of refused peers

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
                    else:
                        self._begin(connections, stream, host)

    def _begin(self, connections: asyncio.TaskGroup, stream: socket.socket, host: str) -> None:
        if len(self._unproven) >= MAX_UNPROVEN:
            stream.close()
            self._name(host, f"{MAX_UNPROVEN} connections have not proved the secret yet")
            return
        task = connections.create_task(self._serve_one(stream, host))
        self._unproven.add(task)

        def end(task: asyncio.Task) -> None:  # also of a task that was cancelled before it began
            self._unproven.discard(task)
            stream.close()

        task.add_done_callback(end)

    async def _serve_one(self, stream: socket.socket, host: str) -> None:
        try:
            async with asyncio.timeout(PROOF_S):
                claim = await check_peer(stream, self._secret, self._judge)
        except Exception as error:  # whatever a peer without the secret sends
            self._name(host, f"{type(error).__name__}: {error}")
            return
        self._unproven.discard(asyncio.current_task())
        notice_cuts(stream, PEER_S)
        try:
            await self._services[claim.role, claim.engine](stream)
        except* (OSError, EOFError):
            pass  # one of both ends has left
        except* Exception as group:
            first = group.exceptions[0]
            what = " ".join(f"{type(first).__name__}: {first}".split())[:MAX_REASON]
            self._report(f"{self.address} closed a connection of {host}: {what}")

    def _judge(self, claim: Claim) -> Verdict:
        for name in self._identity | claim.identity:
            expected = self._identity.get(name, "")
            if claim.identity.get(name) != expected:
                return Verdict(name, expected)
        if (claim.role, claim.engine) not in self._services:
            served = ", ".join(f"{role} {engine}" for role, engine in sorted(self._services))
            return Verdict("engine", served or "none")
        return Verdict()

    def _name(self, host: str, why: str) -> None:
        """Report a refused peer, unless its address was named before: a flood must not fill a log."""
        if host not in self._named and len(self._named) < MAX_NAMED:
            self._named.add(host)
            self._report(f"{self.address} refuses {host} ({why}). This address is not named again.")
