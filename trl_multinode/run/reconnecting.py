"""Client of the run's store that opens its connection again after a reset."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar, cast

from torch.distributed import DistNetworkError, PrefixStore, Store, TCPStore

from ..wire.sockets import notice_cuts
from .reporter import report
from .topology import Topology

PROBE_S = 2.0  # limit of one attempt to reach the store's host
RETRY_S = 0.2
NO_REPLY = ("set", "multi_set")


class StoreConnection:
    """Connection to the run's store. Local main processes report each reset.

    A firewall, a failover or a restarted switch resets connections while both hosts go on. A call that fails with its
    connection is repeated on a new one. The store does not reply to a `set`; those without a later reply are repeated
    too. If the store had executed a call before the reset, it is executed twice; the keys of the run allow that:
    values are set to the same text, counters are compared with "at least", and meetings have the ranks that came.

    Args:
        address (`tuple[str, int]`):
            Host and port of the store.
        topology (`Topology`):
            Topology of this rank.
        timeout_s (`float`):
            Limit of a request, and of the first attempt to connect.
    """

    # seconds after which the store counts as gone; the same for all threads
    limit_s: ClassVar[float] = 20.0

    def __init__(self, address: tuple[str, int], topology: Topology, timeout_s: float):
        self._address = address
        self._topology = topology
        self._timeout_s = timeout_s
        self._client = self._open(timeout_s)
        self._opening = threading.Lock()
        # calls without a reply since the last one with a reply
        self._unconfirmed: list[Callable[[Store], Any]] = []

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

    def _open(self, limit_s: float) -> Store:
        client = TCPStore(
            *self._address,
            is_master=False,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
        )
        client.set_timeout(timedelta(seconds=self._timeout_s))
        # between two meetings a connection is idle for as long as a step takes. A firewall may forget it without a
        # reset, and a call would then wait for a quarter of an hour
        for end in connections_to(self._address[1]):
            notice_cuts(end, self.limit_s)
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
                    if self._topology.is_local_main:
                        report(
                            f"{self._topology}: a connection to the run's store was reset; opened again after "
                            f"{time.monotonic() - start:.1f} s"
                        )
                except ConnectionRefusedError:
                    raise error from None  # the launcher that hosted the store has ended
                except (OSError, DistNetworkError):
                    if time.monotonic() - start > self.limit_s:
                        raise error from None
                    time.sleep(RETRY_S)


def connections_to(port: int) -> Iterator[socket.socket]:
    """Yield this process's connections to a port of any host: torch's store gives no access to its socket."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # no socket, not connected, or closed meanwhile
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as end:
                is_tcp = end.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and end.getpeername()[1] == port:
                    yield end


class ReconnectingStore:
    """Client of the run's store, with the methods of torch's `Store`, which survive a reset.

    Args:
        connection ([`StoreConnection`]):
            Connection, which the clients of one thread share.
        prefix (`str`):
            Prefix before all keys.
    """

    def __init__(self, connection: StoreConnection, prefix: str):
        self.connection = connection
        self.prefix = prefix

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.connection.repeat(
            lambda client: getattr(PrefixStore(self.prefix, client), name)(*args),
            has_reply=name not in NO_REPLY,
        )


def prefixed(prefix: str, store: Store) -> Store:
    """Return a client with other keys that uses the connection of `store`, in the same thread."""
    if not isinstance(store, ReconnectingStore):
        return PrefixStore(prefix, store)
    return cast(Store, ReconnectingStore(store.connection, f"{store.prefix}/{prefix}"))
