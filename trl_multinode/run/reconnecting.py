"""Client of the run's store that opens its connection again after a reset."""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, cast

from torch.distributed import DistNetworkError, PrefixStore, Store

from ..errors import PeerFailureError
from .limits import file_limit_cure
from .reporter import report
from .topology import Topology

PROBE_S = 2.0  # limit of one attempt to reach the store's host
RETRY_S = 0.2
KEEP_ALIVE_S = 15  # between two probes of an idle connection
NO_REPLY = ("set", "multi_set")


class ReconnectingStore:
    """Client of a store, with the methods of torch's `Store`.

    A firewall, a failover or a restarted switch resets connections while both hosts go on. A call that fails with its
    connection is repeated on a new one. The store does not reply to a `set`; those without a later reply are repeated
    too. If the store had executed a call before the reset, it is executed twice; the keys of the run allow that:
    values are set to the same text, and counters are compared with "at least".

    Args:
        connect (`Callable[[float | None], Store]`):
            Function that opens a connection within so many seconds, or within the usual limit.
        address (`tuple[str, int]`):
            Host and port of the store.
        reopened (`Callable[[float], None]`):
            Function that is called with the seconds that a reset took.
    """

    limit_s: ClassVar[float] = (
        20.0  # seconds after which the store counts as gone; the same for all threads
    )

    def __init__(
        self,
        connect: Callable[[float | None], Store],
        address: tuple[str, int],
        reopened: Callable[[float], None],
    ):
        self._connect = connect
        self._address = address
        self._reopened = reopened
        self._client = self._open()
        self._opening = threading.Lock()
        # calls without a reply since the last one with a reply
        self._unconfirmed: list[Callable[[Store], Any]] = []

    def __getattr__(self, name: str) -> Any:
        """Return a method of the store that survives a reset."""
        return lambda *args: self.repeat(
            lambda client: getattr(client, name)(*args), has_reply=name not in NO_REPLY
        )

    def repeat(self, use: Callable[[Store], Any], has_reply: bool) -> Any:
        """Call `use` with the open connection, and again with a new one after a reset."""
        while True:
            client = self._client
            try:
                found = use(client)
            except DistNetworkError as error:
                self._connect_again(client, error)
                continue
            self._unconfirmed = [] if has_reply else [*self._unconfirmed, use]
            return found

    def _open(self, limit_s: float | None = None) -> Store:
        client = self._connect(limit_s)
        keep_alive(self._address[1], self.limit_s)
        return client

    def _connect_again(self, failed: Store, error: DistNetworkError) -> None:
        start = time.monotonic()
        with self._opening:
            while self._client is failed:
                try:
                    # torch's own attempts go on until their limit, also when nothing listens there any more. A
                    # launcher that is being killed closes its listening socket last, so the probe may still reach it
                    socket.create_connection(self._address, PROBE_S).close()
                    client = self._open(PROBE_S)
                    for use in self._unconfirmed:
                        use(client)
                    self._client = client
                    self._reopened(time.monotonic() - start)
                except ConnectionRefusedError:
                    raise error from None  # the launcher that hosted the store has ended
                except (OSError, DistNetworkError):
                    if time.monotonic() - start > self.limit_s:
                        raise error from None
                    time.sleep(RETRY_S)


def keep_alive(port: int, limit_s: float) -> None:
    """Let the kernel probe this process's connections to `port` while they are idle, and end those that are dead.

    Between two meetings a connection is idle for as long as a step takes. A firewall may forget it without a reset,
    and a call would then wait for a quarter of an hour. torch's store gives no access to its socket.
    """
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # no socket, not connected, or closed meanwhile
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as end:
                if (
                    end.family not in (socket.AF_INET, socket.AF_INET6)
                    or end.getpeername()[1] != port
                ):
                    continue
                end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                    end.setsockopt(socket.IPPROTO_TCP, option, KEEP_ALIVE_S)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(limit_s * 1000))


def prefixed(prefix: str, store: Store) -> Store:
    """Return a client with other keys that uses the connection of `store`, in the same thread."""
    if not isinstance(store, ReconnectingStore):
        return PrefixStore(prefix, store)
    return cast(Store, Prefixed(prefix, store))


class Prefixed:
    """Client with a prefix before all keys, on the connection of a [`ReconnectingStore`]."""

    def __init__(self, prefix: str, parent: ReconnectingStore):
        self._prefix = prefix
        self._parent = parent

    def __getattr__(self, name: str) -> Any:
        def use(client: Store, *args: Any) -> Any:
            return getattr(PrefixStore(self._prefix, client), name)(*args)

        return lambda *args: self._parent.repeat(
            lambda client: use(client, *args), has_reply=name not in NO_REPLY
        )


def open_store(
    connect: Callable[[float | None], Store], address: tuple[str, int], topology: Topology
) -> Store:
    """Open a client of the run's store; local main processes report each reset.

    Raises:
        `PeerFailureError`: if it cannot be reached; the message has the cure for a lack of file descriptors.
    """

    def reopened(seconds: float) -> None:
        if topology.is_local_main:
            report(
                f"{topology}: a connection to the run's store was reset; opened again after {seconds:.1f} s"
            )

    try:
        return cast(Store, ReconnectingStore(connect, address, reopened))
    except DistNetworkError as error:
        raise PeerFailureError(
            f"{topology} cannot connect to the run's store at {address[0]}:{address[1]}: "
            f"{str(error).splitlines()[0]}. {file_limit_cure(topology.world_size)}."
        ) from error
