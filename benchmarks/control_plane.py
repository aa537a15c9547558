"""What does the control plane cost the store, and how fast does a failure reach all ranks of a large run?

    python benchmarks/control_plane.py [--worlds 448 1022] [--seconds 20]

Nodes of 7 ranks; each rank is a process, forked from one that has imported torch, with the watch thread, the meeting,
the heartbeats and the three connections of a real rank. The store is torch's TCPStore in a process of its own, as in
node 0's launcher. There is no trainer and no engine, and all nodes are on this machine, so the processes compete for
its cores; the store's CPU time does not depend on that.

    connections_per_rank    connections that the store has open, per rank
    startup_store_cpu_s     CPU time of the store from the first to the last rank's start
    store_cpu_share         CPU time of the store per second: `on` with heartbeats, `off` without, `control` once more
                            without; `on_over_off` is the ratio, 1.5 the limit
    failure_seen_by_all_s   from the report of a failure by one rank to the end of the last rank
    silence_seen_by_all_s   from the stop of a rank (SIGSTOP) to the end of the last other rank; 30 s of it are
                            `heartbeat_timeout`
"""

import argparse
import gc
import json
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

# torch looks the names of the store's clients up in the DNS: without a name server that takes 5 s for each
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


import torch
from torch.distributed import TCPStore

from trl_multinode.run.heartbeats.activity import RankActivity
from trl_multinode.run.heartbeats.beats import Beats
from trl_multinode.run.heartbeats.judges import Limits
from trl_multinode.run.limits import raise_file_limit
from trl_multinode.run.meeting import Meeting
from trl_multinode.run.phases import Phases
from trl_multinode.run.store import connect_store
from trl_multinode.run.topology import Topology
from trl_multinode.run.watch.watchdog import Watchdog

RESULTS = Path(__file__).parent / "results" / "control_plane.json"
WORLDS = (448, 1022)
HOST = "127.0.0.1"
PER_NODE = 7
SECONDS = 20.0  # of a steady state
SETTLE_S = 5.0
LIMITS = Limits(heartbeat_s=30.0, stuck_s=600.0, start_s=900.0)
FORK = get_context("fork")
LOG = Path(tempfile.gettempdir(), "control_plane.log")  # of all ranks


class Gate:
    """A pipe that many processes wait at until the parent opens it."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def open(self) -> None:
        os.close(self._write)

    def wait(self) -> None:
        """Wait in a child."""
        os.read(self._read, 1)

    def entered(self) -> None:
        """Drop the child's copy of the end that keeps the gate shut."""
        os.close(self._write)


def serve(port_of) -> None:
    raise_file_limit(launched=False)
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False
    )
    port_of.send(store.port)
    signal.pause()


def rank_process(
    rank: int, world: int, port: int, up: int, gates: list[Gate], failing: int
) -> None:
    for gate in gates:
        gate.entered()
    null = os.open(LOG, os.O_WRONLY | os.O_APPEND)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.environ |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(port)}
    node, local = divmod(rank, PER_NODE)
    topology = Topology(rank, world, local, PER_NODE, node, world // PER_NODE, launched=False)
    # torch's
    own = TCPStore(
        "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False
    )
    phases = Phases()
    watch = Watchdog(topology, lambda: phases.current)
    store = connect_store(topology, watch.run)
    watch.watch_local_ranks(store)
    meeting = Meeting(topology, store)
    activity = RankActivity(phases, meeting, lambda: 3, lambda phase: "")
    meeting.wait()
    os.write(up, b"u")
    with activity.inside(), phases("train"):
        gates[0].wait()
        Beats(watch, LIMITS, activity)
        activity.synced = True
        gates[1].wait()
        if rank == failing:
            watch.report("ValueError: a failure")
        gates[2].wait()  # never opens
    own.set("unused", "")


def cpu_s(pid: int) -> float:
    """Return the CPU time of all threads, in nanoseconds of resolution; /proc/<pid>/stat counts in 10 ms."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def share(pid: int, seconds: float) -> float:
    cpu, start = cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    return (cpu_s(pid) - cpu) / (time.monotonic() - start)


def connections(pid: int) -> int:
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            continue
    return sum(link.startswith("socket:") for link in links)


def measure(world: int, seconds: float, stop: bool) -> dict:
    """Run a world; `stop` measures the end after a SIGSTOP, otherwise after a failure."""
    receive, send = FORK.Pipe(duplex=False)
    server = FORK.Process(target=serve, args=(send,))
    server.start()
    port = receive.recv()
    begin, idle_sockets = cpu_s(server.pid), connections(server.pid)
    LOG.write_text("")
    gates = [Gate() for _ in range(3)]
    up_read, up_write = os.pipe()
    arguments = (world, port, up_write, gates, -1 if stop else world // 2)
    ranks = [FORK.Process(target=rank_process, args=(rank, *arguments)) for rank in range(world)]
    start = time.monotonic()
    try:
        for process in ranks:
            process.start()
        count = 0
        while count < world:
            count += len(os.read(up_read, 4096))
        found = {
            "ranks": world,
            "nodes": world // PER_NODE,
            "start_s": round(time.monotonic() - start, 1),
        }
        found["startup_store_cpu_s"] = round(cpu_s(server.pid) - begin, 2)
        found["connections_per_rank"] = round((connections(server.pid) - idle_sockets) / world, 2)
        shares = {}
        for name in () if stop else ("off", "control"):
            time.sleep(SETTLE_S)
            shares[name] = share(server.pid, seconds)
        gates[0].open()
        time.sleep(2 * SETTLE_S)
        if not stop:
            shares["on"] = share(server.pid, seconds)
            assert all(process.is_alive() for process in ranks), LOG.read_text()[-2000:]
            found["store_cpu_share"] = {name: round(value, 4) for name, value in shares.items()}
            found["on_over_off"] = round(2 * shares["on"] / (shares["off"] + shares["control"]), 3)
        stopped = ranks[world // 2]
        start = time.monotonic()
        if stop:
            os.kill(stopped.pid, signal.SIGSTOP)
        gates[1].open()
        for process in ranks:
            if not (stop and process is stopped):
                process.join(120)
                assert process.exitcode not in (0, None), (process.pid, process.exitcode)
        found["silence_seen_by_all_s" if stop else "failure_seen_by_all_s"] = round(
            time.monotonic() - start, 2
        )
        return found
    finally:
        for process in (*ranks, server):
            if process.pid is not None:
                process.kill()
                process.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worlds", type=int, nargs="*", default=WORLDS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    raise_file_limit(launched=False)
    gc.freeze()  # a collection in a fork would copy the parent's objects
    worlds = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for world in arguments.worlds:
        found = measure(world, arguments.seconds, stop=False)
        found |= {
            key: value
            for key, value in measure(world, 0.0, stop=True).items()
            if key.startswith("silence")
        }
        print(world, found, flush=True)
        worlds[str(world)] = found
        arguments.out.write_text(json.dumps(worlds, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
