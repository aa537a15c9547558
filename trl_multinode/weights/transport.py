"""Transport to the engines: choice of the slots' memory, with its reason, a self test and the host-memory fallback."""

import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec
import torch

from ..engine.group import EngineGroup, answers, failures
from ..errors import ConfigurationError
from ..run.gpu_variables import visible_devices
from ..run.reporter import warn
from ..run.topology import EngineDevices
from ..transports.base import SELF_TEST_S, Machine, Slots, SlotSettings, call_with_timeout
from ..transports.host_memory import HostSlots
from ..transports.opening import TRANSPORTS
from ..wire.messages import NUM_SLOTS, CheckSlot, OpenSlots, TensorSpec

SELF_TEST_BYTES = 1 << 20
Layouts = Sequence[tuple[TensorSpec, ...]]


def choose(wanted: str, machine: Machine) -> tuple[str, str]:
    """Return the transport and the reason for it.

    `"auto"` takes host memory, which needs nothing from the GPUs. `ipc` was executed on one GPU that an engine shares
    with training, not between GPUs; `nccl` only over gloo, on a CPU.

    Args:
        wanted (`str`):
            Value of `weight_transport`.
        machine (`Machine`):
            Properties of this node.

    Raises:
        `ConfigurationError`: if the wanted transport cannot work on this machine.
    """
    if wanted == "host":
        return "host", "as configured"
    if wanted == "auto":
        if machine.gpu is None:
            return "host", "the engines run on the CPU"
        peers = "peer access" if machine.peer_access else "no peer access"
        return (
            "host",
            f"{machine.gpu} GPUs, {peers}; ipc and nccl never ran between GPUs yet, so they must be named",
        )
    if refusal := TRANSPORTS[wanted].refusal(machine):
        raise ConfigurationError(refusal, setting="weight_transport", got=wanted)
    return (
        wanted,
        "as configured; experimental" if machine.gpu else "as configured; over gloo, on the CPU",
    )


def machine_of(devices: EngineDevices) -> Machine:
    """Return the properties of this node, as its ranks see it."""
    if devices.sender is None:
        return Machine(None)
    names = visible_devices(os.environ, torch.cuda.device_count())
    engines = [
        names.index(gpu) for own in devices.per_engine for gpu in own if gpu != devices.sender
    ]
    sender = names.index(devices.sender)
    return Machine(
        "AMD" if torch.version.hip else "NVIDIA",
        shared=any(devices.sender in own for own in devices.per_engine),
        peer_access=all(torch.cuda.can_device_access_peer(gpu, sender) for gpu in engines),
    )


@dataclass
class Transport(SlotSettings):
    """Transport of weights to the engines of one node. Only its local main process calls `open`.

    Args:
        **settings:
            Fields of [`SlotSettings`]; `kind` is the name that `choose` returned.
        report (`Callable[[str], None]`, *optional*):
            Function that reports a failed self test or slow slots.
    """

    report: Callable[[str], None] = warn
    staged: bool = False  # a slot for each bucket
    _reserved: Slots | None = field(default=None, init=False)

    def reserve(self, layouts: Layouts) -> None:
        """Set the slots' memory aside until `open`, so that too little is an error now and no SIGBUS at a sync.

        Engines that start beside the model's load may have taken theirs before. The sum is the same.

        Args:
            layouts (`Sequence[tuple[TensorSpec, ...]]`):
                Layout of each bucket's tensors in its slot.

        Raises:
            `WeightSyncError`: if the node has too little memory; the message names the largest tensor and the cure.
        """
        self.close()
        self.largest = max(chain.from_iterable(layouts), key=lambda spec: spec.num_bytes)
        if self.kind == "host":
            self._reserved = self._make("host", layouts)

    @property
    def reserved_at(self) -> tuple[int, int, int, int]:
        """Place of the reserved slots' file; zeros if none are reserved here."""
        return self._reserved.place if isinstance(self._reserved, HostSlots) else (0, 0, 0, 0)

    def join(self, place: Sequence[int], layouts: Layouts) -> Slots | None:
        """Return the slots of this node's local main process on another of its ranks, or `None` if it cannot."""
        try:
            return HostSlots(self._sizes(layouts), self, place)
        except OSError as error:
            self.report(
                f"the local main processes copy every weight, because this rank cannot open their slots ({error}): "
                "syncs are slower. Run the ranks of a node in one container to change that."
            )
            return None

    def close(self) -> None:
        """Give back memory that was reserved and not used."""
        if self._reserved is not None:
            self._reserved.close()
        self._reserved = None

    def _sizes(self, layouts: Layouts) -> list[int]:
        """Return the size of each slot, in bytes."""
        ends = [layout[-1].end for layout in layouts]
        if self.staged:
            return ends
        return [max(*ends, SELF_TEST_BYTES)] * NUM_SLOTS

    def open(self, engines: EngineGroup, layouts: Layouts) -> Slots:
        """Return slots that every worker has opened, and that passed a self test if they are not in host memory.

        Args:
            engines (`EngineGroup`):
                Engines of this node.
            layouts (`Sequence[tuple[TensorSpec, ...]]`):
                Layout of each bucket's tensors in its slot.
        """
        if self.kind != "host":
            slots = None
            try:
                slots = self._make(self.kind, layouts)
                self.open_in_workers(slots, engines, layouts)
                self._test(slots, engines)
                return slots
            except (RuntimeError, TimeoutError) as error:
                self.report(
                    f"weight_transport={self.kind!r} failed its self test ({type(error).__name__}: {error}); weights "
                    "go through host memory instead. Set weight_transport='host' to start without the test."
                )
                if slots is not None:
                    slots.close()
        return self.open_on_host(engines, layouts)

    def open_on_host(self, engines: EngineGroup, layouts: Layouts) -> Slots:
        """Return slots in host memory that every worker of `engines` has opened. The arguments are those of `open`."""
        if self._reserved is not None and self._reserved.sizes != tuple(self._sizes(layouts)):
            self.close()
        slots = self._reserved or self._make("host", layouts)
        self._reserved = None
        return self.open_in_workers(slots, engines, layouts)

    def _make(self, kind: str, layouts: Layouts) -> Slots:
        slots = TRANSPORTS[kind](self._sizes(layouts), self)
        if slots.warning:
            self.report(slots.warning)
        return slots

    def open_in_workers(self, slots: Slots, engines: EngineGroup, layouts: Layouts) -> Slots:
        """Let every worker of `engines` open the slots, which others may have opened before."""
        signals = str(slots.signals.listen(self.folder))

        def request(engine: int) -> OpenSlots:
            return OpenSlots(
                transport=slots.kind,
                memory=msgspec.Raw(msgspec.msgpack.encode(slots.open_for(engine))),
                sizes=slots.sizes,
                buckets=tuple(layouts),
                signals=signals,
                engine=engine,
            )

        try:
            answers(engines.post_all(request))
        finally:
            slots.signals.opened()
        return slots

    @staticmethod
    def _test(slots: Slots, engines: EngineGroup) -> None:
        """Write noise into a slot and make every worker compare its checksum; raise the first failure."""
        noise = torch.randint(0, 256, (SELF_TEST_BYTES,), dtype=torch.uint8)
        slots.memory[0][:SELF_TEST_BYTES].copy_(noise)
        check = CheckSlot(slot=0, num_bytes=SELF_TEST_BYTES, crc=zlib.crc32(noise.numpy()))
        posted = engines.post_all(check)
        try:
            call_with_timeout(SELF_TEST_S, lambda: slots.transmit(0, SELF_TEST_BYTES))
        finally:
            failed = failures(posted)  # reads every reply even after a failure
        if failed:
            raise failed[0]
