"""End of a rank's engines: with the script, with its trainer, or when a later trainer needs their GPUs."""

import atexit
import gc
import threading
import traceback
import weakref
from collections.abc import Callable

from ..engine.settings import gpu_share
from .presence import Presence
from .rank import RankContext
from .updates import Updates

# those of this process whose engines run
_with_engines: "weakref.WeakSet[Closing]" = weakref.WeakSet()


class Closing:
    """End of the engines of one rank.

    Args:
        rank ([`RankContext`]), presence ([`Presence`]), updates ([`Updates`]):
            The rank, what it tells the others, and its engines.
    """

    def __init__(self, rank: RankContext, presence: Presence, updates: Updates):
        self._rank = rank
        self._presence = presence
        self._updates = updates
        self._lock = threading.Lock()
        atexit.register(self.at_exit)

    def on_collected(self) -> None:
        """Let the watch thread end the engines of a trainer that is garbage-collected.

        In a launch, other ranks of the node may still use the engines, so these end when the next trainer is built. It
        takes no lock, because the garbage collector calls it in any thread.
        """
        if not self._rank.topology.launched:
            self._rank.watch.end_with(self._unattended)

    def _unattended(self) -> None:
        try:
            self.close()
        except Exception:  # the process goes on: a notebook, for example
            traceback.print_exc()

    def make_room(self) -> None:
        """End the engines of this process's earlier trainers that are collected, or whose GPUs the new engines need.

        All ranks of the node are building the new trainer now, so none uses the earlier engines.
        """
        earlier = [one for one in _with_engines if one is not self]
        if earlier:
            gc.collect()  # a trainer refers to itself, so that it outlives its last name until a collection
        for one in earlier:
            is_collected = one._rank.is_collected
            if not (is_collected or one._takes_gpus_of(self)):
                continue
            if self._rank.topology.is_local_main and not is_collected:
                self._rank.report(
                    "the new trainer's engines need the GPUs of an earlier trainer's engines, which end now"
                )
            if one._rank.topology.launched:
                one.end_engines()
            else:
                one.close()
        _with_engines.add(self)

    def _takes_gpus_of(self, other: "Closing") -> bool:
        """Return whether a GPU would have to give the engines of both more memory than it has."""
        ranks = (self._rank, other._rank)
        mine, theirs = ({gpu for gpus in rank.devices.per_engine for gpu in gpus} for rank in ranks)
        return (
            bool(mine & theirs)
            and sum(gpu_share(rank.settings, rank.devices) for rank in ranks) > 1.0
        )

    def close(self) -> None:
        """Shut the engines down cleanly. `atexit` calls this, and the watch thread for a trainer that is collected; a
        script may call it earlier, and more than once. The ranks of a launch wait for each other."""
        self._close(self._rank.watch.close)

    def at_exit(self) -> None:
        self._close(self._rank.watch.close_at_exit)

    def _close(self, close_watch: Callable[[], None]) -> None:
        self._presence.end()
        with self._lock:
            close_watch()
            self.end_engines()
            atexit.unregister(self.at_exit)

    def end_engines(self) -> None:
        """End the engines, and drop all large objects: `atexit` would keep them, and the next trainer needs the
        memory."""
        self._rank.watch.forget_processes()
        self._updates.end()
        _with_engines.discard(self)
