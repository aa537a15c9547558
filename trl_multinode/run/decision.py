"""Decision about the end of a step that all ranks follow, through the run's store, without a wait or a collective."""

from torch.distributed import Store

from .topology import Topology


class StepDecision:
    """Yes or no at the end of each step, the same on all ranks, because the first rank that comes decides.

    It decides by an atomic compare-and-set of one key per step: no, unless the rank itself asks for yes. A rank may
    also ask early, while its step is under way. That is certain only before its last collective of the step, without
    which no other rank comes to the end. It costs one request to the store per rank and step.

    ```python
    save = StepDecision(topology, store, "save")
    save.begin_training()
    save.ask(8)             # any rank; nothing happens if the ranks have begun to read
    if save.read(8): ...    # every rank, after its last collective of the step
    ```

    Args:
        topology (`Topology`):
            Topology of this rank.
        store (`torch.distributed.Store`):
            Client of the thread that trains.
        name (`str`):
            Name of the decision, which separates its keys from others.
    """

    def __init__(self, topology: Topology, store: Store, name: str):
        self._topology = topology
        self._store = store
        self._name = name
        self._training = 0  # calls of `train` so far, the same number on all ranks

    def begin_training(self) -> None:
        """Begin to count steps anew. Every rank calls it equally often."""
        self._training += 1

    def ask(self, step: int, store: Store | None = None) -> bool:
        """Ask for yes at the end of `step`; return whether that is decided.

        Args:
            step (`int`):
                Number of the step, counted from 1.
            store (`torch.distributed.Store`, *optional*):
                Client of the calling thread, if that is not the thread that trains.
        """
        client = store or self._store
        return client.compare_set(self._key(step), "", "yes") == b"yes"

    def read(self, step: int, asks: bool = False) -> bool:
        """Return the decision about `step`, which is yes if this rank comes first and `asks`. Every rank calls it."""
        decision = self._store.compare_set(self._key(step), "", "yes" if asks else "no")
        if self._topology.rank == 0:
            # all ranks have read it, because step - 1 has ended
            self._store.delete_key(self._key(step - 2))
        return decision == b"yes"

    def _key(self, step: int) -> str:
        return f"{self._name}/{self._training}/{step}"
