"""`NodeHost`: one rank's part in its node's engines: pre-flight checks, start, weight sync, shutdown.

Every rank has one. The local main process's `NodeHost` also owns the engine processes; the other ranks of the node
read the folder of the engines' sockets from the run's rendezvous store.
"""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..engine.fleet import EngineFleet
from ..engine.node_engines import NodeEngines
from ..engine.settings import EngineSettings, check_vllm, engine_dtype, training_dtype
from ..errors import ConfigurationError
from ..node_settings import NodeSettings
from ..run.agreement import Disagreement, Facts, disagreements
from ..run.begin import begin_run
from ..run.clock import clock_offset
from ..run.decision import StepDecision
from ..run.disk import as_disk_error, written_folders
from ..run.gpu_variables import check_accelerator, check_gpu_variables
from ..run.heartbeats.activity import RankActivity
from ..run.heartbeats.beats import Beats
from ..run.heartbeats.judges import Limits
from ..run.meeting import Meeting
from ..run.phase_file import PhaseFile
from ..run.phases import Phases
from ..run.preemption import Preemption
from ..run.progress import ProgressLines
from ..run.reporter import warn
from ..run.store import connect_store
from ..run.topology import EngineDevices, Topology, assign_engines, idle_gpus
from ..run.warn_once import WarnOnce
from ..run.watch.watchdog import Watchdog
from ..transports.opening import TRANSPORTS
from ..weights.building import build_sync, checked_with_engines, plan_sync, reserve_slots
from ..weights.gathering import ShardGather
from ..weights.host_copy import HostCopy
from ..weights.probe import divergence_limit
from ..weights.sync import WeightSync
from ..weights.transport import Transport, choose, machine_of
from ..wire.stop_signals import check_preempt_signal
from .ending import EndingHost, _with_engines
from .syncing import SyncingHost


class NodeHost(SyncingHost, EndingHost):
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
        self.user_calls: list[Callable[[], str]] = []  # each returns what a user's function does beside generation
        self._ends = False
        # per engine, at the last sync: busy seconds, total seconds, and row-seconds over slots
        self.engine_clocks: list[tuple[float, float, float, float]] = []
        self.on_lost: Callable[[], None] = lambda: None  # sends the weights, after a meeting that asked for them
        self._renewed: list[tuple[int, int]] = []  # engines of this node for which the last meeting asked
        self._clock_starts: dict[int, int] = {}  # by engine: number of the process whose clock was read last
        self._clock_offsets: dict[int, tuple[float, float, float, float]] = {}  # by engine: clocks of those before it
        self._kv_use = 0.0  # greatest of the node's engines since the last `take_kv_use`
        with self.watch.guard(self.watch.close):
            begin_run(self.watch, folder, lambda: self.step(), self.settings.engine_start_timeout)
            store = connect_store(self.topology, self.watch.run)
            self.devices = self._check()
            if self.topology.is_local_main and (idle := idle_gpus(self.devices)):
                warn(f"node {self.topology.node}: {idle}")
            self.transport = choose(self.settings.weight_transport, machine_of(self.devices))
            if store is not None:
                self.watch.watch_local_ranks(store)
        self.save_decision = StepDecision(self.topology, store, "save")
        self.preemption = Preemption(self.topology, store, self.settings.preemption_grace, self.watch)
        self._meeting = Meeting(self.topology, store, self._state)
        self._measure_clock: Callable[[], float | None] | None = partial(clock_offset, self.topology, store)
        self.watch.add_chore(self._meeting.report_progress)
        self.activity = RankActivity(self.phases, self._meeting, lambda: self.step(), self._left)
        self._start_beats()
        logs = folder / "logs" / f"node{self.topology.node}"
        self._fleet = EngineFleet(
            self.topology, self.watch, store, self.settings, logs, self._report, self._phase_file
        )
        self._progress_lines = ProgressLines(self.phases, lambda: self.step(), self._left)
        if self.topology.rank == 0:
            self._progress_lines.start()
        self._warn_once = WarnOnce(self.watch.is_first)
        if self.topology.launched:
            self._warn_once.install()
        atexit.register(self._close_at_exit)

    @property
    def attempt(self) -> int:
        """Number of this start of a trainer with this `output_dir`, from 1."""
        return self._phase_file.attempt

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

    def _start_beats(self) -> None:
        settings = self.settings
        limits = Limits(settings.heartbeat_timeout, settings.stuck_timeout, settings.engine_start_timeout)
        Beats(self.topology, self.watch, limits, self.activity)

    def _state(self) -> str:
        """Return what this rank does, for a line of a rank that waits for it. The watch thread calls it."""
        if self._ends:
            return "which has closed its trainer or ended its script"
        if self.phases.current == "restart":
            return f"in phase restart: {self._left('restart') or 'an engine starts again'}"
        if self.phases.current != "generate":
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - time.monotonic() + self.phases.since))
            return f"in phase {self.phases.current} since {since}"
        return f"generating, {self._left('generate')}"

    def _left(self, phase: str) -> str:
        """Return what is left or done in a phase of this rank, as far as that is known. Any thread calls it."""
        if phase == "generate":
            connections = filter(None, (self.engines, self.ahead_engines))  # a rank also waits for rounds ahead
            rows = f"{sum(engines.rows_left for engines in connections)} rows left"
            return ", ".join([rows, *filter(None, (call() for call in self.user_calls))])
        if phase == "restart":
            return self._fleet.restarts.state() if self._fleet.restarts is not None else ""
        if phase == "sync" and (sync := self._sync) is not None:
            return f"{sync.num_gathered} of {len(sync.buckets)} buckets gathered"
        if phase == "checkpoint":
            return f"{size_of(Path(self.args.output_dir) / f'checkpoint-{self.step()}') / 1e9:.1f} GB written"
        return ""

    def facts(self) -> Facts:
        """Return an empty collection for facts of this rank."""
        return Facts(self.topology)

    def agree(self, facts: Facts) -> list[Disagreement]:
        """Compare facts of all ranks; every rank calls it and gets the same answer. A single process has none."""
        return [] if self.topology.world_size == 1 else disagreements(self._meeting, self.topology, facts)

    # ---- pre-flight checks ------------------------------------------------------------------------------------------

    def _check(self) -> EngineDevices:
        self.topology.check()
        check_preempt_signal()
        check_vllm()
        num_gpus = 0
        if not self.args.use_cpu:
            check_gpu_variables(os.environ, f"node {self.topology.node}")
            num_gpus = torch.cuda.device_count()
            check_accelerator(num_gpus, self.topology.node)
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
                f"({max_positions}): TRL lets conversations grow to it.",
                setting="vllm_max_model_length",
                got=limit,
                expected=max_positions,
                cure="Leave it unset, or raise it.",
            )

    # ---- engines ----------------------------------------------------------------------------------------------------

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
            elif self.settings.max_staleness or self.settings.scores_groups:
                self.ahead_engines = self._fleet.connect(count, settings.window)
            plan = checked_with_engines(plan, self._base, self.engines, lora_sync, gather)
            if plan.reason and self.topology.rank == 0:
                self._report(plan.reason)
            self._sync = build_sync(
                plan, self._base, self.dtype, gather, self.engines, bucket_bytes, transport, self.topology
            )
            self._sync.in_flight, self._sync.recompute_kv = self.settings.in_flight, self.settings.recompute_kv
            if self.keeps_copy and self.topology.is_local_main:
                self._sync.copy = HostCopy(self._report)
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


def size_of(folder: Path) -> int:
    """Return the bytes of the files in a folder that other processes are writing."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # renamed or removed meanwhile
            total += path.stat().st_size
    return total
