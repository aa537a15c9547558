"""The run's rendezvous store in a process of its own, and ranks that enter a run on it."""

import os
import time
from datetime import timedelta

from forks import FORK

from trl_multinode.run.store import connect_store
from trl_multinode.run.topology import Topology
from trl_multinode.run.watch.watchdog import Watchdog

RANKS, PER_NODE = 4, 2


class StoreHost:
    """The run's rendezvous store in a process of its own, as the launcher of node 0 has it."""

    def __init__(self):
        receive, send = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=self._serve, args=(send,))
        self.process.start()
        assert receive.poll(20)
        self.port = receive.recv()

    @staticmethod
    def _serve(send) -> None:
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20), wait_for_workers=False)
        send.send(store.port)
        time.sleep(120)

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def topology_of(rank: int, launched: bool = False) -> Topology:
    node, local = divmod(rank, PER_NODE)
    return Topology(rank, RANKS, local, PER_NODE, node, RANKS // PER_NODE, launched)


def enter(rank: int, store: StoreHost, launched: bool = False) -> Watchdog:
    """What a rank's host does first."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    topology = topology_of(rank, launched)
    watch = Watchdog(topology, lambda: "reward")
    watch.watch_local_ranks(connect_store(topology, watch.run))
    print("up", flush=True)
    return watch
