"""Services of a node for other nodes, and the engines of agents that join the run, as one of its ranks sees them."""

import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from ..engine.agents import AGENTS, POOL_KEY, Agents, Notice, Serve, start_of
from ..engine.client import EnginePlace
from ..engine.fleet import EngineFleet
from ..engine.node_port import NodePort, pool_of
from ..engine.remote_rows import connect_rows, row_services
from ..engine.settings import EngineSettings
from ..run.reconnecting import StoreConnection
from ..run.store import STORE_TIMEOUT_S, connect_store
from ..weights.serving import WeightService
from ..weights.slot_updates import SlotUpdates
from .rank import RankContext

NUMBER = "agents"  # key of how many times an agent has joined; `agent/<n>` has the n-th one
SILENT_S = 30.0  # after which an agent has left, if `heartbeat_timeout` is 0


class RemoteEngines:
    """Port of a node, and the agents of a run.

    The process with rank 0 gets the agents, and writes those whose engines serve into the store. Every rank looks
    there when it syncs, and when it has no engine left.

    Args:
        rank ([`RankContext`]), fleet (`EngineFleet`):
            The rank, and the engines of its node.
    """

    def __init__(self, rank: RankContext, fleet: EngineFleet):
        self._rank = rank
        self._fleet = fleet
        self._port: NodePort | None = None
        self._num_seen = 0

    def open(
        self,
        settings: EngineSettings,
        write_model: Callable[[Path], None],
        sync: Callable[[], SlotUpdates | None],
    ) -> None:
        """Open the port of this node, once its engines are ready. Local main process only.

        Args:
            settings (`EngineSettings`), write_model (`Callable[[Path], None]`):
                Settings and model folder with which engines start, on any node.
            sync (`Callable[[], SlotUpdates | None]`):
                Function that returns the weight sync of this rank.
        """
        rank, topology = self._rank, self._rank.topology
        services = row_services(self._fleet.sockets)
        if rank.has_agents:
            services |= WeightService(sync).services
        if rank.has_agents and topology.rank == 0:
            folder = self._fleet.folder / "model_of_agents"
            write_model(folder)
            services[AGENTS] = Agents(
                start_of(settings, folder, topology.world_size),
                topology.num_nodes,
                self._joined,
                lambda number: rank.report(f"the agent with number {number} has left"),
                rank.settings.heartbeat_timeout or SILENT_S,
            )
        if services:
            self._port = NodePort(topology, rank.store, services, rank.report)

    def announce(self) -> None:
        """Write into the store where agents find the ports of all nodes. Rank 0 calls it."""
        rank = self._rank
        ports = [self._fleet.port_of(node) for node in range(rank.topology.num_nodes)]
        notice = Notice(pool_of(rank.store).facts["run"], ports)
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # without the prefix of a trainer, which agents do not know
        connection = StoreConnection(address, rank.topology, STORE_TIMEOUT_S)
        text = msgspec.json.encode(notice).decode()
        connection.repeat(lambda store: store.set(POOL_KEY, text), has_reply=False)
        host = address[0] if rank.topology.num_nodes > 1 else socket.gethostname()
        rank.report(f"agents may join at {host}:{address[1]}")

    def _joined(self, number: int, serve: Serve) -> None:
        """Note an agent whose engines serve. The thread of the port calls it."""
        rank = self._rank
        store = connect_store(rank.topology, rank.watch.run)
        text = msgspec.json.encode(serve).decode()
        store.set(f"agent/{store.add(NUMBER, 0)}", text)
        store.add(NUMBER, 1)
        rank.report(f"the agent with number {number} serves with {serve.engines} engine(s)")

    def new_places(self) -> list[EnginePlace]:
        """Return the engines of the agents that have joined since the last call. Main thread."""
        found = []
        store, node = self._rank.store, self._rank.topology.node
        for number in range(self._num_seen, store.add(NUMBER, 0)):
            self._num_seen += 1
            serve = msgspec.json.decode(store.get(f"agent/{number}"), type=Serve)
            address, pool = serve.address, pool_of(store)
            for index in range(serve.engines):
                log = Path(f"engine{index}.log on {address.host}")
                connect = partial(connect_rows, address, index, node, pool, log)
                found.append(EnginePlace(address.node, index, connect, is_of_agent=True))
        return found

    def close(self) -> None:
        """Close the port. A second call does nothing."""
        if self._port is not None:
            self._port.close()
        self._port = None
