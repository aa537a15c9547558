"""What a trainer asks of the watch thread of its process."""

import signal
from collections.abc import Callable

from torch.distributed import HashStore, Store

from ..store import RunStore


class Attachment:
    """Functions of one trainer that the watch thread calls, each at its own moment.

    Args:
        store ([`RunStore`]):
            Keys of the trainer in the run's store.
        alone (`bool`):
            Whether the run is a single process. It has limits too, whose chores write and read as those of a launch.
        phase (`Callable[[], str]`):
            Function that returns the rank's current phase.
    """

    def __init__(self, store: RunStore, alone: bool, phase: Callable[[], str]):
        self.phase = phase
        self.cleanups: list[Callable[[], None]] = []
        self.ticks: list[Callable[[], None]] = []
        self.closings: list[Callable[[], None]] = []
        # returns `False` for a signal that ends the run at once
        self.on_stop: Callable[[signal.Signals], bool] = lambda stop: False
        # names a full disk
        self.explain: Callable[[BaseException], BaseException] = lambda error: error
        self.closes = (
            False  # whether this rank is in `close`, and waits for the others or has waited
        )
        self._chores: list[Callable[[Store], None]] = []
        self._store = store
        self._own_store = HashStore() if alone else None

    def add_cleanup(self, cleanup: Callable[[], None]) -> None:
        """Register a function that the watch thread calls before a failed run exits; it must not wait long."""
        self.cleanups.append(cleanup)

    def add_chore(self, chore: Callable[[Store], None]) -> None:
        """Register a function that the watch thread calls twice a second with its client of the store."""
        self._chores.append(chore)

    def add_tick(self, tick: Callable[[], None]) -> None:
        """Register a function that a thread calls twice a second, also while the store does not respond."""
        self.ticks.append(tick)

    def at_close(self, call: Callable[[], None]) -> None:
        """Register a function that is called when this trainer is closed, or when the run fails."""
        self.closings.append(call)

    def do_chores(self) -> None:
        """Call the registered functions. The watch thread calls this."""
        for chore in self._chores:
            if self._own_store is None:
                self._store.lend(chore)
            else:
                chore(self._own_store)

    def is_first(self, key: str) -> bool:
        """Return whether no other rank of this node has called this with `key`. Any thread may call it."""
        return self._store.is_first(key)

    def all_finished(self) -> bool:
        """Return whether every rank has called `close`."""
        return self._store.all_finished()
