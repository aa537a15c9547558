"""Services of a node for other nodes, and the engines of agents that join the run, as one of its ranks sees them."""

import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from ..engine.agents import (
    AGENTS,
    POOL_KEY,
    Agents,
    Measure,
    Members,
    Notice,
    Serve,
    start_of,
)
from ..engine.client import EnginePlace
from ..engine.fleet import EngineFleet
from ..engine.node_port import NodePort, pool_of
from ..engine.remote_rows import connect_rows, row_services
from ..engine.settings import EngineSettings
from ..run.reconnecting import StoreConnection
from ..run.store import STORE_TIMEOUT_S, connect_store
from ..weights.serving import WEIGHTS, WeightService
from ..weights.slot_updates import SlotUpdates
from .rank import RankContext

MEMBERS = "members"  # key of the newest membership's number; `members/<n>` has the n-th one
SILENT_S = 30.0  # after which an agent has left, if `heartbeat_timeout` is 0


class RemoteEngines:
    """Port of a node, and the agents of a run.

    The process with rank 0 gets the agents, and writes each membership, with its number, into the store. All ranks
    agree on a number in their meetings; one that has no engine left follows the newest number at once.

    Args:
        rank ([`RankContext`]), fleet (`EngineFleet`):
            The rank, and the engines of its node.

    Attributes:
        members (`Members`):
            Membership that this rank follows.
    """

    def __init__(self, rank: RankContext, fleet: EngineFleet):
        self._rank = rank
        self._fleet = fleet
        self._port: NodePort | None = None
        self._agents: Agents | None = None  # in the process with rank 0
        self._newest = Members()  # there
        self._agreed = 0  # number of the last membership in a meeting
        self._notice = Notice("", [])
        self.members = Members()
        # clock and filled seconds of the agents' engines at the last look
        self._clock_s = self._filled_s = 0.0

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
            services[WEIGHTS] = WeightService(sync).serve
        if rank.has_agents and topology.rank == 0:
            folder = self._fleet.folder / "model_of_agents"
            write_model(folder)
            self._store_of_port = connect_store(topology, rank.watch.run)
            services[AGENTS] = self._agents = Agents(
                start_of(settings, folder, topology.world_size),
                topology.num_nodes,
                self._changed,
                rank.settings.heartbeat_timeout or SILENT_S,
            )
        if services:
            self._port = NodePort(topology, rank.store, services, rank.report)

    def announce(self) -> None:
        """Write into the store where agents find the ports of all nodes. Rank 0 calls it."""
        rank = self._rank
        ports = [self._fleet.port_of(node) for node in range(rank.topology.num_nodes)]
        self._notice = Notice(pool_of(rank.store).facts["run"], ports)
        host, port = self.publish(None)
        host = host if rank.topology.num_nodes > 1 else socket.gethostname()
        rank.report(f"agents may join at {host}:{port}")

    def publish(self, measure: Measure | None) -> tuple[str, int]:
        """Write the notice of the run into the store, and return its address. Rank 0 calls it.

        Args:
            measure (`Measure`, *optional*):
                Use of the engines, for the scheduler of agents.
        """
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # without the prefix of a trainer, which agents do not know
        connection = StoreConnection(address, self._rank.topology, STORE_TIMEOUT_S)
        notice = msgspec.structs.replace(self._notice, measure=measure)
        text = msgspec.json.encode(notice).decode()
        connection.repeat(lambda store: store.set(POOL_KEY, text), has_reply=False)
        return address

    # ---- membership -------------------------------------------------------------------------------------------------

    def _changed(self, number: int, serve: Serve | None, text: str) -> None:
        """Write the next membership if an agent has joined or leaves. The thread of the port calls it."""
        rank, serving = self._rank, dict(self._newest.serving)
        serving.pop(number, None)
        if serve is not None:
            serving[number] = serve
        if serving != self._newest.serving:
            members = Members(self._newest.number + 1, serving)
            store = self._store_of_port
            store.set(f"{MEMBERS}/{members.number}", msgspec.json.encode(members).decode())
            store.set(MEMBERS, str(members.number))
            store.check([MEMBERS])  # `set` has no reply
            self._newest = members
        rank.report(f"the agent with number {number} {text}")
        rank.phase_file.mark(f"agent {number} {text}")

    @property
    def num_serving(self) -> int:
        """Number of engines that serve the run, those of the nodes included. Rank 0 reads it."""
        own = sum(node.engines for node in self._rank.topology.nodes)
        return own + self._newest.num_engines

    def news(self) -> list[str]:
        """Return the word with which rank 0 brings a new membership to a meeting, if there is one."""
        number = self._newest.number
        return [f"{MEMBERS}/{number}"] if number > self._agreed else []

    def follow(self, key: str = "") -> list[EnginePlace]:
        """Follow the membership with this key, by default the newest one. Main thread.

        Returns:
            `list[EnginePlace]`: engines that have joined since the last call.
        """
        store = self._rank.store
        if key:
            self._agreed = int(key.removeprefix(f"{MEMBERS}/"))
        elif store.check([MEMBERS]):
            key = f"{MEMBERS}/{store.get(MEMBERS).decode()}"
        else:
            return []
        members = msgspec.json.decode(store.get(key), type=Members)
        # this rank followed a newer one between two meetings
        if members.number < self.members.number:
            return []
        before, self.members = self.members, members
        pool, node, found = pool_of(store), self._rank.topology.node, []
        for number, serve in self.members.serving.items():
            if before.serving.get(number) == serve:
                continue
            address = serve.address
            for index in range(serve.engines):
                log = Path(f"engine{index}.log on {address.host}")
                connect = partial(connect_rows, address, index, node, pool, log)
                found.append(EnginePlace(number, index, connect, is_of_agent=True))
        return found

    def forget(self, number: int) -> None:
        """Take an agent for one that has not joined, because this rank has no connection to it."""
        self.members.serving.pop(number, None)

    def take_filled(self) -> float | None:
        """Return the share of the slots of the agents' engines in which rows ran since the last call. Rank 0 calls it.

        It is `None` without an agent, or if agents came or left meanwhile so that their sums say nothing.
        """
        times = list(self._agents.times.values()) if self._agents is not None else []
        before = self._clock_s, self._filled_s
        self._clock_s = sum(one.clock_s for one in times)
        self._filled_s = sum(one.slot_s for one in times)
        clock_s, filled_s = self._clock_s - before[0], self._filled_s - before[1]
        return filled_s / clock_s if clock_s > 0 and 0 <= filled_s <= clock_s else None

    def close(self) -> None:
        """Close the port. A second call does nothing."""
        if self._port is not None:
            self._port.close()
        self._port = None
