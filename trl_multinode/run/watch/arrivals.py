"""Ranks that have imported this library, until each has a trainer: those that are missing or silent end the run."""

import os
import time
from collections.abc import Callable

import psutil
from torch.distributed import Store

from ..reporter import report
from ..silence import Silence
from ..topology import Topology
from ..values import listed

START_TIMEOUT_S = 900.0  # `engine_start_timeout`'s default, until a trainer has its settings
MISSING_EVERY_S = 30.0
LOOK_EVERY_S = 5.0
# between two signs of life of a rank without a trainer, which sends no heartbeats yet
ALIVE_EVERY_S = 10.0
HAS_TRAINER = "has a trainer"
ENDED_S = 10.0  # after which a launcher without a connection to the store has ended, and does not connect anew
NAMED_RANKS = 8


class Arrivals:
    """Chore of the watch thread until all ranks have imported this library, and then until all have a trainer.

    Args:
        topology (`Topology`):
            Topology of this rank.
        watch_rank (`Callable[[int, int], None]`):
            Function that is called with the number and the pid of each other rank of this node.
    """

    def __init__(self, topology: Topology, watch_rank: Callable[[int, int], None]):
        self._topology = topology
        self._watch_rank = watch_rank
        # not seen yet
        self._neighbours = {rank for rank in topology.local_ranks if rank != topology.rank}
        self._since = time.monotonic()
        self._next_look, self._next_line = 0.0, self._since + MISSING_EVERY_S
        self._registered = self._complete = False
        self._is_reporter: bool | None = None
        self._launcher_missing_since: float | None = None
        self._signs = Signs(topology)
        # time in which all ranks must have imported this library
        self.limit_s = START_TIMEOUT_S

    def look(self, store: Store, has_trainer: bool) -> str:
        """Register this rank, then look for the others; return the reason if the run must end without them."""
        self._signs.write(store, has_trainer)
        if self._complete:
            return self._signs.judge(store, self.limit_s) if has_trainer else ""
        self._register(store)
        now = time.monotonic()
        if now < self._next_look:
            return ""
        self._next_look = now + min(LOOK_EVERY_S, MISSING_EVERY_S)
        # a neighbour may register after the look for it above and be counted here; the next look finds it
        self._complete = not self._neighbours and store.add("here", 0) >= self._topology.world_size
        if self._complete:
            return ""
        has_others = self._topology.node == 0 and self._topology.num_nodes > 1
        if has_others and self._reports(store) and (ended := self._launcher_ended(store, now)):
            return ended
        return self._name_missing(store, now)

    def _register(self, store: Store) -> None:
        """Tell the other ranks that this one is here, and watch those of this node that are."""
        if not self._registered:
            store.set(f"pid/{self._topology.rank}", str(os.getpid()))
            store.add("here", 1)
            self._registered = True
        for rank in [rank for rank in self._neighbours if store.check([f"pid/{rank}"])]:
            self._neighbours.remove(rank)
            self._watch_rank(rank, int(store.get(f"pid/{rank}")))

    def _launcher_ended(self, store: Store, now: float) -> str:
        """Return why the run ends if the launcher of another node has ended before its ranks imported this library.

        No process of ours is there to say so. But every launcher is a client of the store, and so is every rank that
        has imported this library; the store is in the launcher of this node, where its connections can be counted.
        """
        missing = self._missing(store)
        registered = {*range(self._topology.world_size)} - {*missing}
        here = [rank for rank in registered if not store.check([f"left/{rank}"])]
        connections = num_connections(int(os.environ["MASTER_PORT"]))
        launchers = connections - len(here)
        # without the connections of its own ranks and launcher, the table of this node is not one to believe
        is_readable = connections > sum(rank in self._topology.local_ranks for rank in here)
        if launchers >= self._topology.num_nodes or not missing or not is_readable:
            self._launcher_missing_since = None
            return ""
        if self._launcher_missing_since is None:
            self._launcher_missing_since = now
        if now - self._launcher_missing_since < ENDED_S:
            return ""
        return (
            f"PeerFailureError: a launcher has ended, and {self._names(missing)} had not imported trl_multinode: "
            f"{launchers} of {self._topology.num_nodes} launchers are connected to the store of node 0. Read the "
            "output of these ranks: their script failed before that import, or their launch was stopped."
        )

    def _missing(self, store: Store) -> list[int]:
        every = range(self._topology.world_size)
        return [rank for rank in every if not store.check([f"pid/{rank}"])]

    def _reports(self, store: Store) -> bool:
        """Return whether this rank is the one of node 0, or the one of the other nodes, that names missing ranks."""
        if self._is_reporter is None:
            self._is_reporter = store.add(f"reporter/{min(self._topology.node, 1)}/import", 1) == 1
        return self._is_reporter

    def _names(self, ranks: list[int]) -> str:
        return listed([self._topology.name_of(rank) for rank in ranks], NAMED_RANKS)

    def _name_missing(self, store: Store, now: float) -> str:
        """Report the missing ranks now and then; return why the run ends if they have been missing for too long.

        One rank of node 0 and one of the other nodes do this, because it takes a request per rank.
        """
        seconds, limit_s = now - self._since, self.limit_s
        if now < self._next_line and seconds < limit_s:
            return ""
        self._next_line = now + MISSING_EVERY_S
        missing = self._missing(store) if self._reports(store) else []
        if not missing:
            return ""
        names = self._names(missing)
        if seconds < limit_s:
            report(f"{self._topology}: waiting {seconds:.0f} s for {names} to import trl_multinode")
            return ""
        return (
            f"PeerFailureError: {names} did not import trl_multinode within {limit_s:.0f} s. Read the output "
            "of these ranks; `engine_start_timeout` is the limit, once a trainer has its settings."
        )


def num_connections(port: int) -> int:
    """Return the number of connections of a server on this computer; 0 if the system does not show them."""
    try:
        found = psutil.net_connections("tcp")
    except (OSError, psutil.Error):
        return 0
    return sum(one.status == psutil.CONN_ESTABLISHED and one.laddr.port == port for one in found)


class Signs:
    """Signs of life of ranks without a trainer. A script may work there for as long as it likes, but not be silent.

    One rank with a trainer reads them: without it, its collectives would wait for a rank that was stopped before.
    """

    def __init__(self, topology: Topology):
        self._topology = topology
        self._told = False  # whether this rank has written that it has a trainer
        self._next_write = self._next_look = 0.0
        self._is_judge: bool | None = None
        self._silence = Silence(3 * ALIVE_EVERY_S)
        self._without = list(range(topology.world_size))

    def write(self, store: Store, has_trainer: bool) -> None:
        """Write this rank's sign, if it is time for one."""
        now = time.monotonic()
        if self._told or (now < self._next_write and not has_trainer):
            return
        store.set(f"alive/{self._topology.rank}", HAS_TRAINER if has_trainer else f"{now:.1f}")
        self._told, self._next_write = has_trainer, now + ALIVE_EVERY_S

    def judge(self, store: Store, limit_s: float) -> str:
        """Return why the run ends, if a rank has shown no sign of life for `limit_s` seconds."""
        now = time.monotonic()
        if not self._without or now < self._next_look:
            return ""
        self._next_look = now + ALIVE_EVERY_S
        if self._is_judge is None:
            self._is_judge = store.add("alive/judge", 1) == 1
        if not self._is_judge:
            return ""
        signs = {}
        for rank, sign in zip(
            self._without, store.multi_get([f"alive/{rank}" for rank in self._without]), strict=True
        ):
            if sign.decode() != HAS_TRAINER:
                signs[rank] = sign.decode()
        self._without = list(signs)
        for rank, silent_s in self._silence.look(now, signs).items():
            if silent_s > limit_s and not store.check([f"left/{rank}"]):
                return (
                    f"PeerFailureError: {self._topology.name_of(rank)} has shown no sign of life for "
                    f"{silent_s:.0f} s (`engine_start_timeout` {limit_s:g} s), and has no trainer yet: its process is "
                    "stopped or hangs, its node is gone, or its link to node 0 is cut"
                )
        return ""
