"""How weights travel: staging slots in host shared memory, the order of a sync, its version and its timings."""

import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .engine import NodeEngines
from .errors import WeightSyncError, WeightVersionError
from .protocol import BeginUpdate, CommitUpdate, Done, LoadBucket, OpenSlots, TensorSpec, WeightVersion
from .weight_source import Bucket, WeightSource, place, plan_buckets, slot_bytes

NUM_SLOTS = 2  # the engine loads bucket k-1 from one while the trainers gather k into the other
SHARED_MEMORY = Path("/dev/shm")


@dataclass
class SyncTimings:
    """Seconds of one sync on one rank, by stage."""

    gather_s: float = 0.0  # collectives, on every rank
    copy_s: float = 0.0  # into the slot, local main process only
    load_s: float = 0.0  # waiting for the engines to take a bucket, local main process only
    commit_s: float = 0.0  # the engines' packing of the weights, local main process only
    num_bytes: int = 0  # sent to an engine, in its dtype
    num_buckets: int = 0


class StagingSlots:
    """Slots in host shared memory, written by the local main process, mapped by every worker of its node's engines.

    Files are 0600 and unlinked as soon as the workers have mapped them. With a GPU the memory is page-locked, so that
    copies run at the speed of the bus.
    """

    def __init__(self, num_bytes: int, pin: bool):
        self.num_bytes = num_bytes
        free = shutil.disk_usage(SHARED_MEMORY).free
        if free < NUM_SLOTS * num_bytes:
            raise WeightSyncError(
                f"{SHARED_MEMORY} has {free / 2**20:.0f} MiB free, the weight sync needs {NUM_SLOTS} x "
                f"{num_bytes / 2**20:.0f} MiB. Lower `sync_bucket_mb`, or give the container more shared memory "
                "(docker: --shm-size)."
            )
        self.paths = [self._create() for _ in range(NUM_SLOTS)]
        self._memory = [torch.from_file(p, shared=True, size=num_bytes, dtype=torch.uint8) for p in self.paths]
        if pin:
            for memory in self._memory:
                torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), num_bytes, 0)

    def _create(self) -> str:
        handle, path = tempfile.mkstemp(prefix="trl_multinode_", dir=SHARED_MEMORY)
        os.ftruncate(handle, self.num_bytes)
        os.close(handle)
        return path

    def unlink(self) -> None:
        for path in self.paths:
            Path(path).unlink(missing_ok=True)

    def write(self, slot: int, specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> None:
        """Copy, cast to the dtype of the spec. On return the bytes are in the slot."""
        for spec, tensor in zip(specs, tensors, strict=True):
            if tuple(tensor.shape) != spec.shape:
                raise WeightSyncError(
                    f"{spec.name} was gathered with shape {tuple(tensor.shape)}, expected {spec.shape}."
                )
            target = self._memory[slot][spec.offset : spec.offset + spec.num_bytes]
            target.view(getattr(torch, spec.dtype)).view(spec.shape).copy_(tensor)


class WeightSync:
    """Brings the trainer's weights into the engines of this node. Built and called on every training rank.

    ```python
    sync = WeightSync(source, engines, 512 << 20, pin=True)   # engines: None except on local main processes
    accelerator.wait_for_everyone()          # nobody generates any more
    timings = sync.run(WeightVersion(update=1, step=0))   # a collective; then version 1 serves here
    ```

    Args:
        source (`WeightSource`):
            What to send.
        engines (`NodeEngines`, *optional*):
            The engines of this node, on its local main process.
        limit_bytes (`int`):
            Largest bucket. Peak extra memory is twice a bucket on every rank, and two slots in host memory per node.
        pin (`bool`):
            Page-lock the slots.
    """

    def __init__(self, source: WeightSource, engines: NodeEngines | None, limit_bytes: int, pin: bool):
        self._source = source
        self._engines = engines
        self.buckets: list[Bucket] = plan_buckets(source.metadata(), limit_bytes)
        self._places = [place(bucket) for bucket in self.buckets]
        self._slots: StagingSlots | None = None
        self._pin = pin
        self._first = 0  # bucket that an update begins with; after the first update the frozen ones are left out

    @property
    def num_bytes(self) -> int:
        """Of the next update."""
        return sum(meta.num_bytes for bucket in self.buckets[self._first :] for meta in bucket)

    def run(self, version: WeightVersion) -> SyncTimings:
        """Send every bucket that may have changed. A collective of all training ranks.

        Raises:
            `WeightVersionError`: if an engine's workers committed another version than `version`.
            `WeightSyncError` or `EngineError`: if an engine failed; it must not serve any more.
        """
        timings = SyncTimings(num_bytes=self.num_bytes, num_buckets=len(self.buckets) - self._first)
        if self._engines is None:
            self._take_part(timings)
        else:
            self._send(self._engines, version, timings)
        self._first = sum(bucket[0].frozen for bucket in self.buckets)
        return timings

    def _take_part(self, timings: SyncTimings) -> None:
        for bucket in self.buckets[self._first :]:
            start = time.perf_counter()
            with self._source.gathered(bucket):
                timings.gather_s += time.perf_counter() - start

    def _send(self, engines: NodeEngines, version: WeightVersion, timings: SyncTimings) -> None:
        slots = self._slots or self._open_slots(engines)
        engines.ask_all(BeginUpdate(version=version, first_bucket=self._first))
        on_the_way: deque[list[int]] = deque()  # per bucket: a request id per engine
        for index, bucket in enumerate(self.buckets[self._first :], self._first):
            if len(on_the_way) == NUM_SLOTS:
                self._wait(engines, on_the_way.popleft(), timings)
            start = time.perf_counter()
            with self._source.gathered(bucket) as tensors:
                gathered = time.perf_counter()
                slots.write(index % NUM_SLOTS, self._places[index], tensors)
            timings.gather_s += gathered - start
            timings.copy_s += time.perf_counter() - gathered
            message = LoadBucket(bucket=index, slot=index % NUM_SLOTS)
            on_the_way.append([engines.post(engine, message) for engine in range(len(engines.connections))])
        while on_the_way:
            self._wait(engines, on_the_way.popleft(), timings)
        self._commit(engines, version, timings)

    @staticmethod
    def _wait(engines: NodeEngines, request_ids: list[int], timings: SyncTimings) -> None:
        start = time.perf_counter()
        for engine, request_id in enumerate(request_ids):
            engines.wait(engine, request_id)
        timings.load_s += time.perf_counter() - start

    @staticmethod
    def _commit(engines: NodeEngines, version: WeightVersion, timings: SyncTimings) -> None:
        start = time.perf_counter()
        for engine, done in enumerate(engines.ask_all(CommitUpdate())):
            assert isinstance(done, Done)
            check_version(done.version, version, engines.connections[engine].name)
        timings.commit_s += time.perf_counter() - start

    def _open_slots(self, engines: NodeEngines) -> StagingSlots:
        self._slots = StagingSlots(slot_bytes(self.buckets), self._pin)
        try:
            engines.ask_all(
                OpenSlots(
                    paths=tuple(self._slots.paths),
                    slot_bytes=self._slots.num_bytes,
                    buckets=tuple(self._places),
                )
            )
        finally:
            self._slots.unlink()
        return self._slots


def check_version(got: WeightVersion, expected: WeightVersion, engine_name: str) -> None:
    """Raises `WeightVersionError` unless the engine has exactly the expected weights."""
    if got.update != expected.update:
        raise WeightVersionError(
            f"{engine_name} has the weights of {got}, expected {expected}: its workers did not load the last update. "
            "See the engine's log; a run that continued would train on completions of an older policy."
        )
