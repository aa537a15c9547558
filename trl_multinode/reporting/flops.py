"""Floating-point operations of training and the peak rate of devices, for the model FLOPs utilization (MFU)."""

from dataclasses import dataclass
from typing import Any

import torch

# Dense bfloat16 TFLOPS of the vendors' data sheets, without sparsity; the first name that is part of the device's name
# counts, so that longer names come first. ROCm shows each of the two dies of an MI250X or MI250 as a device.
PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.5,
    "H200 NVL": 835.5,
    "H200": 989.5,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.5,
    "H100": 989.5,
    "H800 PCIe": 756.5,
    "H800": 989.5,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "MI355X": 2516.6,
    "MI350X": 2309.6,
    "MI325X": 1307.4,
    "MI300X": 1307.4,
    "MI300A": 980.6,
    "MI250X": 191.5,
    "MI250": 181.0,
    "MI210": 181.0,
}


def peak_flops(settings: Any, device: torch.device) -> float | None:
    """Return the peak rate of a rank's device in FLOP/s; `None` on a CPU, for an unknown device, and in float32.

    Args:
        settings ([`NodeSettings`]):
            Settings, which have the precision.
        device (`torch.device`):
            Device of the rank.
    """
    half = settings.bf16 or settings.fp16 or settings.mixed_precision in ("bf16", "fp16")
    if device.type != "cuda" or not half:
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of a device by its name; `None` if the table lacks it, or for a MIG slice."""
    words = name.replace("-", " ").replace("/", " ").split()
    if "MIG" in words:
        return None
    for known, tflops in PEAK_TFLOPS.items():
        if all(part in words for part in known.split()):
            return tflops * 1e12
    return None


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of one forward and backward pass: `per_token * tokens + per_square * sum(length ** 2)` over rows.

    The formula is that of PaLM, appendix B (https://arxiv.org/abs/2204.02311), as torchtitan computes it: 6 N per
    token for N parameters without the input embedding, and 12 L H Q T per token for the attention over T tokens in L
    layers of H heads of size Q, without a discount for the causal mask. Frozen parameters count 4 instead of 6,
    because they have no gradient; experts count by the share of them that a token uses. Passes without gradients (old
    and reference log-probs) and recomputed activations are left out, so the utilization is a lower bound.
    """

    per_token: float
    per_square: float

    def of(self, tokens: float, squares: float) -> float:
        """Return the FLOPs of rows with `tokens` tokens and `squares`, the sum of their squared lengths."""
        return self.per_token * tokens + self.per_square * squares


def model_flops(model: torch.nn.Module) -> ModelFlops | None:
    """Return the FLOPs of a text model; `None` if its config lacks a number, or for a model of texts and images."""
    try:
        return _flops_of(model)
    # a custom model; a number per layer instead of one
    except (
        AttributeError,
        TypeError,
        NotImplementedError,
    ):
        return None


def _flops_of(model: Any) -> ModelFlops | None:
    config = model.config
    if config.get_text_config() is not config:
        return None
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    experts = (
        getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
    )
    share = (getattr(config, "num_experts_per_tok", None) or experts) / experts
    lookup = _lookup_only(model)
    per_token = sum(
        (6.0 if parameter.requires_grad else 4.0)
        * getattr(parameter, "ds_numel", parameter.numel())  # `numel` is 0 for a ZeRO-3 shard
        * (share if ".experts." in name else 1.0)
        for name, parameter in model.named_parameters()
        if parameter is not lookup
    )
    return ModelFlops(per_token, 12.0 * layers * heads * size)


def _lookup_only(model: Any) -> torch.nn.Parameter | None:
    """Return the weight of the input embedding, unless it is tied to the output layer and thus takes part there."""
    given, head = model.get_input_embeddings(), model.get_output_embeddings()
    weight = getattr(given, "weight", None)
    return None if weight is getattr(head, "weight", None) else weight
