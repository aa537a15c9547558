"""vLLM's own layer of experts, without an engine. Its functions import vLLM, which changes the environment."""

from typing import Any

import torch

HIDDEN, WIDTH = 64, 64
FUSED = ("gate_up_proj", "down_proj")  # names of the fused tensors in transformers


def expert_layer(
    experts: int, tp: int = 1, tp_rank: int = 0, ep: int = 1, padded: bool = False
) -> Any:
    """Build the layer of one worker; the caller has set a current config of vLLM.

    Args:
        experts (`int`):
            Experts of the model.
        tp (`int`), tp_rank (`int`), ep (`int`):
            Workers that split each expert, this worker's number among them, and workers that split their number.
        padded (`bool`):
            Whether both dimensions are larger than in the checkpoint, as some kernels want them.
    """
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    class Padded(RoutedExperts):
        def _get_quant_method(self, *args: Any) -> Any:
            method = super()._get_quant_method(*args)
            method.maybe_roundup_sizes = lambda hidden, width, *_: (hidden + 64, width + 64)
            return method

    parallel = FusedMoEParallelConfig(
        tp_size=tp, tp_rank=tp_rank, ep_size=ep, ep_rank=0, use_ep=ep > 1, pcp_size=1, pcp_rank=0, dp_size=1,
        dp_rank=0, sp_size=1, all2all_backend="", enable_eplb=False,
    )  # fmt: skip
    manager = ExpertMapManager(64, 2, experts, 0, None, parallel, "linear", enable_eplb=False)
    config = FusedMoEConfig(
        num_experts=experts, num_logical_experts=experts, num_local_experts=manager.local_num_experts,
        experts_per_token=2, hidden_dim=HIDDEN, intermediate_size=WIDTH, activation=MoEActivation.SILU, device="cpu",
        routing_method=RoutingMethodType.Default, moe_parallel_config=parallel, in_dtype=torch.float32,
    )  # fmt: skip
    kind = Padded if padded else RoutedExperts
    return kind("model.layers.0.mlp.experts", torch.float32, config, None, manager)


def fused_weights(experts: int) -> dict[str, torch.Tensor]:
    """Return random tensors of so many experts, as transformers names and fuses them."""
    random = torch.Generator().manual_seed(0)
    shapes = (experts, 2 * WIDTH, HIDDEN), (experts, HIDDEN, WIDTH)
    return {
        name: torch.randn(shape, generator=random)
        for name, shape in zip(FUSED, shapes, strict=True)
    }
