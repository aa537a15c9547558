"""What a plan calculates equals what other programs count: DeepSpeed, autograd, the public models, the benchmarks."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plan_kit import PARAMETERS, layouts, size, task
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from trl_multinode.tools.plan.layouts import sync_seconds, weight_sync
from trl_multinode.tools.plan.model_size import size_of
from trl_multinode.tools.plan.sync_seconds import load_seconds
from trl_multinode.tools.plan.training import (
    LAYER_BYTES,
    LIVE_PARAMETERS,
    REDUCE_BUCKET,
    activation_bytes,
    layer_bytes,
    state_bytes,
)

# test_plan_command.py compares the numbers of docs/operate/sizing.md, which change with each formula
pytestmark = pytest.mark.nightly
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
DIMENSIONS = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 448, "num_attention_heads": 4, "num_key_value_heads": 2
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
}
SMALL = {
    "qwen2": lambda **more: Qwen2Config(**DIMENSIONS, **more),
    "qwen3": lambda **more: Qwen3Config(**DIMENSIONS, head_dim=64, **more),
    "llama": lambda **more: LlamaConfig(**DIMENSIONS, **more),
    "experts": lambda **more: Qwen3MoeConfig(**DIMENSIONS, **EXPERTS, head_dim=32, **more),
}
TOKENS = 512


def small(kind: str, layers: int = 2, tied: bool = False) -> torch.nn.Module:
    config = SMALL[kind](num_hidden_layers=layers, tie_word_embeddings=tied)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_meta_device_counts_the_parameters_of_the_public_models(name):
    assert size(name).parameters / 1e9 == pytest.approx(PARAMETERS[name], abs=6e-4)


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize(("nodes", "ranks"), [(1, 8), (4, 7), (4, 4), (16, 6)])
def test_state_bytes_are_those_of_deepspeeds_estimator(name, nodes, ranks):
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as estimate

    model = size(name)
    offloads = {"none": (False, False), "optimizer": (True, False), "all": (True, True)}
    for offload, (optimizer, parameters) in offloads.items():
        ours, host = state_bytes(model, [ranks] * nodes, offload)
        their_host, theirs, _ = estimate(
            model.parameters, model.largest_layer, ranks, nodes, optimizer, parameters
        )
        assert ours + LAYER_BYTES * model.largest_layer == pytest.approx(theirs, rel=0.02)
        if offload != "none":
            assert host == pytest.approx(their_host, rel=0.02)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", SMALL)
def test_the_meta_device_counts_what_deepspeed_counts_in_a_real_model(kind, tied):
    from deepspeed.runtime.zero.stage3 import model_to_params

    model = small(kind, tied=tied)
    with torch.device("meta"):
        planned = size_of(AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16))
    assert (planned.parameters, planned.largest_layer) == model_to_params(model)


def test_the_buckets_are_deepspeeds_defaults():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    defaults = DeepSpeedZeroConfig(stage=3)
    assert (defaults.max_live_parameters, defaults.reduce_bucket_size) == (
        LIVE_PARAMETERS,
        REDUCE_BUCKET,
    )


def kept_bytes(model: torch.nn.Module, checkpointed: bool = False) -> int:
    """Bytes that autograd keeps of a forward pass, parameters left out."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (storage := tensor.untyped_storage().data_ptr()) not in weights:
            kept[storage] = tensor  # a reference, so that no later tensor gets this address
        return tensor

    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(0, 512, (1, TOKENS))
    with (
        warnings.catch_warnings(),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        warnings.simplefilter("ignore")
        output = model.train().model(input_ids=ids, use_cache=False)
    assert output.last_hidden_state.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("kind", SMALL)
def test_a_layer_keeps_the_bytes_that_autograd_keeps(kind):
    measured = (kept_bytes(small(kind, 3)) - kept_bytes(small(kind, 2))) / TOKENS
    assert layer_bytes(size_of(small(kind))) == pytest.approx(measured, rel=0.05)


def test_a_checkpointed_layer_keeps_its_input():
    measured = kept_bytes(small("llama", 3), checkpointed=True) - kept_bytes(
        small("llama", 2), checkpointed=True
    )
    assert measured / TOKENS == pytest.approx(2 * DIMENSIONS["hidden_size"], rel=0.05)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "experts"])
def test_a_backward_pass_needs_the_memory_that_it_has_at_its_peak(kind):
    """TRL's head is left out: on a CPU it computes in large tiles, for which a GPU has a kernel."""
    from torch.distributed._tools.mem_tracker import MemTracker

    model, tracker = small(kind).train(), MemTracker()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tracker.track_external(model)
    with tracker:
        model.model(
            input_ids=torch.randint(0, 512, (1, TOKENS)), use_cache=False
        ).last_hidden_state.sum().backward()
    (peak,) = (
        sizes
        for device, sizes in tracker.get_tracker_snapshot("peak").items()
        if device.type == "cpu"
    )
    weights = sum(parameter.nbytes for parameter in model.parameters())
    measured = peak[next(key for key in peak if str(key) == "Total")] - 2 * weights
    assert activation_bytes(size_of(model), 1, TOKENS) == pytest.approx(measured, rel=0.1)


def test_a_sync_takes_the_seconds_of_the_benchmarks_projection():
    recorded, network = json.loads((RESULTS / "projection.json").read_text()), "one NIC per node"
    found = recorded["projected"][network]
    cells = {
        (row["model"], row["split"]): row["seconds"] for row in found if row["transport"] == "host"
    }
    pauses = {row["model"]: row for row in recorded["pauses"][network]}
    compared = 0
    for (name, split), took in cells.items():
        if name not in PARAMETERS:
            continue
        reserved = int(split[-1])
        for nodes in (4, 64):
            plan = task(
                name, f"--nodes {nodes}x8 --gpu H200-141 --completion 4096 --rows 256 --link 400"
            )
            layout = layouts(plan)[split, reserved]
            assert sync_seconds(plan, layout) == pytest.approx(took[str(nodes)], abs=0.006)
            seconds, pause = layout.seconds, pauses[name]["seconds"][str(nodes)]
            if seconds is not None:
                assert seconds.pause == pytest.approx(pause, abs=0.006)
            assert load_seconds(weight_sync(plan, layout)) == pytest.approx(
                pauses[name]["load_s"], abs=0.006
            )
            slow = replace(plan, cluster=replace(plan.cluster, link=plan.cluster.link / 10))
            assert sync_seconds(slow, layout) > 2 * sync_seconds(plan, layout)
            compared += 1
    assert compared == 8
