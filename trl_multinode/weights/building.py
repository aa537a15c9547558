"""Choice of the weights that a sync sends, with the reason, and construction of the sync."""

import zlib
from dataclasses import dataclass

import torch
from torch import nn

from ..engine.group import EngineGroup
from ..errors import ConfigurationError, WeightSyncError
from ..run.memory import obstacle_to_slots
from ..run.topology import Topology
from .buckets import slot_layout
from .gathering import ShardGather
from .peft_source import AdapterSource, PeftSource, adapter_obstacles, lora_rank
from .source import ModuleSource, WeightSource
from .sync import WeightSync
from .transport import Transport
from .tying import check_tied_head


@dataclass(frozen=True)
class SyncPlan:
    """Source of the weights that the syncs of a run send, and the reason for it."""

    source: type[ModuleSource]
    # rank of the adapter that the engines serve separately from the weights; 0: none
    lora_rank: int = 0
    # reason why a LoRA adapter is merged although the user did not request it
    reason: str | None = None


def plan_sync(
    base: nn.Module, has_adapters: bool, lora_sync: str, dtype: torch.dtype, on_gpu: bool
) -> SyncPlan:
    """Choose the source of the weights, as far as the choice is known before the engines run.

    Args:
        base (`nn.Module`):
            Model without PEFT's wrapper.
        has_adapters (`bool`):
            Presence of LoRA adapters in the model.
        lora_sync (`str`):
            Value of the setting `lora_sync`.
        dtype (`torch.dtype`), on_gpu (`bool`):
            Dtype of the engines' weights, and whether the engines run on GPUs.

    Raises:
        `ConfigurationError`: if `lora_sync="adapter"` is not possible, or if the adapters train a tied embedding and
            head apart.
    """
    if not has_adapters:
        return SyncPlan(ModuleSource)
    check_tied_head(base)
    if lora_sync == "merged":
        return SyncPlan(PeftSource)
    obstacle = next(adapter_obstacles(base, dtype, on_gpu), None)
    return (
        SyncPlan(AdapterSource, lora_rank(base))
        if obstacle is None
        else merged(obstacle, lora_sync)
    )


def merged(obstacle: str, lora_sync: str) -> SyncPlan:
    """Return the plan that merges the adapter because of an obstacle.

    Raises:
        `ConfigurationError`: if `lora_sync="adapter"`.
    """
    if lora_sync == "adapter":
        raise ConfigurationError(
            f"`lora_sync='adapter'`, but {obstacle}.",
            setting="lora_sync",
            got="adapter",
            cure="Use 'merged' or 'auto'.",
        )
    reason = (
        f"every weight sync sends all weights, with the LoRA adapter merged into them: {obstacle}"
    )
    return SyncPlan(PeftSource, reason=reason)


def reserve_slots(source: WeightSource, bucket_bytes: int, transport: Transport) -> str | None:
    """Reserve the memory of the slots before the engines are ready. Local main process only, and no collective.

    If `transport.staged`, every bucket gets a slot of its own; if the node has no memory for that, two slots are
    reserved and `transport.staged` is `False` from then on.

    Returns:
        `str`, *optional*: reason why not every bucket has a slot of its own.

    Raises:
        `WeightSyncError`: if the node has too little shared memory; the message names the largest tensor and the cure.
    """
    layouts = [slot_layout(bucket) for bucket in source.buckets(bucket_bytes)]
    reason = None
    if transport.staged:
        try:
            if obstacle := obstacle_to_slots(sum(layout[-1].end for layout in layouts)):
                raise WeightSyncError(obstacle)
            transport.reserve(layouts)
        except WeightSyncError as error:
            transport.staged, reason = False, str(error)
    if not transport.staged:
        transport.reserve(layouts)
    return reason


def stages(plan: SyncPlan, transport: Transport, ahead: bool, agents: bool) -> bool:
    """Return whether every bucket should have a slot of its own: training then does not wait for the engines' loads.

    Only a run that generates ahead trains meanwhile. A sync of an adapter alone is short, and needs no copy of the
    base. Agents pull every bucket from its slot.
    """
    return agents or (ahead and transport.kind == "host" and not plan.lora_rank)


def checked_with_engines(
    plan: SyncPlan, base: nn.Module, engines: EngineGroup, lora_sync: str, gather: ShardGather
) -> SyncPlan:
    """Return the plan, or a merging one if the engines of any node lack LoRA. A collective of all training ranks.

    One node without LoRA decides for all, because all nodes must send the same tensors.
    """
    if (
        not plan.lora_rank
        or gather.extremes(all(engine.ready.serves_lora for engine in engines))[0]
    ):
        return plan
    return merged(f"vLLM has no LoRA for a {type(base).__name__}", lora_sync)


def build_sync(
    source: WeightSource,
    engines: EngineGroup | None,
    bucket_bytes: int,
    transport: Transport,
    topology: Topology,
) -> WeightSync:
    """Build the weight sync of this rank. A collective of all training ranks.

    Raises:
        `ConfigurationError`: if the ranks would send different tensors.
    """
    sync = WeightSync(source, engines, bucket_bytes, transport)
    # equal on two ranks that would gather the same tensors in the same buckets
    lowest, highest = source.gather.extremes(zlib.crc32(repr(sync.buckets).encode()))
    if lowest != highest:
        raise ConfigurationError(
            "the ranks would send different weights (names, shapes or dtypes differ), so their models are "
            "not the same.",
            setting="model",
            node=topology.node,
            rank=topology.rank,
            cure="Use the same model, config and library versions on every node.",
        )
    return sync
