"""Store of the nodes that the doctor examines together, at the address and port of the launch, after its roll-call."""

import time
from datetime import timedelta
from typing import Self, TypeVar

import msgspec
import torch.distributed as dist

STEP_S = 60.0  # for what every node does without waiting
LEAVE_S = 10.0
POLL_S = 0.05

T = TypeVar("T")


class NodeLost(Exception):
    """A node did not publish its part; the message names it."""


class Exchange:
    """Store of one doctor's nodes. Rank 0 hosts it.

    Args:
        address (`str`), port (`int`):
            Address and port of the launch, which the roll-call has just left.
        rank (`int`), nodes (`int`):
            Rank of this node, and number of nodes.

    Raises:
        [`NodeLost`]: if node 0 does not host it.
    """

    def __init__(self, address: str, port: int, rank: int, nodes: int):
        self.address, self.port, self._rank, self._nodes = address, port, rank, nodes
        limit = timedelta(seconds=STEP_S)
        try:
            self._store = dist.TCPStore(address, port, is_master=rank == 0, timeout=limit, wait_for_workers=False)
        except RuntimeError as error:
            raise NodeLost(f"node 0 cannot be reached at {address}:{port} after the roll-call ({error})") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave; node 0 waits for the others, whose requests it serves."""
        if self._count("left") < self._nodes and self._rank == 0:
            until = time.monotonic() + LEAVE_S
            while time.monotonic() < until and self._store.add("left", 0) < self._nodes:
                time.sleep(POLL_S)

    def _count(self, key: str) -> int:
        try:
            return self._store.add(key, 1)
        except RuntimeError:  # node 0 has ended
            return self._nodes

    def publish(self, key: str, value: object) -> None:
        """Write this node's part."""
        try:
            self._store.set(f"{key}/{self._rank}", msgspec.json.encode(value))
        except RuntimeError:
            raise NodeLost("node 0, which serves the others, has ended") from None

    def collect(self, key: str, kind: type[T], limit_s: float = STEP_S) -> list[T]:
        """Return the parts of all nodes in the order of their ranks.

        Raises:
            [`NodeLost`]: if one is missing after `limit_s` seconds.
        """
        keys = [f"{key}/{rank}" for rank in range(self._nodes)]
        until = time.monotonic() + limit_s
        try:
            while missing := [rank for rank in range(self._nodes) if not self._store.check([keys[rank]])]:
                if time.monotonic() > until:
                    names = ", ".join(map(str, missing[:16]))
                    raise NodeLost(f"node {names} did not go on within {limit_s:.0f} s after the roll-call")
                time.sleep(POLL_S)
            return [msgspec.json.decode(self._store.get(one), type=kind) for one in keys]
        except RuntimeError:
            raise NodeLost("node 0, which serves the others, has ended") from None
