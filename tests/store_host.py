"""The run's rendezvous store in a process of its own, and ranks that enter a run on it."""

import os
import time
from datetime import timedelta
from pathlib import Path

from forks import FORK
from waiting import HANG_S

from trl_multinode.run.begin import begin_run
from trl_multinode.run.store import connect_store
from trl_multinode.run.topology import Topology
from trl_multinode.run.watch import early
from trl_multinode.run.watch.watchdog import Watchdog

RANKS, PER_NODE = 4, 2
FAILED = "[trl_multinode] the run failed: "  # begin of the last line of a rank whose run failed


class StoreHost:
    """The run's rendezvous store in a process of its own, as the launcher of node 0 has it, and its other client."""

    def __init__(self):
        receive, send = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=self._serve, args=(send,))
        self.process.start()
        assert receive.poll(HANG_S)
        self.port = receive.recv()
        self.launcher = FORK.Process(target=self._connect, args=(send,))
        self.launcher.start()
        assert receive.poll(HANG_S)
        receive.recv()

    @staticmethod
    def _serve(send) -> None:
        from torch.distributed import TCPStore

        store = TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            timeout=timedelta(seconds=HANG_S),
            wait_for_workers=False,
        )
        send.send(store.port)
        time.sleep(HANG_S)  # a test that was killed leaves it behind for no longer

    def _connect(self, send) -> None:
        """Be a client of the store, as the launcher of node 1 is."""
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)
        send.send(store.port)
        time.sleep(HANG_S)

    def end_launcher(self) -> None:
        """End the launcher of node 1."""
        self.launcher.kill()
        self.launcher.join()

    def end(self) -> None:
        self.end_launcher()
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


def launched_variables(rank: int, store: StoreHost) -> dict[str, str]:
    """What torchrun sets for a rank of 2 nodes of 2 ranks."""
    return {
        "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": str(rank // 2), "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


def enter_early(rank: int, store: StoreHost) -> None:
    """What the import does in a rank of a launch."""
    os.environ.update(launched_variables(rank, store))
    early._early = None
    early.start()
    assert early._early is not None


def begin_early(rank: int, store: StoreHost, output_dir: Path) -> Watchdog:
    """What the host of a trainer does first."""
    enter_early(rank, store)
    watch = Watchdog(topology_of(rank, launched=True), lambda: "set-up")
    with watch.guard():
        begin_run(watch, output_dir / "_multinode", lambda: 7, HANG_S)
    print("begun", flush=True)
    return watch


def num_finished(watch: Watchdog) -> int:
    """Return the number of ranks that have closed this trainer."""
    found: list[int] = []
    watch.store.lend(lambda client: found.append(client.add("done", 0)))
    return found[0]
