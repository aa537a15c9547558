"""Fused experts reach vLLM's layer in three calls of its loader, with the bits that it has loaded one by one.

The layer is vLLM's own, without an engine; `test_model_architectures.py` has engines.
"""

from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from forks import forked

from multinode_kit.expert_layer import FUSED, expert_layer, fused_weights

pytestmark = pytest.mark.engine
EXPERTS = 4
CPU = torch.device("cpu")
ONE_BY_ONE = 3 * EXPERTS


class Reload:
    """One reload of a layer: calls of its loader, error, and the weights.

    Args:
        layer (`torch.nn.Module`):
            vLLM's layer of experts.
        experts (`int`):
            Experts of the sent tensors.
        names (`tuple[str, ...]`):
            Tensors that are sent.
        together (`bool`):
            Whether the reload is ours, or vLLM's own.
    """

    def __init__(self, layer, experts=EXPERTS, names=FUSED, together=True):
        from vllm.model_executor.model_loader.reload import (
            layerwise,
            meta,
            record_metadata_for_reloading,
        )

        from trl_multinode.vllm_worker import reloading

        model, config = torch.nn.ModuleList([layer]), SimpleNamespace(hf_text_config=None)
        sent = fused_weights(experts)
        record_metadata_for_reloading(model)
        create = meta.materialize_meta_tensor
        with ExitStack() as patches, torch.no_grad():
            count = layerwise.get_numel_loaded
            calls = patches.enter_context(patch.object(layerwise, "get_numel_loaded", wraps=count))
            # padding is uninitialized memory
            zeros = patch.object(meta, "materialize_meta_tensor", lambda one: create(one).zero_())
            patches.enter_context(zeros)
            if not together:
                patches.enter_context(patch.object(reloading, "load_experts_together"))
            writes = reloading.begin_reload(model, CPU)
            with writes.watched():
                list(layer.load_weights((name, sent[name]) for name in names))
            self.error = reloading.end_reload(model, config, writes)
        self.calls = calls.call_count
        self.weights = [parameter.data for parameter in layer.parameters()]


def compared(**kind) -> dict:
    """Return what our reload and vLLM's own do to the same layer."""
    ours, theirs = (
        Reload(expert_layer(EXPERTS, **kind)),
        Reload(expert_layer(EXPERTS, **kind), together=False),
    )
    pairs = zip(ours.weights, theirs.weights, strict=True)
    return {
        "calls": [ours.calls, theirs.calls],
        "errors": [ours.error, theirs.error],
        "equal": all(map(torch.equal, *zip(*pairs, strict=True))),
        "loaded": all(bool(weight.any()) for weight in ours.weights),
    }


def quantized() -> int:
    """Return the calls for a layer whose method is not that of unquantized experts."""
    layer = expert_layer(EXPERTS)
    layer.quant_method = torch.nn.Identity()
    return Reload(layer).calls


def too_many() -> str:
    with pytest.raises(IndexError) as raised:
        Reload(expert_layer(EXPERTS), experts=EXPERTS + 1)
    return str(raised.value)


def body(_: int) -> dict:  # vLLM changes the environment of the process that imports it
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        return {
            "whole": compared(),
            "second of two workers": compared(tp=2, tp_rank=1),
            "padded": compared(padded=True),
            "padded, second of two workers": compared(tp=2, tp_rank=1, padded=True),
            "expert parallel": compared(ep=2),
            "quantized": quantized(),
            "no down_proj": Reload(expert_layer(EXPERTS), names=FUSED[:1]).error,
            "one expert less": Reload(expert_layer(EXPERTS), experts=EXPERTS - 1).error,
            "one expert more": too_many(),
        }


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    with forked(body, 1, tmp_path_factory.mktemp("rank")) as (rank,):
        return rank.result


@pytest.mark.parametrize(
    "kind", ["whole", "second of two workers", "padded", "padded, second of two workers"]
)
def test_a_layer_takes_three_calls_and_gets_the_same_bits(kind, found):
    expected = {"calls": [3, ONE_BY_ONE], "errors": [None, None], "equal": True, "loaded": True}
    assert found[kind] == expected


def test_experts_of_several_workers_and_quantized_ones_are_loaded_one_by_one(found):
    # the layer is complete with its own half of the last matrices
    calls = ONE_BY_ONE - EXPERTS // 2
    expected = {"calls": [calls, calls], "errors": [None, None], "equal": True, "loaded": True}
    assert found["expert parallel"] == expected
    assert found["quantized"] == ONE_BY_ONE


@pytest.mark.parametrize("kind", ["no down_proj", "one expert less"])
def test_a_layer_that_lacks_a_matrix_or_an_expert_is_an_error(kind, found):
    assert "elements came" in found[kind]


def test_an_expert_too_many_is_an_error(found):
    assert "out of bounds" in found["one expert more"] or "out of range" in found["one expert more"]
