"""Store of the nodes that the doctor examines together, at the address and port of the launch, after its roll-call."""

import time
from contextlib import suppress
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
        self._rank, self._nodes = rank, nodes
        limit = timedelta(seconds=STEP_S)
        try:
            self._store = dist.TCPStore(
                address, port, is_master=rank == 0, timeout=limit, wait_for_workers=False
            )
        except RuntimeError as error:
            raise NodeLost(
                f"node 0 cannot be reached at {address}:{port} after the roll-call ({error})"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave; node 0 waits for the others, whose requests it serves."""
        with suppress(RuntimeError):  # node 0 has ended
            self._store.add("left", 1)
            until = time.monotonic() + LEAVE_S
            while (
                self._rank == 0
                and self._store.add("left", 0) < self._nodes
                and time.monotonic() < until
            ):
                time.sleep(POLL_S)

    def gather(self, key: str, value: T, limit_s: float = STEP_S) -> list[T]:
        """Publish this node's part, and return the parts of all nodes in the order of their ranks.

        Raises:
            [`NodeLost`]: if one is missing after `limit_s` seconds.
        """
        until = time.monotonic() + limit_s
        keys = [f"{key}/{rank}" for rank in range(self._nodes)]
        try:
            self._store.set(keys[self._rank], msgspec.json.encode(value))
            while missing := [
                str(rank) for rank, one in enumerate(keys) if not self._store.check([one])
            ]:
                if time.monotonic() > until:
                    names = ", ".join(missing[:16])
                    raise NodeLost(
                        f"node {names} did not go on within {limit_s:.0f} s after the roll-call"
                    )
                time.sleep(POLL_S)
            return [msgspec.json.decode(self._store.get(one), type=type(value)) for one in keys]
        except RuntimeError:
            raise NodeLost("node 0, which serves the others, has ended") from None
