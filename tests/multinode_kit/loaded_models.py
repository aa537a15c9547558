"""vLLM's models without an engine, in one process: weights sent by a trainer, or loaded from its checkpoint.

Its functions import vLLM, which changes the environment: call them in a process of their own.
"""

import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from trl_multinode.engine.settings import CPU_ENVIRONMENT
from trl_multinode.weights.buckets import slot_layout
from trl_multinode.weights.source import ModuleSource

# of a cache in float8, which attention on a CPU does not have: it returns before it sets them
UNUSED = ("_k_scale", "_q_scale", "_v_scale", "_prob_scale")


def prepare(folder: Path) -> None:
    """Let this process build vLLM's models, as the only worker of an engine. Call it once."""
    import os

    os.environ.update(CPU_ENVIRONMENT)
    from vllm.distributed import init_distributed_environment
    from vllm.model_executor.models import registry

    # vLLM looks at a model class in a process of its own: 6 s for each new class
    registry._run_in_subprocess = lambda look: look()
    init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")


class LoadedModel:
    """vLLM's model of a checkpoint's config.

    Args:
        checkpoint (`Path`):
            Folder with a config, and with weights if they are loaded from it.
        dtype (`torch.dtype`):
            Dtype of the model.
        loads (`bool`):
            Whether vLLM loads the weights of the checkpoint; otherwise they are random.
    """

    def __init__(self, checkpoint: Path, dtype: torch.dtype, loads: bool):
        from vllm.distributed import destroy_model_parallel, ensure_model_parallel_initialized
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.model_loader import get_model

        args = EngineArgs(
            model=str(checkpoint),
            load_format="auto" if loads else "dummy",
            dtype=str(dtype).removeprefix("torch."),
            enforce_eager=True,
            max_model_len=256,
            skip_tokenizer_init=True,
        )
        self._config = args.create_engine_config()
        with self.current():
            # experts have a group of their own
            destroy_model_parallel()
            ensure_model_parallel_initialized(1, 1)
            self.model = get_model(vllm_config=self._config)
        self._writes: Any = None

    def current(self) -> AbstractContextManager:
        """Return the context in which vLLM's code finds the config of this model."""
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self._config)

    def reload(self, source: ModuleSource) -> str | None:
        """Load all that a source sends, as a worker does; return the names of layers that lack weights."""
        from trl_multinode.vllm_worker.loading import load_tensors, parts_to_load
        from trl_multinode.vllm_worker.reloading import begin_reload, end_reload

        # the least that needs no ranges, so that a layer is in several buckets
        buckets = source.buckets(max(meta.num_bytes for meta in source.metadata()))
        with self.current():
            parts = parts_to_load(self.model, [slot_layout(bucket) for bucket in buckets])
            writes = begin_reload(self.model, torch.device("cpu"), self._writes)
            for bucket in buckets:
                with source.gathering(bucket) as finish:
                    gathered = zip(bucket, finish(), strict=True)
                    tensors = [
                        (meta.name, pieces.copy().to(meta.dtype)) for meta, pieces in gathered
                    ]
                load_tensors(self.model, tensors, parts, writes)
            self._writes = writes
            return end_reload(self.model, self._config.model_config, writes)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return parameters, buffers, and what layers and their attention keep of them, by name.

        On a CPU linear layers pack their weights behind a function and drop them; its product with the unit matrix is
        the weight, bit by bit.
        """
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        found: dict[str, torch.Tensor] = {}
        for path, module in self.model.named_modules():
            weight = get_layerwise_info(module).restore_metadata[0].get("weight")
            # the attention of DeepSeek keeps its packed parts itself
            packs = hasattr(module, "cpu_linear") and not path.endswith("kv_b_proj")
            if packs and weight is not None and weight.ndim == 2:
                unit = torch.eye(weight.shape[1], dtype=weight.dtype)
                found[f"{path}.cpu_linear"] = module.cpu_linear(unit, module.weight, None)
            own = module._parameters | module._buffers | vars(module)
            for name, value in own.items():
                if name not in ("_parameters", "_buffers", "_modules", *UNUSED):
                    add_tensors(found, f"{path}.{name}", value)
        return found

    def differing(self, other: "LoadedModel") -> list[str]:
        """Return the names of the tensors that are not equal, bit by bit."""
        mine, its = self.tensors(), other.tensors()
        return sorted(
            name
            for name in mine.keys() | its.keys()
            if name not in mine or name not in its or not torch.equal(mine[name], its[name])
        )


def add_tensors(found: dict[str, torch.Tensor], name: str, value: Any, depth: int = 4) -> None:
    """Add the tensors in a value, in lists and objects of vLLM's within it, but not in other modules."""
    if isinstance(value, torch.Tensor):
        found[name] = value
    if isinstance(value, torch.Tensor | torch.nn.Module | type) or depth == 0:
        return
    inner: dict[Any, Any] = {}
    if isinstance(value, dict):
        inner = value
    elif isinstance(value, list | tuple):
        inner = dict(enumerate(value))
    elif type(value).__module__.startswith("vllm.") and ".config" not in type(value).__module__:
        inner = getattr(value, "__dict__", {})
    for key, each in inner.items():
        add_tensors(found, f"{name}.{key}", each, depth - 1)


def sent_and_loaded(model: PreTrainedModel, updates: int = 2) -> dict[str, Any]:
    """Send a model several times, changed in between; compare vLLM's tensors with those of the last checkpoint.

    Returns:
        `dict`: `lacking` of each update, `differing` tensors, how many were compared, and how many `stale` ones differ
        after a further change that is not sent.
    """
    noise = torch.Generator().manual_seed(0)

    def change() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                step = torch.randn(parameter.shape, generator=noise)
                parameter.add_(step.to(parameter), alpha=0.05)

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = LoadedModel(Path(folder), model.dtype, loads=False)
    source = ModuleSource(model, model.dtype)
    lacking = []
    for _ in range(updates):
        change()
        lacking.append(engine.reload(source))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = LoadedModel(Path(folder), model.dtype, loads=True)
    change()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        later = LoadedModel(Path(folder), model.dtype, loads=True)
    return {
        "lacking": lacking,
        "differing": engine.differing(loaded),
        "compared": len(engine.tensors()),
        "stale": len(engine.differing(later)),
    }
