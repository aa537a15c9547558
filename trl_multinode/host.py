"""`NodeHost`: one rank's part in its node's engines: pre-flight checks, start, weight sync, shutdown.

Every rank has one. The local main process's `NodeHost` also owns the engine processes; the other ranks of the node
read the folder of the engines' sockets from the run's rendezvous store.
"""

import atexit
import gc
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .engine.fleet import EngineFleet
from .engine.node_engines import NodeEngines
from .engine.settings import EngineSettings, check_vllm, engine_dtype, gpu_share, training_dtype
from .errors import ConfigurationError, EngineError
from .node_settings import NodeSettings
from .run.begin import begin_run
from .run.clock import clock_offset
from .run.decision import StepDecision
from .run.disk import as_disk_error, written_folders
from .run.heartbeat import Heartbeat
from .run.meeting import Meeting
from .run.phase_file import PhaseFile
from .run.phases import Phases
from .run.preemption import Preemption
from .run.reporter import report
from .run.store import connect_store
from .run.topology import EngineDevices, Topology, assign_engines
from .run.warn_once import WarnOnce
from .run.watchdog import Watchdog
from .transports.opening import TRANSPORTS
from .weights.building import build_sync, checked_with_engines, plan_sync, reserve_slots
from .weights.finite import check_finite, unchecked
from .weights.probe import divergence_limit, probe_engines
from .weights.shards import ShardGather
from .weights.source import keep_head_during_backward
from .weights.sync import SyncTimings, WeightSync
from .weights.transport import Transport, choose, machine_of
from .wire.messages import Await, Done, WeightVersion
from .wire.stop_signals import check_preempt_signal

_with_engines: "weakref.WeakSet[NodeHost]" = weakref.WeakSet()  # hosts of this process whose engines run


class NodeHost:
    """The engines of a node, as one of its ranks uses them.

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
        folder = Path(args.output_dir) / "_multinode"  # the underscore keeps it out of pushes to the Hub
        self._phase_file = PhaseFile(folder / "phases", self.topology.rank, self.topology.node)
        self.phases = Phases(self._phase_file)
        self.watch = Watchdog(self.topology, lambda: self.phases.current)
        self.watch.explain = partial(as_disk_error, folders=written_folders(args.output_dir))
        self.step: Callable[[], int] = lambda: 0
        self._closing = threading.Lock()
        self._trainer: weakref.ref | None = None
        self._sync: WeightSync | None = None
        self.engines: NodeEngines | None = None
        self.ahead_engines: NodeEngines | None = None  # connections of the thread that generates ahead, if any
        self._ends = False
        # per engine, at the last sync: busy seconds, total seconds, and row-seconds over slots
        self.engine_clocks: list[tuple[float, float, float, float]] = []
        self._kv_use = 0.0  # greatest of the node's engines since the last `take_kv_use`
        with self.watch.guard():
            begin_run(self.watch, folder, lambda: self.step(), self.settings.engine_start_timeout)
            store = connect_store(self.topology, self.watch.run)
            self.devices = self._check()
            self.transport = choose(self.settings.weight_transport, machine_of(self.devices))
            if store is not None:
                self.watch.watch_local_ranks(store)
        self.save_decision = StepDecision(self.topology, store, "save")
        self.preemption = Preemption(self.topology, store, self.settings.preemption_grace, self.watch)
        self._meeting = Meeting(self.topology, store, self._state)
        self._measure_clock: Callable[[], float | None] | None = partial(clock_offset, self.topology, store)
        self.watch.add_chore(self._meeting.report_progress)
        logs = folder / "logs" / f"node{self.topology.node}"
        self._fleet = EngineFleet(self.topology, self.watch, store, self.settings, logs, self._report)
        self._heartbeat = Heartbeat(self.phases, lambda: self.step(), self._left)
        if self.topology.rank == 0:
            self._heartbeat.start()
        self._warn_once = WarnOnce(self.watch.is_first)
        if self.topology.launched and not self.settings.repeat_warnings:
            self._warn_once.install()
        atexit.register(self._close_at_exit)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the engines' weights; defined once `start_engines` is called."""
        return self._dtype

    @property
    def divergence_limit(self) -> float:
        """Limit for the mean |engine - trainer| log-prob per token; 0: none. Read it only once training has begun,
        because DeepSpeed casts the model after the trainer's `__init__`."""
        dtype = training_dtype(self.settings, self._model)
        return divergence_limit(self.settings.logprob_divergence_limit, dtype, self.dtype)

    @property
    def _engines_see_sender(self) -> bool:
        return TRANSPORTS[self.transport[0]].engines_see_sender

    def _report(self, text: str) -> None:
        report(f"node {self.topology.node}: {text}")

    def _state(self) -> str:
        """Return what this rank does, for a line of a rank that waits for it. The watch thread calls it."""
        if self._ends:
            return "which has closed its trainer or ended its script"
        if self.phases.current != "generate":
            return f"in phase {self.phases.current}"
        return f"generating, {self._left('generate')}"

    def _left(self, phase: str) -> str:
        """Return what is left or done in a phase of this rank, as far as that is known. Any thread calls it."""
        if phase == "generate":
            connections = filter(None, (self.engines, self.ahead_engines))  # a rank also waits for its look-ahead
            return f"{sum(engines.rows_left for engines in connections)} rows left"
        if phase == "sync" and (sync := self._sync) is not None:
            return f"{sync.num_gathered} of {len(sync.buckets)} buckets gathered"
        if phase == "checkpoint":
            return f"{size_of(Path(self.args.output_dir) / f'checkpoint-{self.step()}') / 1e9:.1f} GB written"
        return ""

    # ---- pre-flight checks ------------------------------------------------------------------------------------------

    def _check(self) -> EngineDevices:
        self.topology.check()
        check_preempt_signal()
        check_vllm()
        num_gpus = 0 if self.args.use_cpu else torch.cuda.device_count()
        return assign_engines(
            self.topology,
            num_gpus,
            self.settings.vllm_devices,
            self.settings.num_engines,
            self.settings.vllm_tensor_parallel_size,
        )

    def check_context(self, max_positions: int) -> None:
        """Check that the engine's context is not smaller than the model's, to which TRL lets tool loops grow.

        Raises:
            `ConfigurationError`: if it is smaller; the message names both.
        """
        limit = self.args.vllm_max_model_length
        if limit is not None and limit < max_positions:
            raise ConfigurationError(
                f"With tools, `vllm_max_model_length` ({limit}) must be at least the model's own context "
                f"({max_positions}): TRL lets conversations grow to it. Leave it unset, or raise it."
            )

    # ---- engines ----------------------------------------------------------------------------------------------------

    def follow(self, trainer: Any) -> None:
        """Read the optimizer steps of `trainer`, and end the engines when it is garbage-collected.

        This object keeps no reference to the trainer: `atexit` and the watchdog keep this object, and thus would keep
        the trainer too.
        """
        self._trainer = followed = weakref.ref(trainer, self._on_collected)
        last = 0

        def step() -> int:
            nonlocal last
            if (alive := followed()) is not None:
                last = alive.state.global_step
            return last

        self.step = step

    def _on_collected(self, _: weakref.ref) -> None:
        """Let the watch thread end the engines. The garbage collector calls this in any thread, so it takes no lock.

        In a launch, other ranks of the node may still use the engines, so these end when the next trainer is built.
        """
        if not self.topology.launched:
            self.watch.end_with(self._close_unattended)

    def _close_unattended(self) -> None:
        try:
            self.close()
        except Exception:  # the process goes on: a notebook, for example
            traceback.print_exc()

    def _make_room(self) -> None:
        """End the engines of this process's earlier trainers that are collected, or whose GPUs the new engines need.

        All ranks of the node are building the new trainer now, so none uses the earlier engines.
        """
        earlier = [host for host in _with_engines if host is not self]
        if earlier:
            gc.collect()  # a trainer refers to itself, so that it outlives its last name until a collection
        for host in earlier:
            is_collected = host._trainer is not None and host._trainer() is None
            if is_collected or not host._leaves_room_for(self):
                if self.topology.is_local_main and not is_collected:
                    self._report(
                        "the new trainer's engines need the GPUs of an earlier trainer's engines, which end now"
                    )
                host._end_engines() if host.topology.launched else host.close()

    def _leaves_room_for(self, other: "NodeHost") -> bool:
        """Return whether no GPU would have to give both hosts' engines more memory than it has."""
        hosts = (self, other)
        mine, theirs = ({gpu for gpus in host.devices.per_engine for gpu in gpus} for host in hosts)
        return not mine & theirs or sum(gpu_share(host.settings, host.devices) for host in hosts) <= 1.0

    def start_engines(self, model: Any, processing_class: Any, keywords: dict[str, Any]) -> NodeEngines:
        """Start this node's engines (local main process) and connect to them (every rank of the node)."""
        self._model = model  # including its adapter: FSDP2 shards this module, and its forward gathers the shards
        has_adapters = hasattr(model, "peft_config")
        self._base = model.get_base_model() if has_adapters else model
        self._dtype = engine_dtype(self.settings, self._base)
        count, lora_sync = len(self.devices.per_engine), self.settings.lora_sync
        plan = plan_sync(self._base, has_adapters, lora_sync, self.dtype, on_gpu=bool(self.devices.per_engine[0]))
        settings = EngineSettings(
            self.settings, self.topology, self.devices, self.dtype, keywords, plan.lora_rank, self._engines_see_sender
        )
        bucket_bytes, transport = int(self.settings.sync_bucket_mb * 2**20), self._transport()
        with self.watch.guard():
            self._make_room()
            _with_engines.add(self)
            gather = ShardGather(self.topology.ranks_per_node, self.args.device)
            if self.topology.is_local_main:
                reserve_slots(plan, self._base, self.dtype, gather, bucket_bytes, transport)
                self._fleet.start(settings, count, self._base, processing_class)
                transport.folder = self._fleet.folder
            self.engines = self._fleet.connect(count, settings.window)
            if self.settings.in_flight:
                self.ahead_engines = self._fleet.connect(count, settings.open_window)
            elif self.settings.max_staleness:
                self.ahead_engines = self._fleet.connect(count, settings.window)
            plan = checked_with_engines(plan, self._base, self.engines, lora_sync, gather)
            if plan.reason and self.topology.rank == 0:
                self._report(plan.reason)
            self._sync = build_sync(
                plan, self._base, self.dtype, gather, self.engines, bucket_bytes, transport, self.topology
            )
            self._sync.in_flight, self._sync.recompute_kv = self.settings.in_flight, self.settings.recompute_kv
        return self.engines

    def _transport(self) -> Transport:
        count, with_sender = len(self.devices.per_engine), self._engines_see_sender
        seen = [self.devices.seen_by(index, with_sender) for index in range(count)]
        return Transport(
            self.transport[0],
            self.args.device,
            pin=self.devices.sender is not None,
            timeout_s=self.settings.engine_stall_timeout,
            seen_as=[gpus.index(self.devices.sender) for gpus in seen] if with_sender else [],
            workers=[self.settings.vllm_tensor_parallel_size] * count,
            report=self._report,
        )

    def align(self) -> None:
        """Wait until all ranks call this; unlike a collective, the wait has no limit. The log counts it as `wait`."""
        with self.phases("wait"):
            self._meeting.wait()
            measure, self._measure_clock = self._measure_clock, None
            if measure is not None:  # all ranks have just met, so each finds the others ready to respond
                self._phase_file.clock_offset = measure()

    # ---- weights ----------------------------------------------------------------------------------------------------

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

    # ---- end --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Shut the engines down cleanly. `atexit` calls this, and the watch thread for a trainer that is collected; a
        script may call it earlier, and more than once. The ranks of a launch wait for each other."""
        self._close(self.watch.close)

    def _close_at_exit(self) -> None:
        self._close(self.watch.close_at_exit)

    def _close(self, close_watch: Callable[[], None]) -> None:
        self._ends = True
        self._heartbeat.close()
        self._warn_once.restore()
        with self._closing:
            close_watch()
            self._end_engines()
            atexit.unregister(self._close_at_exit)

    def _end_engines(self) -> None:
        self.watch.forget_processes()
        self._fleet.close(self.engines)
        self._drop_large_objects()
        _with_engines.discard(self)

    def _drop_large_objects(self) -> None:
        """Drop all large objects: a script's next trainer needs the memory, and `atexit` would keep them alive."""
        for engines in filter(None, (self.engines, self.ahead_engines)):
            engines.close()
        self.engines = self.ahead_engines = None  # otherwise a second close could close reused file descriptors
        if self._sync is not None:
            self._sync.close()
        last = self.step()
        self.step = lambda: last
        self._model = self._base = self._sync = None


def size_of(folder: Path) -> int:
    """Return the bytes of the files in a folder that other processes are writing."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # renamed or removed meanwhile
            total += path.stat().st_size
    return total
