"""End of a rank's host: with the script, with its trainer, or when a later trainer needs the engines' GPUs."""

import atexit
import gc
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

from ..engine.fleet import EngineFleet
from ..engine.node_engines import NodeEngines
from ..engine.settings import gpu_share
from ..node_settings import NodeSettings
from ..run.progress import ProgressLines
from ..run.topology import EngineDevices, Topology
from ..run.warn_once import WarnOnce
from ..run.watch.watchdog import Watchdog
from ..weights.sync import WeightSync

_with_engines: "weakref.WeakSet[EndingHost]" = weakref.WeakSet()  # hosts of this process whose engines run


class EndingHost:
    """Base class of [`NodeHost`] with everything that ends its engines."""

    settings: NodeSettings
    topology: Topology
    devices: EngineDevices
    watch: Watchdog
    step: Callable[[], int]
    engines: NodeEngines | None
    ahead_engines: NodeEngines | None
    _fleet: EngineFleet
    _sync: WeightSync | None
    _progress_lines: ProgressLines
    _warn_once: WarnOnce
    _closing: threading.Lock
    _trainer: weakref.ref | None
    _ends: bool
    _model: Any
    _base: Any
    _report: Callable[[str], None]

    def follow(self, trainer: Any) -> None:
        """Read the optimizer steps of `trainer`, and end the engines when it is garbage-collected.

        This object keeps no reference to the trainer: `atexit` and the watchdog keep this object, and thus would keep
        the trainer too.
        """
        self._trainer = followed = weakref.ref(trainer, self._on_collected)
        last = 0

        def step() -> int:
            nonlocal last
            if (alive := followed()) is not None:
                last = alive.state.global_step
            return last

        self.step = step

    def _on_collected(self, _: weakref.ref) -> None:
        """Let the watch thread end the engines. The garbage collector calls this in any thread, so it takes no lock.

        In a launch, other ranks of the node may still use the engines, so these end when the next trainer is built.
        """
        if not self.topology.launched:
            self.watch.end_with(self._close_unattended)

    def _close_unattended(self) -> None:
        try:
            self.close()
        except Exception:  # the process goes on: a notebook, for example
            traceback.print_exc()

    def _make_room(self) -> None:
        """End the engines of this process's earlier trainers that are collected, or whose GPUs the new engines need.

        All ranks of the node are building the new trainer now, so none uses the earlier engines.
        """
        earlier = [host for host in _with_engines if host is not self]
        if earlier:
            gc.collect()  # a trainer refers to itself, so that it outlives its last name until a collection
        for host in earlier:
            is_collected = host._trainer is not None and host._trainer() is None
            if is_collected or not host._leaves_room_for(self):
                if self.topology.is_local_main and not is_collected:
                    self._report(
                        "the new trainer's engines need the GPUs of an earlier trainer's engines, which end now"
                    )
                host._end_engines() if host.topology.launched else host.close()

    def _leaves_room_for(self, other: "EndingHost") -> bool:
        """Return whether no GPU would have to give both hosts' engines more memory than it has."""
        hosts = (self, other)
        mine, theirs = ({gpu for gpus in host.devices.per_engine for gpu in gpus} for host in hosts)
        return not mine & theirs or sum(gpu_share(host.settings, host.devices) for host in hosts) <= 1.0

    def close(self) -> None:
        """Shut the engines down cleanly. `atexit` calls this, and the watch thread for a trainer that is collected; a
        script may call it earlier, and more than once. The ranks of a launch wait for each other."""
        self._close(self.watch.close)

    def _close_at_exit(self) -> None:
        self._close(self.watch.close_at_exit)

    def _close(self, close_watch: Callable[[], None]) -> None:
        self._ends = True
        self._progress_lines.close()
        self._warn_once.restore()
        with self._closing:
            close_watch()
            self._end_engines()
            atexit.unregister(self._close_at_exit)

    def _end_engines(self) -> None:
        self.watch.forget_processes()
        self._fleet.close(self.engines)
        self._drop_large_objects()
        _with_engines.discard(self)

    def _drop_large_objects(self) -> None:
        """Drop all large objects: a script's next trainer needs the memory, and `atexit` would keep them alive."""
        for engines in filter(None, (self.engines, self.ahead_engines)):
            engines.close()
        self.engines = self.ahead_engines = None  # otherwise a second close could close reused file descriptors
        if self._sync is not None:
            self._sync.close()
        last = self.step()
        self.step = lambda: last
        self._model = self._base = self._sync = None
