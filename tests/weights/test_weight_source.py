"""What a weight sync sends: which tensors, in which dtype, cut into which buckets, lying where in a slot."""

import pytest
import torch
from torch import nn
from transformers.core_model_loading import WeightRenaming

from multinode_kit.models import renamed_llava, tiny_qwen2
from trl_multinode.weights.buckets import (
    ALIGNMENT,
    WeightMeta,
    layer_key,
    plan_buckets,
    slot_layout,
)
from trl_multinode.weights.names import checkpoint_names
from trl_multinode.weights.source import ModuleSource


class Router(nn.Module):
    """Has every kind of tensor that a sync must tell apart."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.inner = nn.Linear(4, 2)
        self.register_buffer("score_bias", torch.arange(3.0))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("cache", torch.zeros(5), persistent=False)
        self.inner.register_buffer("scale", torch.ones(2, dtype=torch.float64))


def float_meta(name: str, *shape: int) -> WeightMeta:
    return WeightMeta(name, torch.float32, shape)


def names(buckets) -> list[list[str]]:
    return [[meta.name for meta in bucket] for bucket in buckets]


LAYER_BYTES = 256  # of two tensors of 32 floats each
TWO_LAYERS = [
    float_meta(f"model.layers.{layer}.{part}.weight", 32)
    for layer in range(2)
    for part in ("q", "k")
]


# ---- which tensors


def test_parameters_and_persistent_buffers_are_sent_a_tied_one_once():
    metadata = {meta.name: meta for meta in ModuleSource(Router(), torch.bfloat16).metadata()}
    assert set(metadata) == {
        "embed.weight",
        "inner.weight",
        "inner.bias",
        "score_bias",
        "steps",
        "inner.scale",
    }
    assert metadata["embed.weight"] == WeightMeta(
        "embed.weight", torch.bfloat16, (6, 4), divisible=True
    )
    assert metadata["embed.weight"].num_bytes == 48
    # dtypes of buffers
    kept = {
        "score_bias": torch.float32,
        "steps": torch.int64,
        "inner.scale": torch.float64,
    }
    assert {name: meta.dtype for name, meta in metadata.items()} == dict.fromkeys(
        metadata, torch.bfloat16
    ) | kept
    module = nn.Linear(1, 1, bias=False)
    module.weight.data = torch.empty(0)
    module.weight.ds_shape = torch.Size([8, 4])  # sharded
    (meta,) = ModuleSource(module, torch.bfloat16).metadata()
    assert meta == WeightMeta("weight", torch.bfloat16, (8, 4), divisible=True)


def test_names_and_shapes_are_those_of_the_checkpoint():
    for tied in (True, False):
        model = tiny_qwen2(tied=tied)
        state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        if tied:
            del state["lm_head.weight"]
        metadata = ModuleSource(model, torch.float32).metadata()
        assert {meta.name: meta.shape for meta in metadata} == state
        assert len(metadata) == len(state)
    wrapped = "model.layers.0._checkpoint_wrapped_module.mlp.weight"  # of activation checkpointing
    assert checkpoint_names(nn.Linear(1, 1), [wrapped]) == {wrapped: "model.layers.0.mlp.weight"}


def test_names_are_those_of_the_checkpoint_where_transformers_renames_while_it_loads(tmp_path):
    model, names = renamed_llava(tmp_path)
    assert not names & {name for name, _ in model.named_parameters()} and len(names) > 50
    assert {meta.name for meta in ModuleSource(model, torch.float32).metadata()} == names
    # ZeRO-3 leaves those in
    model._weight_conversions.append(WeightRenaming("never_seen", "lm_head"))
    assert {meta.name for meta in ModuleSource(model, torch.float32).metadata()} == names


def test_gathered_gives_the_tensors_of_the_bucket_in_its_order():
    model = Router()
    source = ModuleSource(model, torch.bfloat16)
    bucket = tuple(reversed(source.metadata()))
    with source.gathering(bucket) as finish:
        pieces = finish()
        tensors = [piece.copy() for piece in pieces]
        assert [tuple(tensor.shape) for tensor in tensors] == [meta.shape for meta in bucket]
        # no copy where nothing is sharded
        assert pieces[-1].data.data_ptr() == model.embed.weight.data_ptr()
        assert tensors[-1].dtype == torch.float32 and not tensors[-1].requires_grad
    assert source.gather.across == source.gather.within == 0


def test_a_parameter_that_a_wrapper_replaced_is_sent_as_it_is_now():
    """FSDP2 puts other parameters into the modules when training begins; the source was built before."""
    model = Router()
    source = ModuleSource(model, torch.float32)
    model.inner.weight = nn.Parameter(torch.full((2, 4), 7.0))
    (meta,) = [meta for meta in source.metadata() if meta.name == "inner.weight"]
    with source.gathering((meta,)) as finish:
        assert torch.equal(finish()[0].copy(), torch.full((2, 4), 7.0))


# ---- buckets


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("model.layers.3.mlp.experts.17.up.weight", "model.layers.3"),
        ("model.layers.12.self_attn.q_proj.bias", "model.layers.12"),
        ("model.embed_tokens.weight", ""),
        ("lm_head.weight", ""),
    ],
)
def test_a_layer_is_named_by_its_outermost_index(name, key):
    assert layer_key(name) == key


def test_small_layers_share_a_bucket_large_ones_are_split_and_the_order_is_kept():
    assert names(plan_buckets(TWO_LAYERS, LAYER_BYTES * 3 // 2)) == names(
        [TWO_LAYERS[:2], TWO_LAYERS[2:]]
    )
    assert names(plan_buckets(TWO_LAYERS, LAYER_BYTES - 1)) == [[meta.name] for meta in TWO_LAYERS]
    metadata = [float_meta("embed", 8), *TWO_LAYERS, float_meta("norm", 8)]
    assert names(plan_buckets(metadata, 1 << 20)) == [[meta.name for meta in metadata]]
    for limit in range(64, 800, 64):
        assert [meta for bucket in plan_buckets(metadata, limit) for meta in bucket] == metadata


def test_no_bucket_is_above_the_limit_but_a_tensor_that_alone_is():
    metadata = [
        float_meta("embed", 1000),
        *TWO_LAYERS,
        float_meta("head", 3),
        float_meta("norm", 3),
    ]
    buckets = plan_buckets(metadata, 300)
    assert names(buckets)[0] == ["embed"]
    assert all(slot_layout(bucket)[-1].end <= 300 for bucket in buckets[1:])
    assert slot_layout(buckets[0])[-1].end == 4000
    # 4 bytes each, 64 in a slot: padding counts
    crumbs = [float_meta(str(index), 1) for index in range(4)]
    assert [len(bucket) for bucket in plan_buckets(crumbs, 2 * ALIGNMENT)] == [2, 2]


def test_tensors_of_a_bucket_lie_aligned_and_apart():
    bucket = (
        float_meta("a", 3),
        WeightMeta("b", torch.bfloat16, (5, 7)),
        WeightMeta("c", torch.int64, ()),
    )
    specs = slot_layout(bucket)
    assert [(spec.name, spec.dtype, spec.shape, spec.offset, spec.num_bytes) for spec in specs] == [
        ("a", "float32", (3,), 0, 12),
        ("b", "bfloat16", (5, 7), 64, 70),
        ("c", "int64", (), 192, 8),
    ]
    assert specs[-1].end == 200
