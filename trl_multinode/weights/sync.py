"""Weight sync: the order of its steps, its four overlapping stages and its version."""

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

from ..engine.group import EngineGroup
from ..transports.base import Slots
from ..wire.messages import WeightVersion
from .buckets import Bucket, slot_layout
from .sender import BucketSender
from .slot_updates import SlotUpdates
from .source import Finish, WeightSource
from .timings import SyncTimings
from .transport import Transport


class WeightSync(SlotUpdates):
    """Weight sync from the trainer to the engines of this node. Every training rank constructs and calls it.

    ```python
    sync = WeightSync(source, engines, 512 << 20, transport)   # engines: None except on local main processes
    accelerator.wait_for_everyone()          # no rank generates any more
    timings = sync.run(WeightVersion(update=1, step=0))   # a collective; the engines then serve version 1
    ```

    Four stages overlap, each on another bucket: k+1 crosses the network, each node puts k together, a thread copies
    k-1 into a slot, and the engines load k-2. Only the main thread issues collectives. The engines get one request per
    update, and their workers follow the buckets by signals. The local main process copies every bucket; if each has a
    slot of its own, the ranks of the node take turns.

    Args:
        source (`WeightSource`):
            Source of the weights.
        engines (`EngineGroup`, *optional*):
            Engines of this node on its local main process, `None` on other ranks. Those that are lost get nothing.
        limit_bytes (`int`):
            Largest size of a bucket, in bytes. Only a larger tensor that is not divisible exceeds it. A local main
            process holds at most three buckets, unless DeepSpeed or FSDP2 gathers a larger tensor itself; a node holds
            two slots, or one for each bucket.
        transport (`Transport`, *optional*):
            Transport that opens the slots, at the first sync. Default: host memory.

    Attributes:
        in_flight (`bool`), recompute_kv (`bool`):
            As in [`SlotUpdates`].
        takes_turns (`bool`):
            Whether all ranks have opened the slots, so that they take turns if each bucket has one. Equal on all.
    """

    takes_turns = True

    def __init__(
        self,
        source: WeightSource,
        engines: EngineGroup | None,
        limit_bytes: int,
        transport: Transport | None = None,
    ):
        self._source = source
        self.buckets: list[Bucket] = source.buckets(limit_bytes)
        layouts = [slot_layout(bucket) for bucket in self.buckets]
        super().__init__(engines, layouts, transport or Transport())
        # before the next update; weights that do not change are checked once
        self._check_frozen = True
        self._first = 0  # bucket that the next update begins with; 0 includes the frozen ones
        # buckets of the running update that are gathered; any thread may read it
        self.num_gathered = 0

    def send_everything(self) -> None:
        """Include the frozen weights in the next update, because the caller changed them."""
        self._first = 0
        self._check_frozen = True

    def run(self, version: WeightVersion) -> SyncTimings:
        """Send every bucket that may have changed. A collective of all training ranks.

        If every bucket has a slot of its own, it returns before the engines have loaded them: `settle` waits for that.

        Raises:
            `WeightsNotFiniteError`: on the rank whose part of the weights has NaN or infinity, before any is sent.
            `WeightVersionError`: if an engine's workers committed another version than `version`.
            `WeightSyncError` or `EngineError`: if an engine failed, in this update or the one before; it must not
                serve requests any more.
        """
        before = self.settle()
        if self._engines is not None:
            self._open_slots(self._engines)
        timings = self._send(self._engines, self.slots, version, self._first)
        timings.add(before)
        self._first = sum(bucket[0].frozen for bucket in self.buckets)
        self._check_frozen = False
        return timings

    def join(self, place: Sequence[int]) -> bool:
        """Open the slots of this node's local main process, on its other ranks; return whether it was possible."""
        self.slots = self._transport.join(place, self.layouts)
        return self.slots is not None

    def send_again(self, version: WeightVersion, engines: EngineGroup | None) -> SyncTimings:
        """Send all weights of `version` to engines that were started again. A collective of all training ranks.

        The slots are in host memory, whatever the transport is, because a broadcast needs all engines of the node. The
        next `run` opens the transport's own slots in all engines.

        Args:
            version (`WeightVersion`):
                Version that the other engines have.
            engines (`EngineGroup`, *optional*):
                Engines of this node that were started again, on its local main process.
        """
        slots = None
        if engines:
            self.forget_slots()
            slots = self._transport.open_on_host(engines, self.layouts)
        try:
            return self._send(engines, slots, version, 0)
        finally:
            if slots is not None:
                slots.close()

    def _send(
        self, engines: EngineGroup | None, slots: Slots | None, version: WeightVersion, first: int
    ) -> SyncTimings:
        """Gather the buckets from `first` on; with `slots`, send them to `engines`."""
        # before the update begins: the other ranks then wait in their first gathering, so no engine loads anything.
        # A tensor is checked once, however many ranges it has
        tensors = {meta.name: meta for bucket in self.buckets[first:] for meta in bucket}
        self._source.check(list(tensors.values()), version.step, self._check_frozen)
        self.num_gathered = first

        def fill(timings: SyncTimings, sender: BucketSender | None) -> None:
            try:
                self._gather(timings, sender, first)
            finally:
                timings.collectives = self._source.gather.across, self._source.gather.within
                self._source.release()

        return self._update(engines, slots, version, first, fill)

    def _gather(self, timings: SyncTimings, sender: BucketSender | None, first: int) -> None:
        """Gather every bucket from `first` on: while k is put together, k+1 is on the network and k-1 is copied.

        All ranks release the buckets in the same order, each after its copy, because a release may be a collective.
        """
        gather = self._source.gather
        holders = gather.ranks if self.staged and self.takes_turns else 1
        if holders > 1:
            # the engines of this node have loaded what its ranks now overwrite
            gather.meet(0)
        with ExitStack() as everything:
            begun: deque[tuple[ExitStack, Finish]] = deque()
            previous = ExitStack()
            for index in range(first, len(self.buckets)):
                with timings.stage("gather_s", gather.buffers.device):
                    while len(begun) < 2 and index + len(begun) < len(self.buckets):
                        coming = index + len(begun)
                        gathering = self._source.gathering(self.buckets[coming], coming % holders)
                        own = everything.enter_context(ExitStack())
                        begun.append((own, own.enter_context(gathering)))
                    current, finish = begun.popleft()
                    pieces = finish()
                self.num_gathered = index + 1
                if sender is not None and index % holders == gather.local_rank:
                    current.callback(sender.send(index, pieces).result)
                previous.close()
                previous = current
        if holders > 1:
            # the ranks of this node have copied every bucket
            gather.meet(0)
