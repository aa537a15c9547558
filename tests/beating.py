"""Ranks that enter a run with heartbeats, as a rank's host does, and a link between a node and the store to cut."""

import json
import os
import re
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass, field

import forks
import pytest
from store_host import PER_NODE, StoreHost, topology_of
from waiting import HANG_S, until

from trl_multinode.run.heartbeats import beats
from trl_multinode.run.heartbeats.activity import RankActivity
from trl_multinode.run.heartbeats.beats import Beats
from trl_multinode.run.heartbeats.judges import Limits
from trl_multinode.run.meeting import Meeting
from trl_multinode.run.phases import Phases
from trl_multinode.run.reconnecting import StoreConnection
from trl_multinode.run.store import connect_store
from trl_multinode.run.watch.watchdog import Watchdog

LIMIT_S = 6.0  # of heartbeats, in the tests that show this limit; all others end only a hang
STORE_S = HANG_S
LIMITS = Limits(heartbeat_s=HANG_S, stuck_s=HANG_S, start_s=HANG_S)


@dataclass
class Rank:
    watch: Watchdog
    phases: Phases
    meeting: Meeting
    activity: RankActivity
    log: list[str] = field(default_factory=list)


def enter(
    rank: int, port: int, limits: Limits = LIMITS, synced: bool = True, store_s: float = STORE_S
) -> Rank:
    """Start watch and heartbeats, as `NodeHost` does. A rank of node 1 may come through a link's port."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    beats.BEAT_S = 0.3
    phases = Phases()
    topology = topology_of(rank)
    watch = Watchdog(topology, lambda: phases.current)
    store = connect_store(topology, watch.run)
    watch.watch_local_ranks(store)
    meeting = Meeting(topology, store)
    activity = RankActivity(phases, meeting, lambda: 3, lambda phase: "")
    activity.synced = synced
    Beats(watch, limits, activity)
    StoreConnection.limit_s = store_s
    print(f"up, run {watch.run}", flush=True)
    return Rank(watch, phases, meeting, activity)


class Link:
    """A connection of a node to the store, through a port of its own, which a test can cut or reset."""

    def __init__(self, port: int):
        self._target = port
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._open = threading.Event()
        self._open.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Let nothing pass, in either direction, and close nothing."""
        self._open.clear()

    def heal(self) -> None:
        self._open.set()

    @property
    def num_open(self) -> int:
        """Number of connections since the last reset."""
        return len(self._pairs)

    def reset(self) -> int:
        """Reset all connections, as a firewall does; return their number. New ones are welcome."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    end.shutdown(socket.SHUT_RD)  # wakes the thread that reads it
                    end.close()
        return len(pairs)

    def close(self) -> None:
        with suppress(OSError):
            # ends the `accept` that would keep the port open
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.heal()
        self.reset()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._pairs.append((near, far))
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._open.wait()
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


class BeatReader:
    """
    Reader of the beats that the ranks write into the store.

    Args:
        store (`StoreHost`):
            Store of the run.
        first (`forks.Rank`):
            A rank that has printed `up, run <number>`.
    """

    def __init__(self, store: StoreHost, first: forks.Rank):
        first.wait_for("up, run ")
        run = int(re.search(r"up, run (\d+)", first.text)[1])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MASTER_ADDR", "127.0.0.1")
            patch.setenv("MASTER_PORT", str(store.port))
            self._client = connect_store(topology_of(0), run)

    def wait(self, num_beats: int, doing: str = "") -> None:
        """Wait until each node has written `num_beats` more beats, the last with the frame `doing` for all ranks."""
        for key in ("beat/0", "beat/1"):
            for _ in range(num_beats):
                seen = self._beat(key)
                until(lambda key=key, seen=seen: self._beat(key) != seen, f"a new {key}")
            until(
                lambda key=key: self._do_all(key, doing),
                lambda key=key: f"all in {doing}: {self._beat(key)}",
            )

    def _beat(self, key: str) -> str:
        return self._client.get(key).decode() if self._client.check([key]) else ""

    def _do_all(self, key: str, doing: str) -> bool:
        states = json.loads(self._beat(key).partition(" ")[2])
        return len(states) == PER_NODE and all(doing in state["frames"] for state in states)
