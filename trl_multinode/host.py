"""`NodeHost`: one rank's part in its node's engines: pre-flight checks, start, weight sync, shutdown.

Every rank has one. The local main process's `NodeHost` also owns the engine processes; the other ranks of the node
read the folder of the engines' sockets from the run's rendezvous store.
"""

import atexit
import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch

from . import faults
from .blackboard import connect_store
from .config import field_or_default
from .engine.node_engines import NodeEngines
from .engine.process import EngineProcess, RunFolder, wait_until_ready
from .engine.protocol import Await, Done, WeightVersion
from .engine.settings import EngineSettings, check_vllm, engine_dtype, save_without_weights
from .errors import ConfigurationError, EngineError
from .phases import Phases
from .topology import EngineDevices, Topology, assign_engines
from .watch import Watch
from .weights.peft_source import AdapterSource, PeftSource, adapter_obstacle, lora_rank
from .weights.probe import probe_engines
from .weights.shards import ShardGather
from .weights.source import ModuleSource, keep_head_during_backward
from .weights.sync import SyncTimings, WeightSync
from .weights.transports import Transport, choose, machine_of

STOP_TIMEOUT_S = 10.0


class NodeHost:
    """The engines of a node, as one of its ranks uses them.

    Args:
        args ([`~trl.GRPOConfig`]):
            Config with the settings of [`NodeFields`], or a plain TRL config.
        say (`Callable[[str], None]`):
            Function that prints a line of progress; only local main processes call it.

    Raises:
        `ConfigurationError`: before any weights file is opened, if the launch, the GPUs or a setting cannot work.
    """

    def __init__(self, args, say: Callable[[str], None] = print):
        self.args = args
        self.topology = Topology.from_environment()
        folder = Path(args.output_dir) / "_multinode"  # the underscore keeps it out of pushes to the Hub
        self.phases = Phases(folder / "phases" / f"rank{self.topology.rank}.jsonl")
        self.watch = Watch(self.topology, lambda: self.phases.current)
        self.step: Callable[[], int] = lambda: 0
        self._say = lambda text: say(f"[trl_multinode] node {self.topology.node}: {text}")
        self._logs = folder / "logs" / f"node{self.topology.node}"
        self._processes: list[EngineProcess] = []
        self._folder: RunFolder | None = None
        self._sync: WeightSync | None = None
        self.engines: NodeEngines | None = None
        self.ahead_engines: NodeEngines | None = None  # connections of the look-ahead thread, if `max_staleness=1`
        self.engine_clocks: list[tuple[float, float]] = []  # per engine, at the last sync: busy seconds, total seconds
        with self.watch.guard():
            self._store = connect_store(self.topology, self.watch.run)
            self.devices = self._check()
            self.transport = choose(field_or_default(args, "weight_transport"), machine_of(self.devices))
            if self._store is not None:
                self.watch.watch_local_ranks(self._store)
        atexit.register(self.close)

    @property
    def rollout_seed(self) -> int | None:
        return field_or_default(self.args, "rollout_seed")

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the engines' weights; defined once `start_engines` is called."""
        return self._settings.dtype

    # ---- checks before the model ------------------------------------------------------------------------------------

    def _check(self) -> EngineDevices:
        self.topology.check()
        check_vllm()
        num_gpus = 0 if self.args.use_cpu else torch.cuda.device_count()
        return assign_engines(
            self.topology,
            num_gpus,
            field_or_default(self.args, "vllm_devices"),
            field_or_default(self.args, "num_engines"),
            self.args.vllm_tensor_parallel_size,
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

    def start_engines(self, model, processing_class, keywords: dict) -> NodeEngines:
        """Start this node's engines (local main process) and connect to them (every rank of the node)."""
        self._model = model  # with its adapter: FSDP2 shards this module, and its forward gathers the shards
        self._has_adapters = hasattr(model, "peft_config")
        base = self._base = model.get_base_model() if self._has_adapters else model
        dtype = engine_dtype(self.args, base)
        rank = lora_rank(base) if self._has_adapters and self._serves_adapter(base, dtype) else 0
        self._settings = EngineSettings(self.args, self.topology, self.devices, dtype, keywords, rank)
        with self.watch.guard():
            if self.topology.is_local_main:
                self._launch(base, processing_class)
            folder = self._exchange_folder()
            self.engines = self._connect(folder)
            if field_or_default(self.args, "max_staleness"):
                self.ahead_engines = self._connect(folder)
            self._build_sync(base, separate_adapter=rank > 0)
        return self.engines

    def _serves_adapter(self, model, dtype: torch.dtype) -> bool:
        """Return `True` if syncs should send only the adapter, as far as is known before the engines run."""
        if field_or_default(self.args, "lora_sync") == "merged":
            return False
        obstacle = adapter_obstacle(model, dtype, on_gpu=bool(self.devices.per_engine[0]))
        return obstacle is None or self._must_merge(obstacle)

    def _must_merge(self, reason: str) -> Literal[False]:
        if field_or_default(self.args, "lora_sync") == "adapter":
            raise ConfigurationError(f"`lora_sync='adapter'`, but {reason}. Use 'merged' or 'auto'.")
        if self.topology.rank == 0:
            self._say(f"every weight sync sends all weights, with the LoRA adapter merged into them: {reason}")
        return False

    def _connect(self, folder: Path) -> NodeEngines:
        return NodeEngines(
            [folder / f"engine{index}.sock" for index in range(len(self.devices.per_engine))],
            self.topology.node,
            self.topology.rank,
            folder / "load",
            field_or_default(self.args, "engine_stall_timeout"),
            window=self._settings.window,
            log_folder=self._logs,
        )

    def _launch(self, model, processing_class) -> None:
        self._folder = RunFolder(self.topology.node)
        model_folder = self._folder.path / "model"
        save_without_weights(model, processing_class, model_folder)
        count = len(self.devices.per_engine)
        self._say(f"starting {count} engine(s); logs in {self._logs}")
        for index in range(count):
            process = EngineProcess(
                index,
                self.topology.node,
                self._folder,
                self._logs / f"engine{index}.log",
                self._settings.arguments(model_folder, index),
                self._settings.environment(index, self.transport[0]),
                module=os.environ.get("TRL_MULTINODE_ENGINE_MODULE", "trl_multinode.engine.main"),
                delay_s=faults.delay_of_engine(index),
            )
            self._processes.append(process)
            self.watch.add_process(process.pid, lambda p=process: f"{p.name} ended: {p.why_ended()}")  # type: ignore
        self.watch.add_cleanup(self._kill_engines)
        wait_until_ready(self._processes, field_or_default(self.args, "engine_start_timeout"), self._say)

    def _exchange_folder(self) -> Path:
        """Return the node's run folder; the other ranks wait until the local main process has started the engines."""
        if self._store is None:
            assert self._folder is not None
            return self._folder.path
        key = f"folder/{self.topology.node}"
        if self._folder is not None:
            self._store.set(key, str(self._folder.path))
        from datetime import timedelta

        seconds = field_or_default(self.args, "engine_start_timeout")
        try:
            self._store.wait([key], timedelta(seconds=seconds + 30))
        except Exception as error:
            raise EngineError(
                f"Rank {self.topology.rank} (node {self.topology.node}) did not hear from its local main process "
                f"within {seconds + 30:.0f} s: {error}. See {self._logs}, or raise `engine_start_timeout`."
            ) from error
        return Path(self._store.get(key).decode())

    # ---- weights ----------------------------------------------------------------------------------------------------

    def _build_sync(self, model, separate_adapter: bool) -> None:
        assert self.engines is not None
        limit = int(field_or_default(self.args, "sync_bucket_mb") * 2**20)
        gather = ShardGather(self.topology.ranks_per_node, self.args.device)
        served = all(ready.serves_lora for ready in self.engines.ready)
        # One node without LoRA decides for all, because all nodes must send the same tensors.
        if separate_adapter and gather.extremes(served)[0] == 0:
            separate_adapter = self._must_merge(f"vLLM has no LoRA for a {type(model).__name__}")
        merges = PeftSource if self._has_adapters else ModuleSource
        source = (AdapterSource if separate_adapter else merges)(model, self.dtype, gather)
        sender = self.engines if self.topology.is_local_main else None
        self._sync = WeightSync(source, sender, limit, self._transport())
        lowest, highest = gather.extremes(self._sync.plan_crc)
        if lowest != highest:
            raise ConfigurationError(
                f"{self.topology}: the ranks would send different weights (names, shapes or dtypes differ), so their "
                "models are not the same. Use the same model, config and library versions on every node."
            )

    def _transport(self) -> Transport:
        count, with_sender = len(self.devices.per_engine), self.transport[0] == "ipc"
        seen = [self.devices.seen_by(index, with_sender) for index in range(count)]
        return Transport(
            self.transport[0],
            self.args.device,
            pin=self.devices.sender is not None,
            timeout_s=field_or_default(self.args, "engine_stall_timeout"),
            seen_as=[gpus.index(self.devices.sender) for gpus in seen] if with_sender else [],
            workers=[self.args.vllm_tensor_parallel_size] * count,
            folder=self._folder.path if self._folder else Path(),
            say=self._say,
        )

    def sync(self, version: WeightVersion) -> SyncTimings:
        """Send the weights; after the first update, verify that no dummy weight remains. A collective of all ranks."""
        if self._sync is None or self.engines is None:
            raise EngineError(
                f"{self.topology}: `trainer.close()` ended this trainer's engines. Build another trainer."
            )
        if version.update == 1:
            keep_head_during_backward(self._base)  # DeepSpeed has not sharded the model before this point
        timings = self._sync.run(version)
        done = self.engines.ask_all(Await(min_update=version.update))  # counts the wait for the engines as sync
        self.engine_clocks = [(reply.busy_s, reply.clock_s) for reply in done if isinstance(reply, Done)]
        if version.update == 1:
            engines = self.engines if self.topology.is_local_main else None
            limit = field_or_default(self.args, "logprob_divergence_limit")
            probe_engines(self._model, engines, self.dtype, self.topology, limit)
        return timings

    def send_everything(self) -> None:
        """Make the next sync send the frozen weights too."""
        if self._sync is not None:
            self._sync.send_everything()

    # ---- end --------------------------------------------------------------------------------------------------------

    def _kill_engines(self) -> None:
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):  # the remaining engines must still be killed
                process.kill()
        if self._folder is not None:
            self._folder.remove()

    def close(self) -> None:
        """Shut the engines down cleanly. `atexit` calls this; a script may call it earlier, and more than once."""
        self.watch.close()
        self.watch.forget_processes()
        asked = self.engines is not None
        if self._processes:
            if self.engines is not None:
                self.engines.shutdown(STOP_TIMEOUT_S)
            for process in self._processes:
                process.stop(STOP_TIMEOUT_S if asked else 0.0)
            self._kill_engines()
            self._processes.clear()
        self._let_go()

    def _let_go(self) -> None:
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
