"""Weight sync of a rank's host: all ranks meet, then every rank takes part in sending the weights."""

from collections.abc import Callable
from typing import Any

import torch

from ..engine.node_engines import NodeEngines
from ..errors import EngineError
from ..run.meeting import Meeting
from ..run.phase_file import PhaseFile
from ..run.phases import Phases
from ..run.reporter import report
from ..run.topology import Topology
from ..weights.finite import check_finite, unchecked
from ..weights.probe import probe_engines
from ..weights.source import keep_head_during_backward
from ..weights.sync import SyncTimings, WeightSync
from ..wire.messages import Await, Done, WeightVersion


class SyncingHost:
    """Base class of [`NodeHost`] with the meetings of all ranks and the weight sync."""

    topology: Topology
    phases: Phases
    step: Callable[[], int]
    engines: NodeEngines | None
    ahead_engines: NodeEngines | None
    engine_clocks: list[tuple[float, float, float, float]]
    _phase_file: PhaseFile
    _meeting: Meeting
    _measure_clock: Callable[[], float | None] | None
    _sync: WeightSync | None
    _kv_use: float
    _model: Any
    _base: Any

    @property
    def divergence_limit(self) -> float:
        raise NotImplementedError  # [`NodeHost`] has it

    def _report(self, text: str) -> None:
        report(f"node {self.topology.node}: {text}")

    def align(self) -> None:
        """Wait until all ranks call this; unlike a collective, the wait has no limit. The log counts it as `wait`."""
        with self.phases("wait"):
            self._meeting.wait()
            measure, self._measure_clock = self._measure_clock, None
            if measure is not None:  # all ranks have just met, so each finds the others ready to respond
                self._phase_file.clock_offset = measure()

    def sync(self, version: WeightVersion) -> SyncTimings:
        """Send the weights; after the first update, verify that no dummy weight remains. A collective of all ranks."""
        if self._sync is None or self.engines is None:
            raise EngineError(
                f"{self.topology}: `trainer.close()`, or a later trainer that needs their GPUs, ended this trainer's "
                "engines. Build another trainer."
            )
        if version.update == 1:
            keep_head_during_backward(self._base)  # not in `start_engines`: DeepSpeed may shard the model later
            if self.topology.rank == 0 and (line := unchecked(self._model)):
                self._report(line)
        for connections in filter(None, (self.engines, self.ahead_engines)):
            connections.expect(version)
        timings = self._sync.run(version)
        done = self.engines.ask_all(Await(min_update=version.update))  # counts the wait for the engines as sync
        self.engine_clocks = [
            (reply.busy_s, reply.clock_s, reply.slot_s, reply.tail_s) for reply in done if isinstance(reply, Done)
        ]
        self._kv_use = max([self._kv_use, *(reply.kv_use for reply in done if isinstance(reply, Done))])
        if version.update == 1:
            engines = self.engines if self.topology.is_local_main else None
            probe_engines(self._model, engines, self.divergence_limit, self.topology)
        return timings

    def take_kv_use(self) -> float:
        """Return the greatest share of a node's engine's key-value cache that was in use, up to the last sync."""
        use, self._kv_use = self._kv_use, 0.0
        return use

    def send_everything(self) -> None:
        """Make the next sync send the frozen weights too."""
        if self._sync is not None:
            self._sync.send_everything()

    def check_before_save(self, model: torch.nn.Module) -> None:
        """Check this rank's own part of the trained weights for NaN and infinity. Not a collective.

        Frozen weights are left out, because a sync has checked them.

        Raises:
            `WeightsNotFiniteError`: if there is one. The other ranks wait in the save until the watchdog ends them.
        """
        trained = [(name, p, p.dtype) for name, p in model.named_parameters() if p.requires_grad]
        check_finite(trained, str(self.topology), self.step(), sends_whole=self.topology.is_local_main)
