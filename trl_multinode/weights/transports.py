"""Transport to the engines: choice of the slots' memory, with its reason, a self test and the host-memory fallback."""

import logging
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..engine.node_engines import NodeEngines
from ..engine.process_group import SELF_TEST_S, within
from ..engine.protocol import CheckSlot, OpenSlots, TensorSpec
from ..errors import ConfigurationError, MultiNodeError
from ..topology import EngineDevices, visible_devices
from .slots import BroadcastSlots, DeviceSlots, HostSlots, Slots

logger = logging.getLogger(__name__)

SELF_TEST_BYTES = 1 << 20


@dataclass(frozen=True)
class Machine:
    """Properties of one node that decide which transports it can use."""

    gpu: str | None  # "NVIDIA" or "AMD"; `None`: the engines run on the CPU
    shared: bool = False  # an engine uses the local main process's GPU too
    peer_access: bool = False  # every other GPU of the engines can read the memory of the local main process's GPU


def choose(wanted: str, machine: Machine) -> tuple[str, str]:
    """Return the transport and the reason for it.

    `"auto"` takes only a transport that has been executed on such a machine. On GPUs none has run yet, only its code
    on a CPU, so `"auto"` takes host memory, which needs nothing from the GPUs.

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
        return "host", f"{machine.gpu} GPUs, {peers}; ipc and nccl never ran on a GPU yet, so they must be asked for"
    if wanted == "ipc" and machine.gpu is None:
        raise ConfigurationError("`weight_transport='ipc'` needs GPUs, and the engines run on the CPU. Use 'host'.")
    if wanted == "ipc" and not machine.peer_access:
        raise ConfigurationError(
            "`weight_transport='ipc'` needs the engines on the local main process's GPU, or GPUs with peer access to "
            "it; these have none (`nvidia-smi topo -p2p r`). Use 'host'."
        )
    if wanted == "nccl" and machine.gpu and machine.shared:
        raise ConfigurationError(
            "`weight_transport='nccl'`: an engine is on the local main process's GPU, and NCCL refuses two processes "
            "on one GPU. Use 'ipc' or 'host'."
        )
    return wanted, "as configured; experimental" if machine.gpu else "as configured; over gloo, on the CPU"


def machine_of(devices: EngineDevices, environ: Mapping[str, str] = os.environ) -> Machine:
    """Return the properties of this node, as its ranks see it."""
    if devices.sender is None:
        return Machine(None)
    names = visible_devices(environ, torch.cuda.device_count())
    engines = [names.index(gpu) for own in devices.per_engine for gpu in own if gpu != devices.sender]
    sender = names.index(devices.sender)
    return Machine(
        "AMD" if torch.version.hip else "NVIDIA",
        shared=any(devices.sender in own for own in devices.per_engine),
        peer_access=all(torch.cuda.can_device_access_peer(gpu, sender) for gpu in engines),
    )


@dataclass
class Transport:
    """Transport of weights to the engines of one node. Only its local main process calls `open`.

    Args:
        kind (`str`, *optional*, defaults to `"host"`):
            Transport that `choose` returned.
        device (`torch.device`, *optional*):
            Device of this rank.
        pin (`bool`, *optional*, defaults to `False`):
            Page-lock host memory.
        seen_as (`Sequence[int]`, *optional*):
            Index of this rank's GPU among the GPUs that each engine sees.
        workers (`Sequence[int]`, *optional*):
            Number of workers of each engine.
        folder (`Path`, *optional*):
            Private folder of the run.
        timeout_s (`float`, *optional*, defaults to `300.0`):
            Time limit of every broadcast of a bucket, in seconds.
        say (`Callable[[str], None]`, *optional*):
            Function that reports a failed self test or a failed page-lock.
    """

    kind: str = "host"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    pin: bool = False
    seen_as: Sequence[int] = ()
    workers: Sequence[int] = (1,)
    folder: Path = Path()
    timeout_s: float = 300.0
    say: Callable[[str], None] = logger.warning

    def open(self, engines: NodeEngines, num_bytes: int, places: Sequence[tuple[TensorSpec, ...]]) -> Slots:
        """Return slots that every worker has opened, and that passed a self test if they are not in host memory.

        Args:
            engines (`NodeEngines`):
                Engines of this node.
            num_bytes (`int`):
                Size of a slot, in bytes.
            places (`Sequence[tuple[TensorSpec, ...]]`):
                Layout of each bucket's tensors in its slot.
        """
        num_bytes = max(num_bytes, SELF_TEST_BYTES)
        if self.kind != "host":
            slots = None
            try:
                slots = self._make(num_bytes)
                self._tell(slots, engines, places)
                self._test(slots, engines)
                return slots
            except (RuntimeError, TimeoutError) as error:
                self.say(
                    f"weight_transport={self.kind!r} failed its self test ({type(error).__name__}: {error}); weights "
                    "go through host memory instead. Set weight_transport='host' to start without the test."
                )
                if slots is not None:
                    slots.close()
        return self._tell(self._host(num_bytes), engines, places)

    def _host(self, num_bytes: int) -> HostSlots:
        slots = HostSlots(num_bytes, self.pin)
        if slots.page_lock is not None and slots.page_lock.failure:
            self.say(
                f"the weight sync's slots could not be page-locked ({slots.page_lock.failure}): it is slower. "
                "Raise the limit (`ulimit -l unlimited`; docker: --ulimit memlock=-1), or lower `sync_bucket_mb`."
            )
        return slots

    def _make(self, num_bytes: int) -> Slots:
        if self.kind == "ipc":
            return DeviceSlots(num_bytes, self.device, self.seen_as)
        return BroadcastSlots(num_bytes, self.device, self.folder / "weights.store", self.workers, self.timeout_s)

    @staticmethod
    def _tell(slots: Slots, engines: NodeEngines, places: Sequence[tuple[TensorSpec, ...]]) -> Slots:
        try:
            posted = [
                engines.post(
                    engine,
                    OpenSlots(memory=slots.open_for(engine), slot_bytes=slots.num_bytes, buckets=tuple(places)),
                )
                for engine in range(len(engines.connections))
            ]
            for engine, request_id in enumerate(posted):
                engines.wait(engine, request_id)
        finally:
            slots.opened()
        return slots

    @staticmethod
    def _test(slots: Slots, engines: NodeEngines) -> None:
        """Write noise into a slot and have every worker compare its checksum; raise the first failure."""
        noise = torch.randint(0, 256, (SELF_TEST_BYTES,), dtype=torch.uint8)
        slots.memory[0][:SELF_TEST_BYTES].copy_(noise)
        check = CheckSlot(slot=0, num_bytes=SELF_TEST_BYTES, crc=zlib.crc32(noise.numpy()))
        posted = [engines.post(engine, check) for engine in range(len(engines.connections))]
        try:
            within(SELF_TEST_S, lambda: slots.announce(0, SELF_TEST_BYTES))
        finally:
            failures = [
                error for engine, request_id in enumerate(posted) if (error := _failure(engines, engine, request_id))
            ]
        if failures:
            raise failures[0]


def _failure(engines: NodeEngines, engine: int, request_id: int) -> MultiNodeError | None:
    """Return the error of a reply, or `None`. The caller reads all replies, so none is left for the next request."""
    try:
        engines.wait(engine, request_id)
        return None
    except MultiNodeError as error:
        return error
