"""Weight updates of a machine's engines through its slots, whoever fills them: ranks, or an agent that pulls."""

import time
from collections.abc import Callable
from contextlib import ExitStack

from ..engine.group import EngineGroup
from ..errors import MultiNodeError, WeightSyncError
from ..transports.base import Slots
from ..wire.messages import EngineTimes, UpdateWeights, WeightVersion
from .sender import BucketSender
from .timings import SyncTimings
from .transport import Layouts, Transport


class SlotUpdates:
    """Slots of a machine, and the updates that its engines load from them.

    Args:
        engines (`EngineGroup`, *optional*):
            Engines of this machine, `None` on ranks that are no local main process. Those that are lost get nothing.
        layouts (`Sequence[tuple[TensorSpec, ...]]`):
            Layout of each bucket in its slot.
        transport (`Transport`):
            Transport that opens the slots.

    Attributes:
        layouts (`Sequence[tuple[TensorSpec, ...]]`):
            The argument.
        in_flight (`bool`):
            Freeze running completions, which the new weights continue, instead of waiting until none is running.
        recompute_kv (`bool`):
            Compute the keys and values of frozen completions again, with the new weights.
        slots (`Slots`, *optional*):
            Slots of this process, if they are open. Any thread may read it.
    """

    in_flight = False
    recompute_kv = False

    def __init__(self, engines: EngineGroup | None, layouts: Layouts, transport: Transport):
        self._engines = engines
        self.layouts = layouts
        self._transport = transport
        self.slots: Slots | None = None
        self._times: dict[int, EngineTimes] = {}  # of each engine, at the end of the last update
        self._loading: BucketSender | None = None  # update that engines may not have committed yet
        self._in_slots: WeightVersion | None = None  # version of all buckets in the slots

    @property
    def staged(self) -> bool:
        """Whether every bucket has a slot of its own on this node."""
        return self._transport.staged

    def settle(self) -> dict[str, float]:
        """Wait until the engines have committed the last update, and return the seconds of the slowest one by stage.

        Raises:
            `WeightSyncError` or `EngineError`: if an engine failed to load it.
        """
        seconds: dict[str, float] = {}
        sender, self._loading = self._loading, None
        if sender is None:
            return seconds
        try:
            sender.wait_for_commit()
        except MultiNodeError as error:
            error.add_note(f"It happened in weight {sender.update.version}.")
            raise
        for engine, done in sender.done:
            before = self._times.get(engine.index, EngineTimes())
            if done.times.clock_s < before.clock_s:  # another process of the same engine
                before = EngineTimes()
            self._times[engine.index] = done.times
            for name in ("load_s", "commit_s", "frozen_s"):
                value = getattr(done.times, name) - getattr(before, name)
                seconds[name] = max(seconds.get(name, 0.0), value)
        return seconds

    def _open_slots(self, engines: EngineGroup) -> None:
        """Open the transport's slots in all engines. While one is lost, new slots are in host memory, and those of a
        transport that needs all engines are replaced."""
        lost = any(engine.has_ended for engine in engines)
        if lost and self.slots is not None and self.slots.needs_all_engines:
            self.forget_slots()
        if self.slots is None:
            open_slots = self._transport.open_on_host if lost else self._transport.open
            self.slots = open_slots(engines, self.layouts)

    def load_again(self, version: WeightVersion, engines: EngineGroup) -> SyncTimings:
        """Let engines that were started again load the last update from the slots. Not a collective.

        Before the first update there is nothing to load: that update reaches these engines too.

        Args:
            version (`WeightVersion`), engines (`EngineGroup`):
                Arguments of `send_again`.

        Raises:
            `WeightVersionError`: if an engine's workers committed another version than `version`.
        """
        self.settle()
        if self.slots is not None:
            self._transport.open_in_workers(self.slots, engines, self.layouts)
        if self._in_slots is None:
            return SyncTimings(version=version)
        if self._in_slots != version:
            raise WeightSyncError(
                f"The slots have the weights of {self._in_slots}, expected {version}."
            )
        timings = self._update(engines, self.slots, version, 0)
        timings.add(self.settle())
        return timings

    def forget_slots(self) -> None:
        """Make the next `run` open new slots, because an engine without the old ones was started."""
        slots = self.slots
        # before the memory goes, because the port's thread may read it
        self.slots = self._in_slots = None
        if slots is not None:
            slots.close()

    def _update(
        self,
        engines: EngineGroup | None,
        slots: Slots | None,
        version: WeightVersion,
        first: int,
        fill: Callable[[SyncTimings, BucketSender | None], None] | None = None,
    ) -> SyncTimings:
        """Let the engines load the buckets from `first` on.

        Args:
            engines (`EngineGroup`, *optional*), slots (`Slots`, *optional*):
                Engines that get the update, and its slots; none on ranks that send nothing.
            version (`WeightVersion`), first (`int`):
                Version of the update, and its first bucket.
            fill (`Callable`, *optional*):
                Function that hands each bucket to the sender. Default: the slots have all of them.
        """
        sent = [spec for layout in self.layouts[first:] for spec in layout]
        num_bytes = sum(spec.num_bytes for spec in sent)
        timings = SyncTimings(num_bytes, len(self.layouts) - first, version=version)
        start = time.perf_counter()
        staged = self.staged and slots is self.slots
        sender: BucketSender | None = None
        with ExitStack() as sending:
            if slots is not None:
                update = UpdateWeights(
                    version=version,
                    turn=slots.signals.begin(),
                    first_bucket=first,
                    in_flight=self.in_flight,
                    recompute_kv=self.recompute_kv,
                )
                group = engines or EngineGroup()
                self._in_slots = None
                sender = sending.enter_context(
                    BucketSender(group, slots, self.layouts, timings, update, staged)
                )
            if fill is not None:
                fill(timings, sender)
        timings.settle()
        if sender is not None:
            self._loading = sender
            if staged:
                self._in_slots = version
            else:
                timings.add(self.settle())
        timings.total_s = time.perf_counter() - start
        timings.stream_s = timings.total_s - timings.commit_s
        return timings

    def close(self) -> None:
        """Release the slots, after the last sync. A second call does nothing."""
        self.forget_slots()
        self._transport.close()
