"""Floating-point operations of training and the peak rate of devices, for the model FLOPs utilization (MFU)."""

from dataclasses import dataclass
from typing import Any

import torch

from ..model_layers import experts_of, layers_of

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
    """FLOPs of one forward and backward pass: `per_token * tokens + per_square * squares(lengths)` over rows.

    The formula is that of PaLM, appendix B (https://arxiv.org/abs/2204.02311), as torchtitan computes it: 6 N per
    token for N parameters without embeddings, and 6 L H (K + V) T per token for the attention over T tokens in L
    layers of H heads with keys and values of K and V elements, without a discount for the causal mask. Layers with a
    window W leave out the pairs of tokens beyond it, a square of T - W. Frozen parameters count 4 instead of 6,
    because they have no gradient; experts count by the share of them that a token uses. Passes without gradients (old
    and reference log-probs), recomputed activations and the states of recurrent layers are left out, so the
    utilization is a lower bound.
    """

    per_token: float
    per_square: float
    window: int = 0  # tokens
    limited: float = 0.0  # share of `per_square` in layers with a window

    def squares(self, lengths: Any) -> Any:
        """Return the squared lengths of rows, a tensor or a number, less what layers with a window leave out."""
        beyond = (lengths - self.window) * (lengths > self.window)
        return lengths**2 - self.limited * beyond**2

    def of(self, tokens: float, squares: float) -> float:
        """Return the FLOPs of rows with `tokens` tokens and the sum `squares` of `squares(lengths)`."""
        return self.per_token * tokens + self.per_square * squares


def model_flops(model: torch.nn.Module) -> ModelFlops | None:
    """Return the FLOPs of a text model; `None` if its config lacks a number, or for a model of texts and images."""
    try:
        config: Any = model.config
        return text_flops(model) if config.get_text_config() is config else None
    # a custom model; a number per layer instead of one
    except (
        AttributeError,
        TypeError,
        RuntimeError,
    ):
        return None


def text_flops(model: Any) -> ModelFlops:
    """Return the FLOPs of a model's language part: its decoder and the output layer, without a vision tower."""
    config = model.config.get_text_config()
    number, used = experts_of(config)
    per_token = _flops_per_token(model, used / number if number else 1.0)
    found = {
        each: 6.0 * each.number * each.heads * (each.key_size + each.value_size)
        for each in layers_of(config).attention
    }
    limited = sum(flops for each, flops in found.items() if each.window)
    per_square = sum(found.values())
    window = max((each.window for each in found), default=0)
    return ModelFlops(per_token, per_square, window, limited and limited / per_square)


def _flops_per_token(model: Any, share: float) -> float:
    """Return the FLOPs of the parameters, of which those of experts count by the `share` that a token uses."""
    head = getattr(model.get_output_embeddings(), "weight", None)
    parts = {id(head), *map(id, model.get_decoder().parameters())}
    # embeddings only look rows up, unless one is tied to the output layer
    parts -= {
        id(each.weight)
        for each in model.modules()
        if isinstance(each, torch.nn.Embedding) and each.weight is not head
    }
    return sum(
        (6.0 if parameter.requires_grad else 4.0)
        * getattr(parameter, "ds_numel", parameter.numel())  # `numel` is 0 for a ZeRO-3 shard
        * (share if ".experts." in name else 1.0)
        for name, parameter in model.named_parameters()
        if id(parameter) in parts
    )
