"""Decision of rank 0 that all ranks follow at the same step, through the run's store and without a collective."""

from torch.distributed import Store

from .topology import Topology


class StepDecision:
    """Yes or no for each step: rank 0 decides before the step's collectives, all ranks read the decision after them.

    No rank waits: rank 0 has written the decision before it takes part in a collective without which the other ranks
    do not finish the step. It costs one small request to the store per rank and step.

    Args:
        topology (`Topology`):
            Topology of this rank.
        store (`torch.distributed.Store`, *optional*):
            Client of the thread that trains; `None` for a single process.
        name (`str`):
            Name of the decision, which separates its keys from others.
    """

    def __init__(self, topology: Topology, store: Store | None, name: str):
        self._topology = topology
        self._store = store
        self._name = name
        self._own = False

    def write(self, step: int, yes: bool) -> None:
        """Decide about `step`, before its first collective. Rank 0 calls it."""
        self._own = yes
        if self._store is not None:
            self._store.set(self._key(step), "yes" if yes else "no")
            self._store.delete_key(self._key(step - 2))  # all ranks have read it, because step - 1 has ended

    def read(self, step: int) -> bool:
        """Return rank 0's decision about `step`. Every rank calls it after the step's collectives."""
        if self._store is None or self._topology.rank == 0:
            return self._own
        return self._store.get(self._key(step)) == b"yes"

    def _key(self, step: int) -> str:
        return f"{self._name}/{step}"
