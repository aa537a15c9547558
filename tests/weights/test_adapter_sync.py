"""LoRA: after the first weight sync only the adapter travels, and the engine serves it beside weights that stay."""

import re
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from received import received
from refusals import refused
from swapping import differences_with_a_cached_prefix, generate_while_sending
from transformers import AutoModelForCausalLM, GPT2Config

import multinode_kit
from multinode_kit.architectures import ARCHITECTURES, built_here
from multinode_kit.engines import (
    FAKE,
    FORKED,
    SyncDriver,
    crcs_of_weights,
    running_engines,
    worst_difference,
)
from multinode_kit.faults import Faults
from multinode_kit.models import tiny_qwen2
from trl_multinode.config import MultiNodeGRPOConfig
from trl_multinode.engine.settings import lora_arguments
from trl_multinode.engine.stream import Request
from trl_multinode.errors import EngineError, WeightSyncError, WeightVersionError
from trl_multinode.weights.buckets import plan_buckets, slot_layout
from trl_multinode.weights.building import SyncPlan, checked_with_engines, plan_sync
from trl_multinode.weights.peft_source import (
    AdapterSource,
    PeftSource,
    adapter_obstacles,
    lora_rank,
)
from trl_multinode.wire.messages import WeightVersion

PROMPTS = [[5, 6, 7], [290, 8, 7, 299]]
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
TARGETS = ["q_proj", "v_proj", "gate_proj", "down_proj"]
LOST, LIED = 50, 51
LORA_LIMIT = 5e-5  # mean difference of log-probs; vLLM adds the adapter's product to the base's, PEFT in another order


def adapted(tied: bool = False, targets=TARGETS, **settings) -> PeftModel:
    """A small model whose adapter does something: PEFT starts B at zero."""
    defaults = {"r": 4, "lora_alpha": 8, "target_modules": targets}
    model = get_peft_model(tiny_qwen2(tied=tied), LoraConfig(**(defaults | settings)))
    move_adapter(model, 0.5)
    return model


@torch.no_grad()
def move_adapter(model: PeftModel, scale: float = 0.2) -> None:
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.add_(torch.randn_like(parameter) * scale)


# ---- what is sent


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "r": 12},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
        {"init_lora_weights": "pissa"},  # these two change the base as well
        {"init_lora_weights": "olora"},
    ],
)
def test_a_b_and_base_as_they_are_sent_make_the_merged_weights(settings):
    model = adapted(**settings)
    source = AdapterSource(model.get_base_model(), torch.float32)
    sent = received(source, 40_000)
    expected = dict(model.merge_and_unload().named_parameters())
    for name, weight in expected.items():
        a, b = (sent.get(name.replace("weight", f"lora_{part}.weight")) for part in "AB")
        assert torch.allclose(sent[name] if a is None else sent[name] + b @ a, weight, atol=1e-6)
    assert len(sent) == len(expected) + 2 * 2 * len(TARGETS)  # A and B in two layers


def test_an_adapter_or_a_base_that_was_merged_or_changed_after_the_start_is_told():
    model = adapted()
    source = AdapterSource(model.get_base_model(), torch.float32)
    (bucket,) = plan_buckets(source.metadata()[-2:], 1 << 30)
    model.merge_adapter()
    with pytest.raises(WeightSyncError, match="'default'"):
        source.check(bucket, step=0, frozen=False)
    model.unmerge_adapter()
    with model.disable_adapter(), source.gathering(bucket) as finish:
        a, b = finish()
        assert a.data.abs().max() > 0 and b.data.abs().max() == 0
    for change in (
        lambda model: model.model.model.norm.weight.requires_grad_(True),
        lambda model: model.unload(),
    ):
        model = adapted()
        source = AdapterSource(model.get_base_model(), torch.float32)
        change(model)
        with pytest.raises(WeightSyncError, match="lora_sync='merged'"):
            source.check(bucket, step=0, frozen=False)


# ---- what vLLM cannot serve


def two_active() -> PeftModel:
    model = adapted()
    model.add_adapter("second", model.peft_config["default"])
    model.base_model.set_adapter(["default", "second"])
    return model


def a_reference_beside_it() -> PeftModel:
    """As TRL makes it of a PeftModel with beta > 0: there, and not active."""
    model = adapted()
    model.add_adapter("ref", model.peft_config["default"])
    return model


def an_unfrozen_norm() -> PeftModel:
    model = adapted()
    model.get_base_model().model.norm.weight.requires_grad_(True)
    return model


def with_experts() -> PeftModel:
    return get_peft_model(
        built_here(ARCHITECTURES["qwen3_moe"]), LoraConfig(r=4, target_modules=["q_proj"])
    )


def adapter_obstacle(*args, **kwargs) -> str | None:
    return next(adapter_obstacles(*args, **kwargs), None)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: adapted(), None),
        (lambda: adapted(use_rslora=True, r=12, rank_pattern={"q_proj": 3}), None),
        (a_reference_beside_it, None),
        (two_active, "2 active adapters"),
        (lambda: adapted(modules_to_save=["lm_head"]), r"lm_head\.weight"),
        (lambda: adapted(bias="all"), r"bias"),
        (an_unfrozen_norm, r"model\.norm\.weight"),
        (lambda: adapted(targets=["q_proj", "lm_head"]), "lm_head"),
        (lambda: adapted(targets=["q_proj", "embed_tokens"]), "embed_tokens"),
        (lambda: adapted(targets=["q_proj"], use_dora=True), "q_proj is DoRA's"),
        (lambda: adapted(targets=["q_proj"], r=520), "520.*512"),
        (with_experts, "it has experts"),
    ],
)
def test_which_adapters_vllm_serves_and_why_not(make, reason):
    found = adapter_obstacle(make().get_base_model(), torch.float32, on_gpu=False)
    assert found is None if reason is None else re.search(reason, found or "")


def test_float32_is_not_served_on_a_gpu_and_a_bias_that_no_sync_would_send_is_refused():
    model = adapted().get_base_model()
    assert "float32" in (adapter_obstacle(model, torch.float32, on_gpu=True) or "")
    assert adapter_obstacle(model, torch.bfloat16, on_gpu=True) is None
    with refused("peft_config", got=["lora_bias"]):
        adapter_obstacle(
            adapted(targets=["q_proj"], lora_bias=True).get_base_model(),
            torch.float32,
            on_gpu=False,
        )


def test_ranks_are_rounded_up_to_what_vllm_takes():
    assert lora_rank(adapted(r=12, rank_pattern={"q_proj": 17}).get_base_model()) == 17
    assert [lora_arguments(rank)["max_lora_rank"] for rank in (1, 4, 8, 12, 17, 512)] == [
        1,
        8,
        8,
        16,
        32,
        512,
    ]
    assert lora_arguments(0) == {}


def decide(wish: str, model: PeftModel) -> SyncPlan:
    """What a rank decides before its engines start."""
    return plan_sync(model.get_base_model(), True, wish, torch.float32, on_gpu=False)


def test_auto_falls_back_with_a_reason_and_adapter_refuses(tmp_path):
    good, bad = adapted(r=8), adapted(bias="all")
    assert decide("auto", good) == decide("adapter", good) == SyncPlan(AdapterSource, lora_rank=8)
    assert decide("merged", good) == SyncPlan(PeftSource)
    plan = decide("auto", bad)
    assert plan.source is PeftSource and not plan.lora_rank
    assert "merged" in plan.reason and "bias" in plan.reason
    with refused("lora_sync", "'merged'", got="adapter"):
        decide("adapter", bad)
    with refused("lora_sync", got="always"):
        MultiNodeGRPOConfig(
            str(tmp_path), use_cpu=True, bf16=False, num_generations=2, lora_sync="always"
        )


@pytest.mark.parametrize("other_node_serves", [True, False])
def test_engines_without_lora_on_any_node_merge_on_all(other_node_serves):
    base = adapted().get_base_model()
    engines = [SimpleNamespace(ready=SimpleNamespace(serves_lora=True))]
    gather = SimpleNamespace(extremes=lambda mine: (int(mine and other_node_serves), int(mine)))
    plan = checked_with_engines(decide("auto", adapted()), base, engines, "auto", gather)
    assert bool(plan.lora_rank) == other_node_serves
    assert other_node_serves or "Qwen2ForCausalLM" in plan.reason


# ---- a running engine: the fake one and vLLM


@dataclass
class Run:
    model: PeftModel
    trainer: SyncDriver

    def difference(self) -> float:
        requests = [Request(prompt, 2, seed=i) for i, prompt in enumerate(PROMPTS)]
        groups = self.trainer.engines.generate(requests, 12, SAMPLING, self.trainer.version.update)
        return worst_difference(self.trainer, groups, PROMPTS)

    def from_base(self) -> float:
        """As `difference`, to the model without its adapter."""
        with self.model.disable_adapter():
            return self.difference()

    def digest(self) -> list[int]:
        return crcs_of_weights(self.trainer.engines[0])

    def send_until(self, update: int) -> None:
        while self.trainer.version.update < update:
            move_adapter(self.model)
            self.trainer.send()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((FAKE, True, {}), id="fake-lora"),
        pytest.param(
            (FORKED, False, {"r": 12, "use_rslora": True}),
            id="vllm-rslora",
            marks=pytest.mark.engine,
        ),
        pytest.param(
            (FORKED, True, {}, 2),
            id="vllm-lora-tp2",
            marks=[pytest.mark.engine, pytest.mark.nightly],
        ),
    ],
)
def run(request, tmp_path_factory):
    module, tied, settings, workers = (*request.param, 1)[:4]
    torch.manual_seed(0)
    model = adapted(tied, **settings)
    base = model.get_base_model()
    module = Faults().lose_load(LOST).lie_about_load(LIED).engine(module)
    logs = tmp_path_factory.mktemp("log")
    lora = lora_arguments(lora_rank(base))
    if request.param[0] != FAKE:
        lora["logits_processors"] = [f"{multinode_kit.__name__}.logits_processor:SlowTokens"]
    with running_engines(
        base, logs, module, tensor_parallel_size=workers, max_model_len=1024, **lora
    ) as engines:
        yield Run(model, SyncDriver(base, engines, source=AdapterSource(base, torch.float32)))


def test_an_adapter_needs_the_weights_first(run):
    run.trainer.sync._first = sum(bucket[0].frozen for bucket in run.trainer.sync.buckets)
    with pytest.raises(WeightSyncError, match="before a full update"):
        run.trainer.sync.run(WeightVersion(1))
    run.trainer.sync._first = 0


@pytest.mark.parametrize("syncs", [1, 2, 20])
def test_log_probs_agree_after_sync_and_disagree_before(run, syncs):
    run.send_until(syncs - 1)
    if run.trainer.version.update:
        move_adapter(run.model)
        assert run.difference() > 0.1, (
            "the adapter did not move enough for this test to mean anything"
        )
    run.send_until(syncs)
    assert run.difference() < 1e-3
    assert run.from_base() > 0.1


def test_after_the_first_sync_only_the_adapter_travels_and_the_weights_stay_bit_by_bit(run):
    run.send_until(1)
    before = run.digest()
    first = run.trainer.sync._first
    assert first == sum(bucket[0].frozen for bucket in run.trainer.sync.buckets) > 0
    last = [slot_layout(bucket)[-1] for bucket in run.trainer.sync.buckets[first:]]
    sent = sum(spec.offset + spec.num_bytes for spec in last)
    adapter = sum(p.numel() * 4 for name, p in run.model.named_parameters() if "lora_" in name)
    assert sent / adapter <= 1.05
    run.send_until(21)
    assert run.digest() == before and all(before)


@pytest.mark.nightly  # controls of the tests above
def test_a_disabled_adapter_is_the_base(run):
    run.send_until(21)
    with run.model.disable_adapter():
        run.trainer.send()
        assert run.difference() < 1e-3
    assert run.difference() > 0.1


@pytest.mark.parametrize("recompute_kv", [False, True])
def test_running_rows_continue_with_the_new_adapter(run, recompute_kv):
    run.send_until(21)
    run.trainer.send()
    found = generate_while_sending(
        run.trainer, recompute_kv, change=lambda: move_adapter(run.model)
    )
    assert found.mixed_share > 0.3
    assert found.difference(recomputed=recompute_kv) < LORA_LIMIT
    assert found.difference(recomputed=not recompute_kv) > 1e-3
    assert run.difference() < 1e-3


@torch.no_grad()
def move_all(model: PeftModel) -> None:
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)


@pytest.mark.nightly  # as of whole weights in test_conformance.py
def test_running_rows_continue_with_new_weights_below_the_adapter(run, monkeypatch):
    """All weights travel, to every worker."""
    send = run.trainer.send

    def send_all():
        run.trainer.sync.send_everything()
        return send()

    kept = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.trainer.send()
    monkeypatch.setattr(run.trainer, "send", send_all)
    found = generate_while_sending(
        run.trainer, recompute_kv=True, change=lambda: move_all(run.model)
    )
    assert found.mixed_share > 0.3
    assert found.difference(recomputed=True) < LORA_LIMIT
    assert found.difference(recomputed=False) > 1e-3
    run.model.load_state_dict(kept)
    run.trainer.send()


@pytest.mark.nightly  # as of whole weights in test_conformance.py
def test_a_request_after_a_swap_in_flight_reads_no_cache_of_an_older_adapter(run):
    run.trainer.send()
    assert (
        max(differences_with_a_cached_prefix(run.trainer, lambda: move_adapter(run.model))) < 1e-3
    )


def test_a_lost_load_is_a_wrong_version_and_a_lie_shows_in_log_probs(run):
    run.send_until(LOST - 1)
    move_adapter(run.model)
    with pytest.raises(WeightVersionError, match=rf"update {LOST - 1} .* update {LOST}"):
        run.trainer.send()
    assert run.difference() > 0.1
    run.send_until(LIED)
    assert run.difference() > 0.1
    run.send_until(LIED + 1)
    assert run.difference() < 1e-3


@pytest.mark.nightly  # controls of the tests above
def test_a_digest_sees_one_bit_of_one_weight_and_a_whole_update_leaves_it_alone(run):
    run.send_until(2)
    before = run.digest()
    run.trainer.sync.send_everything()
    run.trainer.send()
    assert run.digest() == before and run.difference() < 1e-3
    down = run.model.get_base_model().model.layers[1].mlp.down_proj.base_layer.weight
    with torch.no_grad():
        down[0, 0] = torch.nextafter(down[0, 0], torch.tensor(9.0))
    run.trainer.sync.send_everything()
    run.trainer.send()
    assert run.digest() != before


def test_half_an_adapter_makes_the_engine_refuse(run):
    with pytest.raises(EngineError, match=f"before bucket {run.trainer.sync._first}"):
        run.trainer.send_part(0)
    with pytest.raises(WeightSyncError, match="mixed weights"):
        run.difference()
    # nor does another adapter make it whole
    with pytest.raises(WeightSyncError, match="before a full update"):
        run.trainer.send()


@pytest.mark.nightly  # one more engine of vLLM
@pytest.mark.engine
def test_an_architecture_without_lora_in_vllm_is_said_and_served_merged(tmp_path):
    config = GPT2Config(
        vocab_size=300,
        n_positions=256,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = get_peft_model(
        AutoModelForCausalLM.from_config(config), LoraConfig(r=4, target_modules=["c_proj"])
    )
    move_adapter(model, 0.5)
    base = model.get_base_model().eval()
    with running_engines(base, tmp_path, FORKED, **lora_arguments(4)) as engines:
        assert not engines[0].ready.serves_lora
        trainer = SyncDriver(base, engines, source=PeftSource(base, torch.float32))
        trainer.send()
        scored = torch.from_numpy(engines[0].score([5, 6, 7, 290, 299]).logprobs.copy())
        assert torch.allclose(scored, trainer.logprobs([5], [6, 7, 290, 299]), atol=1e-3)
