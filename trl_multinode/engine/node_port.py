"""The port of a training node, for ranks of nodes without engines, in a thread of the local main process."""

import asyncio
import os
import secrets
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress

import msgspec
from torch.distributed import Store

from ..run.addresses import route_to
from ..run.topology import Topology
from ..run.versions import local_versions
from ..wire.handshake import EVERY_HOST, Pool
from ..wire.port import Port, Service
from ..wire.secret import pool_secret

MUST_AGREE = ("trl_multinode", "vllm")


def pool_of(store: Store) -> Pool:
    """Return the secret of the run's nodes, and the facts that they must agree on.

    Raises:
        `ConfigurationError`: if this node has no secret.
    """
    # the first one that comes gives the run its name
    return pool_of_run(store.compare_set("pool", "", secrets.token_hex(8)).decode())


def pool_of_run(run: str) -> Pool:
    """Return the same for the name of the run."""
    versions = local_versions()
    return Pool(pool_secret(), {"run": run} | {name: versions[name] for name in MUST_AGREE})


class Background:
    """Coroutine on an event loop of its own, in a thread, from the construction to its end or to `close`."""

    def __init__(self, main: Coroutine, name: str):
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(main)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.close()

    def close(self) -> None:
        """Cancel the coroutine, and wait for its end. A second call does nothing."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()


class NodePort(Background):
    """Port of this node, from the construction to `close`. Local main process only.

    Args:
        topology (`Topology`):
            Topology of this rank.
        store (`torch.distributed.Store`):
            Store of the run, in which other nodes find the port.
        services (`Mapping[str, Service]`):
            Services of the port.
        report (`Callable[[str], None]`):
            Function that prints a line about a refused peer.
    """

    def __init__(
        self,
        topology: Topology,
        store: Store,
        services: Mapping[str, Service],
        report: Callable[[str], None],
    ):
        # on the interface that leads to node 0, and on no other one. The launcher of a single node names the loopback
        host = EVERY_HOST
        if topology.num_nodes > 1:
            host = route_to(os.environ["MASTER_ADDR"]) or "127.0.0.1"
        port = Port(host, topology.node, pool_of(store), services, report)
        store.set(f"port/{topology.node}", msgspec.json.encode(port.address).decode())
        super().__init__(port.serve(), "node-port")
