"""`NodeHost`: one rank's part in its node's engines: pre-flight checks, start, weight sync, shutdown.

Every rank has one. The local main process's `NodeHost` also owns the engine processes; the other ranks of the node
read the folder of the engines' sockets from the run's rendezvous store.
"""

import atexit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .engine.fleet import EngineFleet
from .engine.node_engines import NodeEngines
from .engine.settings import EngineSettings, check_vllm, engine_dtype
from .errors import ConfigurationError, EngineError
from .node_settings import NodeSettings
from .run.phases import Phases
from .run.reporter import report
from .run.store import connect_store
from .run.topology import EngineDevices, Topology, assign_engines
from .run.watchdog import Watchdog
from .transports.opening import TRANSPORTS
from .weights.building import build_sync, checked_with_engines, plan_sync
from .weights.finite import check_finite
from .weights.probe import probe_engines
from .weights.shards import ShardGather
from .weights.source import keep_head_during_backward
from .weights.sync import SyncTimings, WeightSync
from .weights.transport import Transport, choose, machine_of
from .wire.messages import Await, Done, WeightVersion


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
        self.phases = Phases(folder / "phases" / f"rank{self.topology.rank}.jsonl")
        self.watch = Watchdog(self.topology, lambda: self.phases.current)
        self.step: Callable[[], int] = lambda: 0
        self._sync: WeightSync | None = None
        self.engines: NodeEngines | None = None
        self.ahead_engines: NodeEngines | None = None  # connections of the look-ahead thread, if `max_staleness=1`
        self.engine_clocks: list[tuple[float, float]] = []  # per engine, at the last sync: busy seconds, total seconds
        with self.watch.guard():
            store = connect_store(self.topology, self.watch.run)
            self.devices = self._check()
            self.transport = choose(self.settings.weight_transport, machine_of(self.devices))
            if store is not None:
                self.watch.watch_local_ranks(store)
        logs = folder / "logs" / f"node{self.topology.node}"
        self._fleet = EngineFleet(self.topology, self.watch, store, self.settings, logs, self._report)
        atexit.register(self.close)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the engines' weights; defined once `start_engines` is called."""
        return self._dtype

    @property
    def _engines_see_sender(self) -> bool:
        return TRANSPORTS[self.transport[0]].engines_see_sender

    def _report(self, text: str) -> None:
        report(f"node {self.topology.node}: {text}")

    # ---- pre-flight checks ------------------------------------------------------------------------------------------

    def _check(self) -> EngineDevices:
        self.topology.check()
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
        with self.watch.guard():
            if self.topology.is_local_main:
                self._fleet.start(settings, count, self._base, processing_class)
            self.engines = self._fleet.connect(count, settings.window)
            if self.settings.max_staleness:
                self.ahead_engines = self._fleet.connect(count, settings.window)
            gather = ShardGather(self.topology.ranks_per_node, self.args.device)
            plan = checked_with_engines(plan, self._base, self.engines, lora_sync, gather)
            if plan.reason and self.topology.rank == 0:
                self._report(plan.reason)
            bucket_bytes = int(self.settings.sync_bucket_mb * 2**20)
            self._sync = build_sync(
                plan, self._base, self.dtype, gather, self.engines, bucket_bytes, self._transport(), self.topology
            )
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
            folder=self._fleet.folder if self.topology.is_local_main else Path(),
            report=self._report,
        )

    # ---- weights ----------------------------------------------------------------------------------------------------

    def sync(self, version: WeightVersion) -> SyncTimings:
        """Send the weights; after the first update, verify that no dummy weight remains. A collective of all ranks."""
        if self._sync is None or self.engines is None:
            raise EngineError(
                f"{self.topology}: `trainer.close()` ended this trainer's engines. Build another trainer."
            )
        if version.update == 1:
            keep_head_during_backward(self._base)  # not in `start_engines`: DeepSpeed may shard the model later
        timings = self._sync.run(version)
        done = self.engines.ask_all(Await(min_update=version.update))  # counts the wait for the engines as sync
        self.engine_clocks = [(reply.busy_s, reply.clock_s) for reply in done if isinstance(reply, Done)]
        if version.update == 1:
            engines = self.engines if self.topology.is_local_main else None
            limit = self.settings.logprob_divergence_limit
            probe_engines(self._model, engines, self.dtype, self.topology, limit)
        return timings

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
        """Shut the engines down cleanly. `atexit` calls this; a script may call it earlier, and more than once."""
        self.watch.close()
        self.watch.forget_processes()
        self._fleet.close(self.engines)
        self._drop_large_objects()

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
        atexit.unregister(self.close)
