"""Weights of a rank's engines: all ranks meet, then every rank takes part in sending the weights.

An engine that dies is started again by its local main process (`engine/restarts.py`), and needs the weights of all
ranks. So a rank without an engine brings a request to the next meeting of all ranks, after which all ranks send the
weights. The others are in a meeting because they wait there for the slowest rank, before TRL's first collective.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from ..engine.fleet import EngineFleet
from ..engine.group import EngineGroup, answers
from ..engine.node_engines import AGENT_POLL_S, NodeEngines
from ..engine.restarts import LostEngine, lost_engines
from ..engine.settings import (
    EngineSettings,
    engine_dtype,
    save_without_weights,
    training_dtype,
)
from ..errors import EngineError, WeightSyncError
from ..run.store import PROGRESS_EVERY_S
from ..transports.opening import TRANSPORTS
from ..weights.building import (
    SyncPlan,
    build_sync,
    checked_with_engines,
    plan_sync,
    reserve_slots,
    stages,
)
from ..weights.finite import check_finite, unchecked
from ..weights.gathering import ShardGather
from ..weights.probe import divergence_limit, probe_engines
from ..weights.source import keep_head_during_backward
from ..weights.sync import WeightSync
from ..weights.timings import SyncTimings
from ..weights.transport import Transport
from ..wire.messages import Await, WeightVersion
from .agreement import Agreement
from .engine_clocks import EngineClocks
from .presence import Presence
from .rank import RankContext
from .remote import MEMBERS, RemoteEngines


class Updates:
    """The engines of a node and their weights, as one of its ranks uses them.

    Args:
        rank ([`RankContext`]), agreement ([`Agreement`]), presence ([`Presence`]):
            The rank, its meetings with the others, and what it tells them.
    """

    def __init__(self, rank: RankContext, agreement: Agreement, presence: Presence):
        self._rank = rank
        self._agreement = agreement
        self._presence = presence
        logs = rank.folder / "logs" / f"node{rank.topology.node}"
        self._fleet = EngineFleet(
            rank.topology, rank.watch, rank.store, rank.settings, logs, rank.report, rank.phase_file
        )
        self.engines: NodeEngines | None = None
        # connections of the thread that generates ahead, if any
        self.ahead_engines: NodeEngines | None = None
        self.clocks = EngineClocks()
        # sends the weights, after a meeting that asked for them
        self.on_lost: Callable[[], None] = lambda: None
        self._sync: WeightSync | None = None
        self.remote = RemoteEngines(rank, self._fleet)
        # indices of the engines of this node for which the last meeting asked
        self._renewed: list[int] = []
        presence.work |= {
            "generate": self._rows_left,
            "restart": self._restarting,
            "sync": self._buckets_gathered,
        }

    @property
    def _connections(self) -> list[NodeEngines]:
        """Connections of this rank, also those of its rounds ahead; they may have no engine yet."""
        return [one for one in (self.engines, self.ahead_engines) if one is not None]

    # ---- what is left of a phase; any thread asks -------------------------------------------------------------------

    def _rows_left(self) -> str:
        return f"{sum(engines.rows_left for engines in self._connections)} rows left"

    def _restarting(self) -> str:
        starting = self._fleet.restarts.state() if self._fleet.restarts is not None else ""
        wanted = self._rank.settings.min_engines or 0
        if starting or not wanted or self._rank.topology.rank:
            return starting
        serving = self.remote.num_serving
        return f"{serving} of {wanted} engines serve" if serving < wanted else ""

    def _buckets_gathered(self) -> str:
        sync = self._sync
        return (
            f"{sync.num_gathered} of {len(sync.buckets)} buckets gathered"
            if sync is not None
            else ""
        )

    # ---- start and end ----------------------------------------------------------------------------------------------

    def launch(self, model: Any, processing_class: Any, keywords: dict[str, Any]) -> None:
        """Start the processes of this node's engines with the outline of a model. Local main process only."""
        _, engine_settings = self._plan(model, keywords)
        self._fleet.launch(
            engine_settings, partial(save_without_weights, base_of(model), processing_class)
        )

    def _plan(self, model: Any, keywords: dict[str, Any]) -> tuple[SyncPlan, EngineSettings]:
        """Return which weights of a model the syncs send, and the settings of the engines that get them."""
        rank, settings, base = self._rank, self._rank.settings, base_of(model)
        dtype, on_gpu = engine_dtype(settings, base), rank.devices.sender is not None
        plan = plan_sync(
            base, hasattr(model, "peft_config"), settings.lora_sync, dtype, on_gpu=on_gpu
        )
        sees_sender = TRANSPORTS[rank.transport[0]].engines_see_sender
        return plan, EngineSettings(
            settings, rank.topology, rank.devices, dtype, keywords, plan.lora_rank, sees_sender
        )

    def start(self, model: Any, processing_class: Any, keywords: dict[str, Any]) -> NodeEngines:
        """Start this node's engines (local main process) and connect to them (every rank of the node).

        Ranks of a node without engines connect to those of the other nodes.
        """
        rank, settings = self._rank, self._rank.settings
        self.model = model  # including its adapter: FSDP2 shards this module, and its forward gathers the shards
        base = base_of(model)
        plan, engine_settings = self._plan(model, keywords)
        self.dtype = engine_settings.dtype
        bucket_bytes = int(settings.sync_bucket_mb * 2**20)
        transport = self._transport(engine_settings.see_sender)
        gather = ShardGather(rank.args.device, [node.ranks for node in rank.topology.nodes])
        transport.staged = stages(plan, transport, bool(settings.max_staleness), rank.has_agents)
        reason = None
        if rank.topology.is_local_main:
            if rank.needs_slots:
                source = plan.source(base, self.dtype, gather)
                reason = reserve_slots(source, bucket_bytes, transport)
            self._start_engines(engine_settings, base, processing_class)
            transport.folder = self._fleet.folder
        engines = self._connect(engine_settings)
        plan = checked_with_engines(plan, base, engines, settings.lora_sync, gather)
        if plan.reason and rank.topology.rank == 0:
            rank.report(plan.reason)
        sender = engines.own if rank.fills_slots else None
        source = plan.source(base, self.dtype, gather)
        self._sync = build_sync(source, sender, bucket_bytes, transport, rank.topology)
        self._sync.in_flight, self._sync.recompute_kv = settings.in_flight, settings.recompute_kv
        self._agree_on_slots(self._sync, transport, gather, reason)
        if rank.has_agents:
            self._expect_agents(engines, base, keywords)
        return engines

    def _start_engines(
        self, engine_settings: EngineSettings, base: Any, processing_class: Any
    ) -> None:
        """Start this node's engines, and let other nodes reach them. Local main process only."""
        write_model = partial(save_without_weights, base, processing_class)
        self._fleet.start(engine_settings, write_model)
        if self._rank.opens_port:
            self.remote.open(engine_settings, write_model, lambda: self._sync)

    def _connect(self, engine_settings: EngineSettings) -> NodeEngines:
        """Connect this rank to its engines, and the thread that generates ahead, if any."""
        settings = self._rank.settings
        self.engines = self._fleet.connect(engine_settings.window)
        if settings.max_staleness or settings.scores_groups:
            window = engine_settings.open_window if settings.in_flight else engine_settings.window
            self.ahead_engines = self._fleet.connect(window)
        return self.engines

    def _expect_agents(self, engines: NodeEngines, base: Any, keywords: dict[str, Any]) -> None:
        """Let agents join from now on."""
        config = base.config.get_text_config()
        engines.context = keywords.get("max_model_length") or config.max_position_embeddings
        engines.find_more = self.find_agents
        if self._rank.topology.rank == 0:
            self.remote.announce()

    def _agree_on_slots(
        self, sync: WeightSync, transport: Transport, gather: ShardGather, reason: str | None
    ) -> None:
        """Give every bucket a slot of its own on all nodes or on none: without, a restart needs the other nodes."""
        wanted = transport.staged
        transport.staged = bool(gather.extremes(wanted)[0])
        if transport.staged:
            place = gather.meet(*transport.reserved_at)
            needs_none = gather.is_local_main or not self._rank.needs_slots
            joined = needs_none or sync.join(place)
            sync.takes_turns = bool(gather.extremes(joined)[0])
        self._settle_slots(wanted, transport, reason)

    def _settle_slots(self, wanted: bool, transport: Transport, reason: str | None) -> None:
        """Report whether every bucket has a slot of its own; if not, give back what this node has reserved for that.

        Raises:
            `WeightSyncError`: if agents need these slots.
        """
        if self._rank.has_agents and not transport.staged:
            raise WeightSyncError(
                f"{self._rank.topology}: agents pull the weights from a slot for each bucket, and a node has no room "
                f"for them{f': {reason}' if reason else ''}. Give it more shared memory, or leave `min_engines` "
                "out."
            )
        if reason is not None:
            self._rank.report(f"training waits until the engines have loaded its weights: {reason}")
        elif wanted and not transport.staged:
            transport.close()
        elif wanted and self._rank.topology.rank == 0:
            self._rank.report(
                "engines load the weights beside training, from a slot for each bucket"
            )

    def _transport(self, sees_sender: bool) -> Transport:
        rank = self._rank
        seen = [
            rank.devices.seen_by(index, sees_sender)
            for index in range(len(rank.devices.per_engine))
        ]
        return Transport(
            rank.transport[0],
            rank.args.device,
            pin=rank.devices.sender is not None,
            timeout_s=rank.settings.engine_stall_timeout,
            seen_as=[gpus.index(rank.devices.sender) for gpus in seen] if sees_sender else [],
            workers=[rank.settings.vllm_tensor_parallel_size] * len(seen),
            report=rank.report,
        )

    def end(self) -> None:
        """End the engines of this rank, close its connections, and drop all large objects."""
        self.remote.close()
        self._fleet.close(self.engines)
        for engines in self._connections:
            engines.close()
        # otherwise a second close could close reused file descriptors
        self.engines = self.ahead_engines = None
        if self._sync is not None:
            self._sync.close()
        self.model = self._sync = None

    @property
    def divergence_limit(self) -> float:
        """Limit for the mean |engine - trainer| log-prob per token; 0: none. Read it only once training has begun,
        because DeepSpeed casts the model after the trainer's `__init__`."""
        settings = self._rank.settings
        return divergence_limit(
            settings.logprob_divergence_limit, training_dtype(settings, self.model), self.dtype
        )

    # ---- agents -----------------------------------------------------------------------------------------------------

    def find_agents(self) -> bool:
        """Follow the newest membership between two meetings, for a rank that has no engine left; return whether
        engines have joined. Main thread."""
        if not self._rank.has_agents or self.engines is None:
            return False
        for client in self.engines.lost:
            self.remote.forget(client.place.node)
        return self._follow()

    def _follow(self, key: str = "") -> bool:
        """Connect to engines that have joined, and send no new rows to those that leave. Main thread."""
        joined = self.remote.follow(key)
        for engines in self._connections:
            engines.leave_out(self.remote.members.serving)
        if self.engines is not None:
            for place in joined:
                if not self.engines.join(place):
                    self.remote.forget(place.node)
        if joined and self.ahead_engines is not None:
            self.ahead_engines.renew_later((), joined)
        return bool(joined)

    def wait_for_engines(self) -> None:
        """Wait on rank 0 until `min_engines` serve; the other ranks wait for it in the next meeting.

        Rank 0 reports every 15 s how many serve. Only the watch ends the wait.
        """
        wanted = self._rank.settings.min_engines or 0
        if not self._rank.has_agents or self._rank.topology.rank:
            return
        reported = time.monotonic()
        with self._rank.phases("restart"):
            # a checkpoint at the end of this step, with the engines that are left, is worth more
            preempted = self._agreement.preemption
            while not preempted.asked and (serving := self.remote.num_serving) < wanted:
                if time.monotonic() - reported > PROGRESS_EVERY_S:
                    reported = time.monotonic()
                    self._rank.report(f"{serving} of {wanted} engines serve (`min_engines`)")
                time.sleep(AGENT_POLL_S)

    # ---- meetings ---------------------------------------------------------------------------------------------------

    def align(self) -> None:
        """Wait until all ranks call this; unlike a collective, the wait has no limit. The log counts it as `wait`.

        Meanwhile this rank takes part in sending the weights to engines that other ranks have lost.
        """
        while self.meet():
            self.on_lost()
        if self.engines is not None:
            # the other ranks are in collectives from now on, and come to no meeting
            self.engines.recover = None

    def meet(self, lost: Iterable[LostEngine] = ()) -> bool:
        """Wait until all ranks call this or `align`. Then wait for the engines that any rank has lost to be ready.

        Args:
            lost (`Iterable[LostEngine]`, *optional*):
                Engines of this rank that need the weights.

        Returns:
            `bool`: the same on every rank: whether all ranks must send the weights to engines that were lost.
        """
        with self._rank.phases("wait"):
            words = self._agreement.meeting.wait(" ".join([*map(str, lost), *self.remote.news()]))
        for key in [word for word in words if word.startswith(MEMBERS)]:
            words.remove(key)
            self._follow(key)
        if words:
            engines = lost_engines(words)
            self._wait_for_restarts(engines)
            self._renew({(engine.node, engine.index) for engine in engines})
        return bool(words)

    def _wait_for_restarts(self, lost: list[LostEngine]) -> None:
        """Wait until the engines that any rank has lost are ready. Every rank calls it."""
        own = [engine for engine in lost if engine.node == self._rank.topology.node]
        self._renewed = [engine.index for engine in own]
        with self._rank.phases("restart"):
            if self._fleet.restarts is not None:
                for engine in own:
                    self._fleet.restarts.wait_for(engine.index, engine.start)
            self._agreement.meeting.wait()  # no rank waits in a collective while an engine starts

    def _renew(self, places: set[tuple[int, int]]) -> None:
        """Connect to the engines of these nodes and indices there, which were started again."""
        clients = self.engines or ()
        indices = [
            client.index for client in clients if (client.place.node, client.place.index) in places
        ]
        if self.engines is not None:
            self.engines.renew(indices)
        if indices and self.ahead_engines is not None:  # whose thread connects by itself
            self.ahead_engines.renew_later(indices)

    def lost_engines(self) -> list[LostEngine]:
        """Return each engine that this rank has lost, in any of its threads."""
        assert self.engines is not None
        ahead = [client for client in self.ahead_engines or () if client.lost is not None]
        lost = {(client.index, client.ready.start) for client in (*self.engines.lost, *ahead)}
        found = []
        for client in self.engines:
            place = client.place
            if (client.index, client.ready.start) in lost and not place.is_of_agent:
                found.append(LostEngine(place.node, place.index, client.ready.start))
        return found

    def engines_to_restore(self) -> list[LostEngine]:
        """Return the engines for which this rank asks before a sync: those that were started again.

        If no other engine of the node serves, also those that still start.
        """
        restarts = self._fleet.restarts
        if restarts is None or self.engines is None or not self.engines.tolerant:
            return []
        lost = self.lost_engines()
        all_lost = len(lost) == len(self.engines)
        return [engine for engine in lost if all_lost or restarts.is_ready(engine.index)]

    @property
    def num_restarts(self) -> int:
        """Number of restarts of the engines that this rank owns."""
        return 0 if self._fleet.restarts is None else self._fleet.restarts.count

    @property
    def slots_have_all(self) -> bool:
        """Return whether the slots have all weights, so that `restore` is no collective. Equal on every rank."""
        return self._sync is not None and self._sync.staged

    def restore(self, version: WeightVersion) -> None:
        """Send the weights of `version` to the engines that were started again. All ranks call it.

        It is a collective, unless the slots have all weights.
        """
        assert self._sync is not None and self.engines is not None
        group = self.engines.serving(self._renewed) if self._rank.fills_slots else None
        self._renewed = []
        source = ""
        if not self.slots_have_all:
            timings = self._sync.send_again(version, group)
        elif group:
            timings = self._sync.load_again(version, group)
            source = ", from the slots"
        if group and timings.num_buckets:
            names = ", ".join(f"engine {engine.index}" for engine in group)
            self._rank.report(
                f"{names} got the weights of {version} again in {timings.total_s:.1f} s{source}"
            )

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
        for connections in self._connections:
            connections.expect(WeightVersion(version.update + 1, self._rank.step()))

    def sync(self, version: WeightVersion) -> SyncTimings:
        """Send the weights; after the first update, verify that no dummy weight remains. A collective of all ranks."""
        if self._sync is None or self.engines is None:
            raise EngineError(
                f"{self._rank.topology}: `trainer.close()`, or a later trainer that needs their GPUs, ended this "
                "trainer's engines. Build another trainer."
            )
        is_first = version.update == 1
        if is_first:
            self._prepare_model()
        timings = self._sync.run(version)
        committed = version.update
        if is_first:
            timings.add(self._sync.settle())
        elif self._sync.staged:
            committed = 0  # the engines load it beside training
        self._read_clocks(self.engines, committed)
        if is_first:
            self._probe(self.engines)
        self._presence.activity.synced = True
        if is_first and self._rank.has_agents:
            # they have weights only now
            self.wait_for_engines()
            self.meet()
        return timings

    def _read_clocks(self, engines: NodeEngines, committed: int) -> None:
        """Read the clocks of this rank's engines, once they have committed an update; the wait counts as sync."""
        asked = EngineGroup(client for client in engines if not client.place.is_of_agent)
        self.clocks.read(answers(asked.post_all(Await(min_update=committed))), len(asked))

    def _prepare_model(self) -> None:
        """Prepare the model for its first sync. Not in `start`, because DeepSpeed may shard it later."""
        keep_head_during_backward(base_of(self.model))
        if self._rank.topology.rank == 0 and (line := unchecked(self.model)):
            self._rank.report(line)

    def _probe(self, engines: NodeEngines) -> None:
        """Compare the log-probs of this node's engines with the trainer's. A collective of all ranks."""
        own = engines.serving(range(len(engines.own))) if self._rank.fills_slots else None
        probe_engines(self.model, own, self.divergence_limit, self._rank.topology)

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
        topology = self._rank.topology
        check_finite(trained, str(topology), self._rank.step(), sends_whole=topology.is_local_main)


def base_of(model: Any) -> Any:
    """Return the model whose weights the engines load, without its adapter."""
    return model.get_base_model() if hasattr(model, "peft_config") else model
