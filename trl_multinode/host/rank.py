"""Context of one rank of a run: its place, settings and devices, its phases, and its watch."""

import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..engine.settings import check_vllm
from ..errors import ConfigurationError
from ..node_settings import NodeSettings
from ..run.begin import begin_run
from ..run.disk import as_disk_error, written_folders
from ..run.gpu_variables import check_accelerator
from ..run.phase_file import PhaseFile
from ..run.phases import Phases
from ..run.reporter import report, warn
from ..run.store import connect_store
from ..run.topology import (
    EngineDevices,
    Topology,
    assign_engines,
    check_engines,
    idle_gpus,
    shape_of,
)
from ..run.watch.watchdog import Watchdog
from ..weights.transport import choose, machine_of
from ..wire.secret import pool_secret
from ..wire.stop_signals import check_preempt_signal


class RankContext:
    """One rank, as the parts of its [`NodeHost`] see it.

    Args:
        args ([`~trl.GRPOConfig`]):
            Config with the settings of [`NodeFields`], or a plain TRL config.

    Raises:
        `ConfigurationError`: before any weights file is opened, if the launch, the GPUs or a setting cannot work.
    """

    def __init__(self, args: Any):
        self.args = args
        self.settings = NodeSettings.of(args)
        self.topology = Topology.from_environment()
        # the underscore keeps it out of pushes to the Hub
        self.folder = Path(args.output_dir) / "_multinode"
        self.phase_file = PhaseFile(self.folder / "phases", self.topology.rank, self.topology.node)
        self.phases = Phases(self.phase_file)
        self.watch = Watchdog(self.topology, lambda: self.phases.current)
        # that of the watch thread, so that both learn of nodes that differ
        self.topology = self.watch.topology
        self.watch.closings.append(self.phase_file.flush)
        self.watch.explain = partial(as_disk_error, folders=written_folders(args.output_dir))
        self._trainer: Callable[[], Any] = lambda: None
        self._last_step = 0
        with self.watch.guard(self.watch.close):
            begin_run(self.watch, self.folder, self.step, self.settings.engine_start_timeout)
            self.store = connect_store(self.topology, self.watch.run)
            self.devices = self._check()
            self.topology.assume(shape_of(self.topology, self.devices))
            if self.topology.is_local_main and (idle := idle_gpus(self.devices)):
                warn(f"node {self.topology.node}: {idle}")
            self.transport = choose(self.settings.weight_transport, machine_of(self.devices))
            self.watch.watch_local_ranks(self.store)

    def check_engines(self) -> None:
        """Check that this rank will have engines, once the shapes of all nodes are known. No collective.

        Raises:
            `ConfigurationError`: if no node has an engine, or if those of other nodes need a secret.
        """
        if not self.has_agents:
            check_engines(self.topology, self._num_gpus)
        elif self.topology.world_size == 1:
            raise ConfigurationError(
                "`min_engines` needs the store of a launch, in which agents find the run, and a launch of one "
                "process has none.",
                setting="min_engines",
                got=self.settings.min_engines,
                cure="Train with two processes or more, or leave it out.",
            )
        if self.opens_port:
            pool_secret()

    def _check(self) -> EngineDevices:
        check_preempt_signal()
        check_vllm()
        self._num_gpus = 0
        if not self.args.use_cpu:
            self._num_gpus = torch.cuda.device_count()
            check_accelerator(self._num_gpus, self.topology.node)
        return assign_engines(
            self.topology,
            self._num_gpus,
            self.settings.vllm_devices,
            self.settings.num_engines,
            self.settings.vllm_tensor_parallel_size,
        )

    @property
    def has_engines(self) -> bool:
        """Return whether this node has engines of its own."""
        return bool(self.devices.per_engine)

    @property
    def has_agents(self) -> bool:
        """Return whether engines of agents may join, which pull the weights from the slots of all nodes."""
        return self.settings.min_engines is not None

    @property
    def opens_port(self) -> bool:
        """Return whether nodes with something to offer to other nodes open a port."""
        return self.has_agents or self.topology.shares_engines

    @property
    def fills_slots(self) -> bool:
        """Return whether this rank is the one that sends the weights of its node."""
        return self.topology.is_local_main and self.needs_slots

    @property
    def needs_slots(self) -> bool:
        """Return whether the weights go into slots of this node."""
        return self.has_engines or self.has_agents

    def report(self, text: str) -> None:
        """Print a line with this rank's node."""
        report(f"node {self.topology.node}: {text}")

    # ---- the trainer ------------------------------------------------------------------------------------------------

    def follow(self, trainer: Any, on_collected: Callable[[], None]) -> None:
        """Read the optimizer steps of `trainer`, and call `on_collected` when it is garbage-collected.

        No reference to the trainer is kept: `atexit` and the watchdog keep this object, and thus would keep it too.
        The garbage collector makes the call in any thread.
        """
        self._trainer = weakref.ref(trainer, lambda _: on_collected())

    def step(self) -> int:
        """Return the optimizer steps that the trainer has done, or had done before it was collected."""
        if (trainer := self._trainer()) is not None:
            self._last_step = trainer.state.global_step
        return self._last_step

    @property
    def is_collected(self) -> bool:
        """Return whether there was a trainer that was garbage-collected."""
        return isinstance(self._trainer, weakref.ref) and self._trainer() is None
