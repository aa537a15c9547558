"""Contract of a transport: the staging slots of the local main process, and the same slots as a worker opens them.

A transport is one file of this folder: its message, the sender's [`Slots`] and the worker's [`OpenedSlots`]. It is
listed in `opening.TRANSPORTS`, under the name that `weight_transport` gives it.
"""

import tempfile
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import msgspec
import torch

from ..errors import WeightSyncError
from ..wire.messages import TensorSpec
from .pieces import GrowingTensor, Pieces, view_of
from .signals import BucketSignals, FollowedSignals

SELF_TEST_S = 30.0  # limit for the first transfer of a transport, connecting included

NamedTensors = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Machine:
    """Properties of one node that decide which transports it can use."""

    gpu: str | None  # "NVIDIA" or "AMD"; `None`: the engines run on the CPU
    shared: bool = False  # an engine uses the local main process's GPU too
    # every other GPU of the engines can read the memory of the local main process's GPU
    peer_access: bool = False


@dataclass
class SlotSettings:
    """Settings from which a transport creates its slots.

    Args:
        kind (`str`, *optional*, defaults to `"host"`):
            Name of the transport in `opening.TRANSPORTS`.
        device (`torch.device`, *optional*):
            Device of this rank. Default: the CPU.
        pin (`bool`, *optional*, defaults to `False`):
            Page-lock host memory.
        seen_as (`Sequence[int]`, *optional*):
            Index of this rank's GPU among the GPUs that each engine sees.
        workers (`Sequence[int]`, *optional*):
            Number of workers of each engine.
        folder (`Path`, *optional*):
            Private folder of the run. Default: the folder for temporary files.
        timeout_s (`float`, *optional*, defaults to `300.0`):
            Time limit of every broadcast of a bucket, in seconds.
        largest (`TensorSpec`, *optional*):
            Largest tensor of the model, for error messages.
    """

    kind: str = "host"
    device: torch.device = torch.device("cpu")
    pin: bool = False
    seen_as: Sequence[int] = ()
    workers: Sequence[int] = (1,)
    folder: Path = Path(tempfile.gettempdir())
    timeout_s: float = 300.0
    largest: TensorSpec | None = None


class OpenedSlots:
    """Slots of one sender as a worker reads them.

    ```python
    for tensors in opened.follow(turn, first):
        load(tensors)                     # the sender may have filled its slot again
    ```

    Args:
        slots (`list[torch.Tensor]`):
            Memory of each slot, uint8 `(size,)`.
        device (`torch.device`):
            Device of the worker.

    Attributes:
        takes_ahead (`bool`):
            Take a bucket in a thread and on a stream of its own while the one before it is loaded. On a CPU the load
            would share its cores with that thread.
        take_s (`float`):
            Seconds of an update's copies out of the slots, without the waits for the sender.
    """

    def __init__(self, slots: list[torch.Tensor], device: torch.device):
        self.takes_ahead = device.type == "cuda"
        self.take_s = 0.0
        self._slots = slots
        self._device = device
        self._growing = GrowingTensor(device)
        self._buckets: Sequence[Sequence[TensorSpec]] = ()
        self._signals: FollowedSignals | None = None
        self._stream: torch.cuda.Stream | None = None

    def connect(self, signals: FollowedSignals, buckets: Sequence[Sequence[TensorSpec]]) -> None:
        """Take the signals of the sender, and the layout of each bucket in its slot."""
        self._signals = signals
        self._buckets = buckets

    def follow(self, turn: int, first: int) -> Generator[NamedTensors, None, None]:
        """Yield the tensors of each bucket as soon as it is in its slot; it is taken when they are yielded.

        Args:
            turn (`int`):
                Number of the update on these slots.
            first (`int`):
                First bucket of the update.

        Raises:
            `UpdateEndedError`: if the sender ends, or gives the update up, before the last bucket.
        """
        assert self._signals is not None
        self._signals.begin(turn)
        self.take_s = 0.0
        if not self.takes_ahead:
            for bucket in range(first, len(self._buckets)):
                yield self._next(bucket)
            return
        reader = None
        if self._device.type == "cuda":
            reader = torch.cuda.current_stream(self._device)
            # one for all updates, because torch keeps the memory of a stream for that stream
            self._stream = self._stream or torch.cuda.Stream(self._device)
        with ThreadPoolExecutor(1, thread_name_prefix="weight slots") as ahead:
            try:
                coming = ahead.submit(self._next, first, reader)
                for bucket in range(first, len(self._buckets)):
                    tensors = coming.result()
                    if bucket + 1 < len(self._buckets):
                        coming = ahead.submit(self._next, bucket + 1, reader)
                    yield tensors
            finally:
                self._signals.abandoned.set()

    def _next(self, bucket: int, reader: "torch.cuda.Stream | None" = None) -> NamedTensors:
        """Take a bucket; with `reader`, on a stream of its own for the use of that one."""
        assert self._signals is not None
        self._signals.wait(bucket)
        start = time.perf_counter()
        # `None` on a CPU, which changes nothing
        with torch.cuda.stream(self._stream):
            tensors = self.take(bucket % len(self._slots), self._buckets[bucket])
        if reader is not None:
            for _, tensor in tensors:
                # otherwise its memory could be filled again before the loader's kernels have read it
                tensor.record_stream(reader)
        self._signals.took(bucket)
        self.take_s += time.perf_counter() - start
        return tensors

    def arrive(self, data: torch.Tensor) -> None:
        """Wait until the sender's bytes are in `data`, the start of a slot; a no-op if both ends share the memory."""

    def take(self, slot: int, specs: Sequence[TensorSpec]) -> NamedTensors:
        """
        Copy a bucket out of its slot and return its tensors, as views of that one copy on the worker's device.

        A copy is necessary: vLLM's loaders keep references until a module is full, and a padded vocabulary is full
        only at the end, so a later bucket would overwrite a view of the slot (log-prob error 7.2 measured). One copy
        of the bucket instead of one per tensor keeps the bus busy: a 0.5B model has 290 tensors, half of them below
        10 KB. The price is memory: a bucket stays allocated as long as a loader holds any of its tensors.

        A range goes straight from the slot into a tensor of its own, which is returned with its last range, because
        loaders take whole tensors.
        """
        data = self._slots[slot][: specs[-1].end]
        self.arrive(data)
        has_whole = any(spec.range is None for spec in specs)
        bucket = data.to(self._device, copy=True) if has_whole else data
        found = []
        for spec in specs:
            part = view_of(bucket, spec)
            whole = (
                part.view(spec.shape)
                if spec.range is None
                else self._growing.add(spec, spec.range, part)
            )
            found += [(spec.name, whole)] if whole is not None else []
        # the sender may write the slot again as soon as this returns
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return found

    def crc(self, slot: int, num_bytes: int) -> int:
        """Return zlib's CRC-32 of a slot's first bytes, once they have arrived."""
        data = self._slots[slot][:num_bytes]
        self.arrive(data)
        return zlib.crc32(data.cpu().numpy())

    def close(self) -> None:
        """Drop the slots. Tensors that `take` returned stay valid."""
        self._slots = []
        self._growing.drop()
        if self._signals is not None:
            self._signals.close()


class Slots(ABC):
    """Slots of one node, on its local main process only. One thread at a time calls the methods.

    ```python
    slots.open_for(engine)                # memory for this engine's `OpenSlots`; `signals.opened()` after it
    slots.write(k % 2, specs, tensors)    # blocks until the bytes are in the slot
    slots.signals.send(k)
    slots.transmit(k % 2, num_bytes)      # blocks until the workers have the bytes, if they cannot read the slot
    ```
    """

    memory: list[torch.Tensor]  # of each slot, uint8 `(size,)`
    kind: ClassVar[str]  # name in `weight_transport`
    memory_type: ClassVar[type[msgspec.Struct]]  # message that describes the memory
    # opens the workers' end: from that message, the size of each slot in bytes, the worker's device, and its index in
    # its engine
    opened_as: ClassVar[Callable[..., OpenedSlots]]
    # whether it cannot send while an engine of the node is lost
    needs_all_engines: ClassVar[bool] = False
    # whether an engine's visible GPUs include the local main process's
    engines_see_sender: ClassVar[bool] = False
    warning: str | None = None  # reason why the slots are slower than they could be, with the cure

    @abstractmethod
    def __init__(self, sizes: Sequence[int], settings: SlotSettings):
        """Create slots of so many bytes each, as `memory`."""
        self.sizes = tuple(sizes)
        self.signals = BucketSignals()

    @staticmethod
    def refusal(machine: Machine) -> str | None:
        """Return why this transport cannot work on `machine`, with the cure, or `None` if it can."""
        return None

    @abstractmethod
    def open_for(self, engine: int) -> msgspec.Struct:
        """Return the message with which the workers of engine number `engine` open the slots."""

    def write(self, slot: int, specs: Sequence[TensorSpec], tensors: Sequence[Pieces]) -> None:
        """Copy the tensors into the slot, cast to the dtypes of their specs. On return all bytes are in the slot.

        Raises:
            `WeightSyncError`: if a tensor has another shape than its spec.
        """
        for spec, pieces in zip(specs, tensors, strict=True):
            check_shape(spec.name, pieces.shape, spec.shape_in_slot)
            pieces.copy_to(view_of(self.memory[slot], spec))
        if self.memory[slot].is_cuda or any(pieces.data.is_cuda for pieces in tensors):
            torch.cuda.current_stream().synchronize()

    def transmit(self, slot: int, num_bytes: int) -> None:
        """Send the slot's first bytes to the workers, after its signal; a no-op if they can read the slot itself."""

    def close(self) -> None:
        """Release the memory that other processes could still see. No `write` may follow."""
        self.signals.close()


def new_slots(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Return the memory of all slots, uninitialized, on a device."""
    return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]


def check_shape(name: str, got: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Raise `WeightSyncError` if the shape of a tensor is not that of the plan."""
    if got != expected:
        raise WeightSyncError(
            f"{name} was gathered with shape {got}, expected {expected}: the model changed after the trainer was "
            "built. Resize or replace its layers before."
        )


def call_with_timeout(seconds: float, call: Callable[[], Any]) -> Any:
    """Run `call()` in a thread and return its result. A late thread is abandoned, because NCCL may block forever.

    Raises:
        `TimeoutError`: if the call does not end within `seconds`.
    """
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except Exception as error:
            outcome.set_exception(error)

    Thread(target=run, daemon=True).start()
    if not wait([outcome], seconds).done:
        raise TimeoutError(f"not done after {seconds:.0f} s")
    return outcome.result()
