"""Metrics of an interval: tokens, FLOPs, memory and seconds of all ranks; docs/operate/observe.md names each."""

import math
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from metric_names import documented, mine
from peft import LoraConfig, get_peft_model
from places import topology_on
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig

from trl_multinode.engine.agents import Members
from trl_multinode.node_settings import NodeSettings
from trl_multinode.reporting import steps
from trl_multinode.reporting.flops import ModelFlops, model_flops, peak_flops, peak_of
from trl_multinode.reporting.lines import node_table, rendered, step_line
from trl_multinode.reporting.metrics import (
    NUMBERS,
    RankNumbers,
    RunShape,
    pool_measure,
    step_metrics,
)
from trl_multinode.reporting.steps import StepReport, count_tokens, gpu_memory
from trl_multinode.rollouts.staleness import SUMS, StalenessMeter, summarize_rounds
from trl_multinode.run.phases import PHASES, Phases
from trl_multinode.run.topology import NodeShape
from trl_multinode.weights.timings import STAGES, SyncTimings, sync_metrics

# one node with two training GPUs and two reserved ones
TWO_RESERVED = topology_on([NodeShape(ranks=2, engines=2, reserved=2)])


def rank(phases=(1.0, 20.0, 0.5, 15.0, 4.0), **step) -> RankNumbers:
    values = {"interval_s": 80.0, "batch_tokens": 1000.0, "squares": 1e5, "loss_tokens": 600.0, "gpu_gib": 60.0,
              "gpu_share": 0.8, "host_gib": 10.0} | step  # fmt: skip
    seconds = dict(zip(PHASES, phases, strict=True))
    found = seconds | dict.fromkeys(STAGES, 0.0) | dict.fromkeys(SUMS, 1.0) | values
    assert tuple(found) == NUMBERS
    return found


# ---- seconds and throughput


def test_seconds_are_per_step_and_the_slowest_node_is_named():
    ranks = [rank(), rank(), rank(phases=(1.0, 30.0, 0.5, 15.0, 0.0)), rank()]
    found = step_metrics(ranks, steps=2, shape=RunShape(topology_on([2, 2])))
    assert found["perf/step_s"] == 40.0 and found["perf/generate_s"] == (3 * 10 + 15) / 4
    assert (found["perf/generate_s/min"], found["perf/generate_s/max"]) == (10.0, 15.0)
    assert (found["perf/generate_s/slowest_node"], found["perf/sync_s/slowest_node"]) == (1.0, 0.0)
    assert (found["node0/generate_s"], found["node1/generate_s"]) == (10.0, 12.5)
    assert found["node1/tokens"] == 1000.0 and found["node0/memory_gib"] == 60.0


def test_nodes_of_different_sizes_have_their_own_ranks_and_devices():
    ranks = [rank(), *[rank(phases=(1.0, 30.0, 0.5, 15.0, 0.0))] * 2]
    nodes = topology_on([NodeShape(1, engines=3, reserved=3), NodeShape(2, engines=0, reserved=0)])
    found = step_metrics(ranks, steps=1, shape=RunShape(nodes))
    assert (found["node0/generate_s"], found["node1/generate_s"]) == (20.0, 30.0)
    assert (found["node0/tokens"], found["node1/tokens"]) == (1000.0, 2000.0)
    assert found["perf/generate_s/slowest_node"] == 1.0
    assert found["perf/tokens_per_s_per_device"] == 3000.0 / 80.0 / 6


def test_every_device_counts_also_the_reserved_ones():
    ranks = [rank(), rank()]
    found = step_metrics(ranks, steps=1, shape=RunShape(TWO_RESERVED, iterations=2))
    assert found["perf/tokens_per_s"] == 25.0 and found["perf/tokens_per_s_per_device"] == 6.25
    # trained on twice: counted once
    assert found["perf/valid_tokens_per_device_hour"] == 1200 / 2 / 4 / (80 / 3600)


@pytest.mark.nightly
def test_one_node_has_no_series_per_node_and_what_no_rank_measured_is_left_out():
    without = rank(gpu_gib=math.nan, gpu_share=math.nan, batch_tokens=0.0)
    found = step_metrics(
        [without] * 2,
        steps=1,
        shape=RunShape(TWO_RESERVED, flops=ModelFlops(1.0, 1.0), peak_flops=1.0),
    )
    assert not [name for name in found if name.startswith(("node", "memory/gpu"))]
    assert not [name for name in found if "tokens" in name or "mfu" in name]
    assert found["memory/host_gib/max"] == 10.0


@pytest.mark.nightly
def test_the_fullest_rank_is_found_although_another_one_measured_nothing():
    found = step_metrics(
        [rank(gpu_gib=math.nan), rank(gpu_gib=70.0)], 1, RunShape(topology_on([1, 1]))
    )
    assert (found["memory/gpu_gib/max"], found["memory/gpu_gib/fullest_node"]) == (70.0, 1.0)
    assert "node1/memory_gib" in found


# ---- the pool of engines


def of_engines(clock_s: float, slot_s: float) -> RankNumbers:
    return rank() | {"engine_clock_s": clock_s, "engine_slot_s": slot_s}


def test_the_measure_of_the_pool_has_all_engines_and_the_rank_that_waits_longest():
    ranks = [of_engines(80.0, 60.0), of_engines(80.0, 20.0)]
    ranks[1]["generate"] = 32.0
    found = pool_measure(ranks, step=7, own=2, engines=6, pool_filled=0.8)
    # of two engines half of the slots, of four 0.8; 32 of 80 s
    assert (found.step, found.engines) == (7, 6)
    assert found.filled == pytest.approx((2 * 0.5 + 4 * 0.8) / 6)
    assert found.waiting == 0.4
    # agents came or left in the interval
    assert pool_measure(ranks, step=7, own=2, engines=6, pool_filled=None).filled == 0.5


def test_a_run_without_own_engines_has_the_measure_of_the_agents():
    ranks = [of_engines(0.0, 0.0)] * 2
    assert pool_measure(ranks, 7, own=0, engines=3, pool_filled=0.3).filled == pytest.approx(0.3)
    assert pool_measure(ranks, 7, own=0, engines=3, pool_filled=None) is None


@pytest.mark.parametrize("number", [0, 1])
def test_rank_0_publishes_the_measure_of_each_log(number):
    one = report(OneRank(), rank=number)
    published = []
    one.host.updates.remote = SimpleNamespace(
        num_serving=7, take_filled=lambda: 0.4, publish=published.append, members=Members(3)
    )
    one.host.rank.has_agents = True
    one.begin_step(0)
    found = one.metrics(SyncTimings(), steps_left=9)
    assert ("pool/engines" in found) == (number == 0)
    if number == 0:
        (measure,) = published
        assert found["pool/number"] == 3
        assert (measure.step, measure.engines) == (1, 7) == (one.host.at, found["pool/engines"])
        assert (measure.filled, measure.waiting) == (found["pool/filled"], found["pool/waiting"])
    one.host.rank.has_agents = False
    assert "pool/engines" not in one.metrics(SyncTimings(), steps_left=9)


# ---- tokens of a micro-batch


def test_tokens_are_counted_from_the_masks_that_the_loss_uses():
    prompt = torch.tensor([[0, 1, 1], [1, 1, 1]])
    completion = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    tools = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]])
    batch = {"prompt_mask": prompt, "completion_mask": completion}
    flops = ModelFlops(per_token=1.0, per_square=1.0)
    assert count_tokens(batch, flops).tolist() == [4 + 7, 16 + 49, 6]
    assert count_tokens(batch | {"tool_mask": tools}, flops).tolist() == [11, 65, 5]
    # half of the layers see 5 tokens
    assert count_tokens(batch, ModelFlops(1.0, 1.0, 5, 0.5)).tolist() == [11, 65 - 2**2 / 2, 6]
    labels = torch.tensor([[-100, 5, 5], [-100, -100, 5]])
    found = count_tokens({"attention_mask": prompt, "labels": labels}, flops)
    assert found.tolist() == [5, 13, 3]
    assert count_tokens({"input_ids": prompt}, flops) is None
    # a model whose FLOPs are not known
    assert count_tokens(batch, None)[::2].tolist() == [11, 6]


# ---- FLOPs


def config(tied: bool, **more) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=tied, **more,
    )  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_model_flops_are_6_n_without_the_lookup_and_12_lhq_for_the_attention(tied):
    model = Qwen2ForCausalLM(config(tied))
    blocks = sum(
        p.numel()
        for name, p in model.named_parameters()
        if "layers." in name or name == "model.norm.weight"
    )
    found = model_flops(model)
    # the head multiplies
    assert found == ModelFlops(per_token=6 * (blocks + 64 * 32), per_square=12 * 2 * 4 * 8)
    assert found.of(10, 100) == 10 * found.per_token + 100 * found.per_square


@pytest.mark.nightly
def test_a_token_uses_only_some_experts():
    def model(used: int):
        experts = Qwen3MoeConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, num_experts=8, num_experts_per_tok=used,
        )  # fmt: skip
        return AutoModelForCausalLM.from_config(experts)

    all_used, few_used = (model_flops(model(used)).per_token for used in (8, 2))
    assert all_used - few_used == pytest.approx(6 * 2 * 3 * 32 * 16 * (8 - 2))
    # a config that counts its experts under another name
    uncounted = model(2)
    uncounted.config.num_experts = 0
    assert model_flops(uncounted).per_token == all_used


@pytest.mark.nightly
@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_is_trained_beside_frozen_weights(tied):
    model = Qwen2ForCausalLM(config(tied))
    frozen = model_flops(model).per_token * 4 / 6
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    assert model_flops(adapted).per_token == pytest.approx(frozen + 6 * 2 * (2 * 32 + 32 * 2))


@pytest.mark.nightly
def test_a_model_that_the_formula_does_not_fit_has_no_flops():
    per_layer = Qwen2ForCausalLM(config(tied=True))
    vars(per_layer.config)["num_attention_heads"] = [4, 2]
    assert model_flops(torch.nn.Linear(2, 2)) is None and model_flops(per_layer) is None


@pytest.mark.nightly
def test_the_peak_is_a_data_sheets_and_unknown_on_a_cpu():
    assert peak_of("NVIDIA H100 80GB HBM3") == 989.5e12 and peak_of("NVIDIA H100 PCIe") == 756.5e12
    assert peak_of("NVIDIA H200") == 989.5e12 and peak_of("NVIDIA H20") == 148e12
    assert peak_of("NVIDIA A100-SXM4-80GB") == 312e12 and peak_of("NVIDIA L4") == 121e12
    assert peak_of("NVIDIA H200 NVL") == 835.5e12 and peak_of("NVIDIA H800 PCIe") == 756.5e12
    assert (
        peak_of("AMD Instinct MI250X / MI250") == 191.5e12
        and peak_of("AMD Instinct MI300X") == 1307.4e12
    )
    assert (
        peak_of("NVIDIA GeForce GTX 1080") is None
        and peak_of("NVIDIA A100-SXM4-40GB MIG 3g.20gb") is None
    )
    assert peak_flops(NodeSettings(bf16=True), torch.device("cpu")) is None


def test_mfu_is_the_share_of_the_training_devices_peak_in_phase_train():
    shape = RunShape(TWO_RESERVED, flops=ModelFlops(6e9, 1e4), peak_flops=1e12)
    found = step_metrics([rank(), rank()], steps=1, shape=shape)
    assert found["perf/mfu"] == pytest.approx((2000 * 6e9 + 2e5 * 1e4) / (2 * 15.0 * 1e12))


class Cuda:
    """A GPU of 80 GiB: torch has reserved 30 at most, and 60 are in use, because an engine is on it too."""

    max_memory_reserved = staticmethod(lambda device: 30 * 2**30)
    mem_get_info = staticmethod(lambda device: (20 * 2**30, 80 * 2**30))
    get_device_name = staticmethod(lambda device: "NVIDIA H100 80GB HBM3")


@pytest.mark.nightly
def test_memory_and_peak_are_read_from_the_gpu_of_the_rank(monkeypatch):
    device = torch.device("cuda", 3)
    for name in ("max_memory_reserved", "mem_get_info", "get_device_name"):
        monkeypatch.setattr(torch.cuda, name, getattr(Cuda, name))
    assert gpu_memory(device) == (30.0, 0.75)
    assert all(map(math.isnan, gpu_memory(torch.device("cpu"))))
    assert peak_flops(NodeSettings(bf16=True), device) == 989.5e12
    assert peak_flops(NodeSettings(mixed_precision="fp16"), device) == 989.5e12
    assert peak_flops(NodeSettings(), device) is None  # the table has no rates of float32


# ---- one rank between two logs


class OneRank:
    """An accelerator of two nodes whose ranks all measure the same; it counts the gathers."""

    device = torch.device("cpu")

    def __init__(self):
        self.gathers = 0

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        self.gathers += 1
        assert row.shape == (1, len(NUMBERS))
        return row.repeat(4, 1)


def report(accelerator: OneRank, per_engine=((), ()), rank=1, **settings) -> StepReport:
    topology = topology_on([NodeShape(2, 2, 2)] * 2, rank=rank)
    devices = SimpleNamespace(per_engine=per_engine, shared_with_training=False)
    seconds = np.array([(3.0, 4.0, 3.0, 2.0), (1.0, 4.0, 1.0, 0.0)])
    clocks = SimpleNamespace(seconds=seconds, take_kv_use=lambda: 0.7)
    place = SimpleNamespace(transport=("host", ""), has_agents=False)
    host = SimpleNamespace(
        topology=topology, devices=devices, settings=NodeSettings(**settings), phases=Phases(), step=lambda: host.at,
        updates=SimpleNamespace(clocks=clocks, num_restarts=2), at=1, rank=place,
    )  # fmt: skip
    generation = SimpleNamespace(take_seconds_ahead=lambda: (0.0, 0.0))
    found = StepReport(
        host, accelerator, StalenessMeter(None), generation, Qwen2ForCausalLM(config(True))
    )
    found.host = host
    return found


def test_a_log_is_one_gather_and_has_all_of_it(monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.seconds)
    accelerator = OneRank()
    monkeypatch.setattr(steps, "peak_flops", lambda settings, device: 1e6)  # a CPU has none
    one = report(accelerator)
    clocks = one.host.updates.clocks
    seconds, clocks.seconds = (
        clocks.seconds,
        clocks.seconds[:0],
    )  # the first sync is part of the first step
    one.begin_step(0)
    clocks.seconds = seconds
    ones = torch.ones(2, 5)
    with one.host.phases("train"):
        now.seconds += 10.0
    one.count({"prompt_mask": ones, "completion_mask": ones})
    one.count({"prompt_mask": ones, "completion_mask": ones})
    found = one.metrics(SyncTimings(), steps_left=9)
    assert accelerator.gathers == 1
    assert found["perf/step_s"] == 10.0 and found["perf/eta_s"] == 90.0
    assert (
        found["perf/tokens_per_s"] == 4 * 40 / 10
        and found["perf/tokens_per_s_per_device"] == 16 / 8
    )
    assert found["engine/filled"] == 0.5 and found["engine/kv_use"] == pytest.approx(0.7)
    assert (
        found["memory/host_gib/max"] > 0.05
        and "memory/gpu_gib/max" not in found
        and found["perf/mfu"] > 0
    )
    now.seconds, one.host.at = now.seconds + 4.0, 3
    found = one.metrics(SyncTimings(), steps_left=7)
    # without the first interval
    assert accelerator.gathers == 2 and found["perf/step_s"] == 2.0 and found["perf/eta_s"] == 14.0
    assert "perf/tokens_per_s" not in found  # taken


def test_the_first_log_counts_nothing_of_the_set_up(monkeypatch):
    """A rehearsal and engines that wait: 1000 s and 80 tokens; then a step of 10 s and 20 tokens."""
    now = SimpleNamespace(seconds=1000.0)
    for clock in ("perf_counter", "monotonic"):
        monkeypatch.setattr(time, clock, lambda: now.seconds)
    one = report(OneRank())
    ones = torch.ones(2, 5)
    for _ in range(4):
        one.count({"prompt_mask": ones, "completion_mask": ones})
    with one.host.phases("generate"):
        now.seconds += 1000.0
    one.begin_step(0)
    with one.host.phases("generate"):
        now.seconds += 4.0
    with one.host.phases("train"):
        now.seconds += 6.0
    with one._meter.paused():  # an evaluation, whose waits are not counted
        now.seconds += 90.0
    one.count({"prompt_mask": ones, "completion_mask": ones})
    one.host.updates.clocks.seconds = one.host.updates.clocks.seconds + 5.0
    found = one.metrics(SyncTimings(), steps_left=9)
    assert found["perf/rank_busy_share"] == 0.6
    assert found["perf/tokens_per_s"] == 4 * 20 / 100
    assert found["perf/generate_s"] == 4.0 and found["engine/filled"] == 1.0


@pytest.mark.nightly
def test_time_between_two_trainings_is_no_steps(monkeypatch):
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.seconds)
    one = report(OneRank())
    one.begin_step(0)
    now.seconds = 1000.0
    one.restart()
    one.begin_step(0)
    now.seconds += 3.0
    assert one.metrics(SyncTimings(), 0)["perf/step_s"] == 3.0


# ---- the page and the cost


def logged(num_nodes: int = 2, ranks_per_node: int = 2) -> dict[str, float]:
    """All metrics that a run can log, but those that TRL's `_metrics` gets."""
    topology = topology_on([ranks_per_node] * num_nodes)
    shape = RunShape(topology, flops=ModelFlops(1.0, 1.0), peak_flops=1e12)
    ranks = [rank()] * (num_nodes * ranks_per_node)
    found = step_metrics(ranks, 1, shape) | {"perf/eta_s": 1.0}
    found |= summarize_rounds(ranks, [1.0] * len(ranks))
    found |= dict.fromkeys(("pool/number", "pool/engines", "pool/filled", "pool/waiting"), 1.0)
    return found | sync_metrics(SyncTimings(), [[0.0] * len(STAGES)] * len(ranks), topology)


@pytest.mark.nightly
def test_the_page_names_what_is_logged_and_nothing_else():
    of_trls_metrics = (
        "balance/",
        "harness/",
        "rewards/",
        "dynamic_sampling/effective",
        "dynamic_sampling/flat",
    )
    assert {name for name in documented() if not name.startswith(of_trls_metrics)} == mine(logged())


@pytest.mark.nightly
def test_at_64_nodes_metrics_line_and_table_take_less_than_a_hundredth_of_a_10_s_step():
    """A line of Python takes 0.1 us, so a million of them take 0.1 s."""
    few, many = lines_run(report_of, 4), lines_run(report_of, 64)
    assert many < 16 * few and many < 1e6


def report_of(num_nodes: int) -> None:
    ranks = [dict.fromkeys(NUMBERS, 1.0) for _ in range(num_nodes * 7)]
    topology = topology_on([7] * num_nodes)
    logs = step_metrics(ranks, 1, RunShape(topology))
    logs |= summarize_rounds(ranks, [1.0] * len(ranks))
    logs |= sync_metrics(SyncTimings(), [[0.0] * len(STAGES)] * len(ranks), topology)
    step_line(logs, 1, 2)
    rendered(node_table(logs, 1))


def lines_run(function, *arguments) -> int:
    """Number of lines of Python that a call runs, which no other process changes."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*arguments)
    finally:
        sys.settrace(before)
    return count
