"""Ranks that enter a run with heartbeats, as a rank's host does, and a link between a node and the store to cut."""

import os
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

from store_host import topology_of

from trl_multinode.run.heartbeats.activity import RankActivity
from trl_multinode.run.heartbeats.beats import Beats
from trl_multinode.run.heartbeats.judges import Limits
from trl_multinode.run.meeting import Meeting
from trl_multinode.run.phases import Phases
from trl_multinode.run.store import connect_store
from trl_multinode.run.watch.watchdog import Watchdog

LIMIT_S = 3.0
STORE_S = 15.0  # of a store that does not respond; on a loaded machine it once took longer than `LIMIT_S`
LIMITS = Limits(heartbeat_s=LIMIT_S, stuck_s=60.0, start_s=60.0, beat_s=0.3)


@dataclass
class Rank:
    watch: Watchdog
    phases: Phases
    meeting: Meeting
    activity: RankActivity
    log: list[str] = field(default_factory=list)


def enter(rank: int, port: int, limits: Limits = LIMITS, synced: bool = True, store_s: float = STORE_S) -> Rank:
    """Start watch and heartbeats, as `NodeHost` does. A rank of node 1 may come through a link's port."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    phases = Phases()
    topology = topology_of(rank)
    watch = Watchdog(topology, lambda: phases.current)
    store = connect_store(topology, watch.run)
    watch.watch_local_ranks(store)
    meeting = Meeting(topology, store, lambda: f"in phase {phases.current}")
    activity = RankActivity(phases, meeting, lambda: 3, lambda phase: "")
    activity.synced = synced
    watch.add_chore(meeting.report_progress)
    Beats(topology, watch, limits, activity)
    watch.limit_store(store_s)
    print("up", flush=True)
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
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the `accept` that would keep the port open
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


def until(done, limit_s: float = 20.0) -> float:
    """Wait until `done()`, and return the seconds that it took."""
    start = time.monotonic()
    while not done():
        assert time.monotonic() - start < limit_s, "did not happen"
        time.sleep(0.02)
    return time.monotonic() - start
