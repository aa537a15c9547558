"""Process that measures the links of this node: `python -m trl_multinode.tools.doctor.ring JSON`.

It is a process of its own, because NCCL aborts its process when a transfer hangs. It joins the others through the
store of the doctor, prints its links as JSON, and ends. Each link is measured alone, in rounds in which no node takes
part in two transfers, so a slow link cannot slow down another one. On GPUs each pair of GPUs of one index is a link of
its own, because a node often has a NIC for each.
"""

import json
import sys
import time
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from .links import Link, rounds_of_ring

CHUNK_BYTES = {"gloo": 4 << 20, "nccl": 64 << 20}
TRANSFER_S = 0.5  # of one link
MOST_CHUNKS = 256
PINGS = 10
LIMIT_S = 60.0  # for one transfer, and for the connections between all


class RingPlan(msgspec.Struct, frozen=True):
    """Order of the doctor to this process."""

    rank: int
    nodes: int
    address: str  # of the store
    port: int
    backend: str
    gpus: int = 0  # of each node; 0: one link over gloo


def main() -> None:
    """Measure all links of this node, and print those that it receives."""
    plan = msgspec.json.decode(sys.argv[1], type=RingPlan)
    limit = timedelta(seconds=LIMIT_S)
    store = dist.TCPStore(
        plan.address, plan.port, is_master=False, timeout=limit, wait_for_workers=False
    )
    dist.init_process_group(
        plan.backend,
        store=dist.PrefixStore("ring", store),
        rank=plan.rank,
        world_size=plan.nodes,
        timeout=limit,
    )
    found = []
    for gpu in [*range(plan.gpus)] or [None]:
        found += Ring(plan, store, gpu).measure()
    print(json.dumps(msgspec.to_builtins(found)), flush=True)
    dist.destroy_process_group()


class Ring:
    """One ring through all nodes.

    Args:
        plan ([`RingPlan`]):
            Nodes and backend.
        store (`torch.distributed.Store`):
            Store of the doctor.
        gpu (`int`, *optional*):
            Index of the GPU at both ends of each link; `None` for host memory.
    """

    def __init__(self, plan: RingPlan, store: dist.Store, gpu: int | None):
        self._plan, self._gpu = plan, gpu
        self._store = dist.PrefixStore(f"ring of {gpu}", store)
        device = _choose_device(gpu)
        # A communicator of NCCL belongs to the device of its first transfer
        self._group = dist.group.WORLD if gpu is None else dist.new_group(backend=plan.backend)
        self._chunk = torch.ones(CHUNK_BYTES[plan.backend], dtype=torch.uint8, device=device)
        self._ping = torch.ones(1, dtype=torch.uint8, device=device)

    def measure(self) -> list[Link]:
        """Take part in all rounds, and return the links that end here."""
        rank, nodes = self._plan.rank, self._plan.nodes
        before, after = (rank - 1) % nodes, (rank + 1) % nodes
        found = []
        for number, senders in enumerate(rounds_of_ring(nodes)):
            self._meet(number)
            if rank in senders:
                self._send_to(after)
            elif before in senders:
                found.append(self._receive_from(before))
        return found

    def _meet(self, number: int) -> None:
        """Wait until all nodes have ended the round before."""
        if self._store.add(f"here/{number}", 1) == self._plan.nodes:
            self._store.set(f"all/{number}", "")
        self._store.wait([f"all/{number}"])

    def _send_to(self, peer: int) -> None:
        for _ in range(1 + PINGS):
            self._answer(peer, [self._ping])
        self._answer(peer, [self._chunk])
        count = int(self._store.get(f"chunks/{self._plan.rank}"))  # it waits for the receiver
        self._answer(peer, [self._chunk] * count)

    def _answer(self, peer: int, tensors: list[torch.Tensor]) -> None:
        """Send tensors as soon as the receiver's clock runs."""
        dist.recv(self._ping, peer, group=self._group)
        for tensor in tensors:
            dist.send(tensor, peer, group=self._group)
        self._finish()

    def _receive_from(self, peer: int) -> Link:
        self._seconds(peer, [self._ping])  # the first one opens the connection
        round_trips = sorted(self._seconds(peer, [self._ping]) for _ in range(PINGS))
        count = min(MOST_CHUNKS, max(1, round(TRANSFER_S / self._seconds(peer, [self._chunk]))))
        self._store.set(f"chunks/{peer}", str(count))
        seconds = self._seconds(peer, [self._chunk] * count)
        return Link(
            sender=peer,
            receiver=self._plan.rank,
            gbit_per_s=round(8e-9 * count * self._chunk.numel() / seconds, 4),
            round_trip_ms=round(1e3 * round_trips[PINGS // 2], 4),
            device="cpu" if self._gpu is None else str(self._gpu),
        )

    def _seconds(self, peer: int, tensors: list[torch.Tensor]) -> float:
        """Request tensors, and return the seconds until all are here."""
        start = time.perf_counter()
        dist.send(self._ping, peer, group=self._group)
        for tensor in tensors:
            dist.recv(tensor, peer, group=self._group)
        self._finish()
        return time.perf_counter() - start

    def _finish(self) -> None:
        """Wait for the device; transfers of NCCL only begin when they return."""
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)


def _choose_device(gpu: int | None) -> torch.device:
    """Return the device of the transfers; NCCL also takes the current device."""
    if gpu is None:
        return torch.device("cpu")
    torch.cuda.set_device(gpu)
    return torch.device("cuda", gpu)


if __name__ == "__main__":
    main()
