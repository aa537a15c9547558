"""Weight sync of a rank's host: all ranks meet, then every rank takes part in sending the weights.

An engine that dies is started again by its local main process (`engine/restarts.py`), and needs the weights of all
ranks. So a rank without an engine brings a request to the next meeting of all ranks, after which all ranks send the
weights. The others are in a meeting because they wait there for the slowest rank, before TRL's first collective.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..engine.fleet import EngineFleet
from ..engine.group import PendingReplies
from ..engine.node_engines import NodeEngines
from ..engine.restarts import lost_engine, lost_engines
from ..errors import EngineError
from ..node_settings import NodeSettings
from ..run.heartbeats.activity import RankActivity
from ..run.meeting import Meeting
from ..run.phase_file import PhaseFile
from ..run.phases import Phases
from ..run.reporter import report
from ..run.topology import Topology
from ..weights.finite import check_finite, unchecked
from ..weights.probe import probe_engines
from ..weights.source import keep_head_during_backward
from ..weights.sync import WeightSync
from ..weights.timings import SyncTimings
from ..wire.messages import Await, Done, WeightVersion


class SyncingHost:
    """Base class of [`NodeHost`] with the meetings of all ranks and the weight sync."""

    settings: NodeSettings
    topology: Topology
    phases: Phases
    activity: RankActivity
    step: Callable[[], int]
    engines: NodeEngines | None
    ahead_engines: NodeEngines | None
    engine_clocks: list[tuple[float, float, float, float]]
    on_lost: Callable[[], None]
    _fleet: EngineFleet
    _phase_file: PhaseFile
    _meeting: Meeting
    _measure_clock: Callable[[], float | None] | None
    _sync: WeightSync | None
    _kv_use: float
    _renewed: list[tuple[int, int]]
    _clock_starts: dict[int, int]
    _clock_offsets: dict[int, tuple[float, float, float, float]]
    _model: Any
    _base: Any

    @property
    def divergence_limit(self) -> float:
        raise NotImplementedError  # [`NodeHost`] has it

    def _report(self, text: str) -> None:
        report(f"node {self.topology.node}: {text}")

    def align(self) -> None:
        """Wait until all ranks call this; unlike a collective, the wait has no limit. The log counts it as `wait`.

        Meanwhile this rank takes part in sending the weights to engines that other ranks have lost.
        """
        while self.meet():
            self.on_lost()
        if self.engines is not None:
            self.engines.recover = None  # the other ranks are in collectives from now on, and come to no meeting

    def meet(self, lost: Iterable[tuple[int, int]] = ()) -> bool:
        """Wait until all ranks call this or `align`. Then wait for the engines that any rank has lost to be ready.

        Args:
            lost (`Iterable[tuple[int, int]]`, *optional*):
                Index and number of the process of each engine of this node that needs the weights.

        Returns:
            `bool`: the same on every rank: whether all ranks must send the weights to engines that were lost.
        """
        node = self.topology.node
        with self.phases("wait"):
            words = self._meeting.wait(" ".join(lost_engine(node, index, start) for index, start in lost))
            measure, self._measure_clock = self._measure_clock, None
            if measure is not None:  # all ranks have just met, so each finds the others ready to respond
                self._phase_file.clock_offset = measure()
        if not words:
            return False
        with self.phases("restart"):
            self._renewed = lost_engines(words, node)
            if self._fleet.restarts is not None:
                for index, start in self._renewed:
                    self._fleet.restarts.wait_for(index, start)
            self._meeting.wait()  # no rank waits in a collective while an engine starts
            if self._renewed:
                self._renew([index for index, _ in self._renewed])
        return True

    def _renew(self, indices: list[int]) -> None:
        """Connect to the engines that were started again; threads that have connections of their own do it later."""
        assert self.engines is not None
        self.engines.renew(indices)
        if self.ahead_engines is not None:
            self.ahead_engines.renew_later(indices)

    def lost_engines(self) -> list[tuple[int, int]]:
        """Return index and number of the process of each engine that this rank has lost, in any of its threads."""
        assert self.engines is not None
        ahead = [client for client in self.ahead_engines or () if client.lost is not None]
        lost = {(client.index, client.ready.start) for client in (*self.engines.lost, *ahead)}
        return sorted(lost & {(client.index, client.ready.start) for client in self.engines})

    def engines_to_restore(self) -> list[tuple[int, int]]:
        """Return the engines for which this rank asks before a sync: those that were started again.

        If no other engine of the node serves, also those that still start.
        """
        restarts = self._fleet.restarts
        if restarts is None or self.engines is None or not self.engines.tolerant:
            return []
        lost = self.lost_engines()
        all_lost = len(lost) == len(self.engines)
        return [(index, start) for index, start in lost if all_lost or restarts.is_ready(index)]

    @property
    def num_restarts(self) -> int:
        """Number of restarts of the engines that this rank owns."""
        return 0 if self._fleet.restarts is None else self._fleet.restarts.count

    @property
    def keeps_copy(self) -> bool:
        """Return whether nodes keep a copy of the weights, so that `restore` is no collective. Equal on every rank."""
        return self.settings.engine_restart_copy

    def restore(self, version: WeightVersion) -> None:
        """Send the weights of `version` to the engines that were started again. All ranks call it.

        It is a collective, unless each node keeps a copy of the weights.
        """
        assert self._sync is not None and self.engines is not None
        group = self.engines.serving([index for index, _ in self._renewed]) if self.topology.is_local_main else None
        self._renewed = []
        if not self.keeps_copy:
            timings = self._sync.send_again(version, group)
        elif group:
            timings = self._sync.send_copy(version, group)
        if group and timings.num_buckets:
            names = ", ".join(f"engine {engine.index}" for engine in group)
            source = ", from the copy" if self.keeps_copy else ""
            self._report(f"{names} got the weights of {version} again in {timings.total_s:.1f} s{source}")

    def restore_all(self) -> None:
        """Make the next `sync` send everything to all engines, because some were started again. All ranks call it."""
        self.send_everything()
        if self._renewed and self._sync is not None:
            self._sync.forget_slots()
        self._renewed = []

    # ---- weights ----------------------------------------------------------------------------------------------------

    def expect_after(self, version: WeightVersion) -> None:
        """Accept completions of the update after `version` too. Every rank calls it before the barrier of that update.

        Without sharded weights a sync has no collective, so after that barrier the local main process may be a whole
        update ahead of the other ranks, whose open rows then have tokens of it.
        """
        for connections in filter(None, (self.engines, self.ahead_engines)):
            connections.expect(WeightVersion(version.update + 1, self.step()))

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
        timings = self._sync.run(version)
        self._read_clocks(self.engines.post_all(Await(min_update=version.update)))  # the wait for them counts as sync
        if version.update == 1:
            engines = self.engines.serving(range(len(self.engines))) if self.topology.is_local_main else None
            probe_engines(self._model, engines, self.divergence_limit, self.topology)
        self.activity.synced = True
        return timings

    def _read_clocks(self, pending: PendingReplies) -> None:
        """Read the engines' clocks, which begin at the first sync: before it, engines wait for the trainer's set-up.

        The clocks of an engine that was started again go on where they were.
        """
        zeros = (0.0, 0.0, 0.0, 0.0)
        is_first = not self.engine_clocks
        clocks = list(self.engine_clocks) or [zeros] * len(self.engines or ())
        for client, reply in pending.answers():
            assert isinstance(reply, Done)
            if client.ready.start != self._clock_starts.get(client.index, 0):
                self._clock_starts[client.index] = client.ready.start
                self._clock_offsets[client.index] = clocks[client.index]
            read = (reply.busy_s, reply.clock_s, reply.slot_s, reply.tail_s)
            if is_first:
                self._clock_offsets[client.index] = tuple(-seconds for seconds in read)  # type: ignore[assignment]
            offsets = self._clock_offsets.get(client.index, zeros)
            clocks[client.index] = tuple(map(sum, zip(read, offsets, strict=True)))  # type: ignore[assignment]
            self._kv_use = max(self._kv_use, reply.kv_use)
        self.engine_clocks = clocks  # a new list: the meter keeps the one before

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
