"""Loading of an update's tensors into vLLM's model: fused tensors, writes past the layers' loaders, unknown names."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.model_loader.reload import layerwise

from ..libraries import installed, replaced
from ..wire.messages import Parts, TensorSpec

try:
    from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
except ImportError:  # vLLM 0.26 and 0.27 have one set for loading and for the meta device
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS as SKIP_LOAD_TENSORS

ROUTING_BIAS = "e_score_correction_bias"
Storage = int  # address of a storage: views share it, on the meta device too


# ---- fused tensors --------------------------------------------------------------------------------------------------


def parts_to_load(
    model: torch.nn.Module, buckets: Sequence[Sequence[TensorSpec]]
) -> dict[str, Parts]:
    """Return the fused tensors that the loader of `model` takes in parts only, by name. Call it between updates.

    A fused tensor of experts loads in 5 ms where its parts take 52. Which loaders take it differs by model and
    version, so one tensor of each kind is tried.
    """
    fused = [spec for bucket in buckets for spec in bucket if spec.parts is not None]
    one_of_each = {kind_of(spec): spec for spec in fused}
    whole = {kind for kind, spec in one_of_each.items() if takes_fused(model, spec)}
    return {spec.name: spec.parts for spec in fused if spec.parts and kind_of(spec) not in whole}


def kind_of(spec: TensorSpec) -> str:
    """Return the last part of a tensor's name, which is the same in all layers."""
    return spec.name.rpartition(".")[2]


def takes_fused(model: torch.nn.Module, spec: TensorSpec) -> bool:
    """Return whether the loader of `model` passes a fused tensor on to a layer of experts that takes it."""
    loaded: list[str] = []

    def try_to_load(layer: torch.nn.Module, weights: Iterable) -> list[str]:
        try:
            loaded.extend(type(layer).load_weights(layer, weights))
        except NotImplementedError as error:  # no tensor can be copied from the meta device
            loaded.append(str(error))
        return []

    with ExitStack() as replacements:
        for layer in model.modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, FusedMoEMethodBase) and hasattr(layer, "load_weights"):
                attempt = partial(try_to_load, layer)
                replacements.enter_context(replaced(layer, "load_weights", attempt))
        # of a loader that does not know the name
        with suppress(Exception):
            model.load_weights([(spec.name, torch.empty(spec.shape, device="meta"))])
    return bool(loaded)


def split(parts: Parts, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint that a fused tensor consists of."""
    for name, part in zip(parts.names, tensor.chunk(len(parts.names), parts.dim), strict=True):
        if "*" not in name:
            yield name, part
            continue
        for index, one in enumerate(part):
            yield name.replace("*", str(index)), one


# ---- writes past the layers' loaders --------------------------------------------------------------------------------


class DirectWrites(TorchDispatchMode):
    """Copies of a model's loader into parameters themselves, past the parameters' own loaders.

    A reload puts all parameters on the meta device, where a copy does nothing, and collects what their loaders get.
    The loader of gpt-oss copies into its parameters and into views of them, so they would keep their old weights.
    This mode hands each such copy to a loader of the parameter, which repeats it when the layer is complete.

    ```python
    writes = DirectWrites(model, before)         # after the begin of a reload
    with writes.watched():
        model.load_weights(weights)
    writes.missing                               # at its end
    ```

    Watching costs 40 us for each call of a loader that takes 80, so one complete reload without such a copy is the
    last that is watched: all reloads run the same code on the same names.

    Args:
        model (`torch.nn.Module`):
            vLLM's model, in a reload.
        before (`DirectWrites`, *optional*):
            Watch of the previous reload.

    Attributes:
        complete (`bool`):
            Set it at the end of a reload in which all layers got their weights.
        missing (`dict[int, str]`):
            Names of the routing biases of experts that nothing was written to, by storage. vLLM leaves them out of its
            reload.
    """

    def __init__(self, model: torch.nn.Module, before: "DirectWrites | None" = None):
        super().__init__()
        self.complete = False
        self.missing: dict[Storage, str] = {}
        # parameters that a model's loader has written itself
        self._handed: set[tuple[torch.nn.Module, str]] = set()
        self._watches = before is None or not before.complete or bool(before._handed)
        self._owners: dict[Storage, tuple[torch.nn.Module, str]] = {}
        self._in_loader = False
        for path, layer in model.named_modules() if self._watches else ():
            tensors = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
            for name, tensor in tensors:
                if name == ROUTING_BIAS:
                    self.missing.setdefault(storage_of(tensor), f"{path}.{name}")
                elif name not in SKIP_LOAD_TENSORS:
                    self._owners.setdefault(storage_of(tensor), (layer, name))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch what is written while the context is open."""
        if not self._watches:
            yield
            return
        count = self._by_loader(layerwise.get_numel_loaded)
        process = self._by_loader(layerwise._layerwise_process)
        with (
            replaced(layerwise, "get_numel_loaded", count),
            replaced(layerwise, "_layerwise_process", process),
            self,
        ):
            yield

    def _by_loader(self, function: Callable) -> Callable:
        """Return a function of vLLM's reload in which this mode lets every write pass."""

        def passing(*args: Any) -> Any:
            before, self._in_loader = self._in_loader, True
            try:
                return function(*args)
            finally:
                self._in_loader = before

        return passing

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        # torch names operations in place so: aten::copy_, aten::add_.Tensor
        in_place = func.name().partition(".")[0].endswith("_") and isinstance(args[0], torch.Tensor)
        if self._in_loader or not in_place:
            return func(*args, **kwargs or {})
        self.missing.pop(storage_of(args[0]), None)
        owner = self._owners.get(storage_of(args[0]))
        if owner is None and not args[0].is_meta:
            return func(*args, **kwargs or {})
        if owner is None or func is not torch.ops.aten.copy_.default:
            raise RuntimeError(
                f"vLLM's loader writes with {func} into a tensor of shape {tuple(args[0].shape)} of "
                f"{f'parameter {owner[1]}' if owner else 'no parameter'}, which its reload does not notice"
            )
        layer, name = owner
        parameter = getattr(layer, name)
        if owner not in self._handed:
            self._handed.add(owner)
            parameter.weight_loader = copy_into_view
            parameter.weight_loader = layerwise.make_online_process_loader(layer, name)
        view = args[0]
        place = view.size(), view.stride(), view.storage_offset()
        parameter.weight_loader(parameter, args[1], *place)
        return view


def storage_of(tensor: torch.Tensor) -> Storage:
    """Return what tells storages apart, on the meta device too."""
    return tensor.untyped_storage()._cdata


def copy_into_view(
    param: torch.Tensor, loaded_weight: torch.Tensor, size: Any, stride: Any, offset: int
) -> None:
    """Load a tensor into a view of a parameter; the names of the first two arguments are those that vLLM looks for."""
    param.data.as_strided(size, stride, offset).copy_(loaded_weight)


# ---- layers with adapters -------------------------------------------------------------------------------------------


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Put the layers below vLLM's adapters in their place while the context is open.

    Loaders that look a parameter up by its name, such as that of Granite 4, do not find it below an adapter.
    """
    wrapped = layers_with_adapters(model)
    for parent, name, layer in wrapped:
        setattr(parent, name, layer.base_layer)
    try:
        yield
    finally:
        for parent, name, layer in wrapped:
            setattr(parent, name, layer)


# vLLM wraps layers when it builds the model; looking through all of them takes milliseconds, for each bucket
@lru_cache(maxsize=1)
def layers_with_adapters(
    model: torch.nn.Module,
) -> list[tuple[torch.nn.Module, str, BaseLayerWithLoRA]]:
    """Return the layers that vLLM has wrapped, each with its parent and its name there."""
    return [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, BaseLayerWithLoRA)
    ]


# ---- one bucket -----------------------------------------------------------------------------------------------------


def load_tensors(
    model: torch.nn.Module,
    tensors: Iterable[tuple[str, torch.Tensor]],
    parts: Mapping[str, Parts],
    writes: DirectWrites,
) -> None:
    """
    Load tensors of one bucket with the model's own loader.

    Args:
        model (`torch.nn.Module`):
            vLLM's model, in a reload.
        tensors (`Iterable[tuple[str, torch.Tensor]]`):
            Names in the checkpoint, and whole tensors.
        parts (`Mapping[str, Parts]`):
            Fused tensors to cut, from [`parts_to_load`].
        writes (`DirectWrites`):
            Watch of this reload.

    Raises:
        `RuntimeError`: if the loader does not know a tensor; the message names it, the model and the versions.
    """
    last = ""

    def each() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal last
        for name, tensor in tensors:
            last = name
            if name in parts:
                yield from split(parts[name], tensor)
            else:
                yield name, tensor

    try:
        with writes.watched(), without_adapters(model):
            model.load_weights(each())
    except (LookupError, AttributeError, ValueError, AssertionError) as error:
        raise RuntimeError(
            f"The {type(model).__name__} of vLLM {installed('vllm')} cannot load {last} as transformers "
            f"{installed('transformers')} names and shapes it ({type(error).__name__}: {error}). Use versions of "
            "transformers and vLLM that agree on this model."
        ) from error
