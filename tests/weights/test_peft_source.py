"""LoRA adapters are merged bucket by bucket, and the engine then agrees with the model that has them."""

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from received import received
from refusals import refused

from multinode_kit.engines import FAKE, FORKED, SyncDriver, running_engines
from multinode_kit.models import renamed_llava, tiny_qwen2
from trl_multinode.errors import ConfigurationError, WeightSyncError
from trl_multinode.weights.building import plan_sync
from trl_multinode.weights.peft_source import AdapterSource, PeftSource
from trl_multinode.weights.source import ModuleSource


def adapted(tied=False, targets=("q_proj", "down_proj"), **settings):
    """A model whose adapters do something: PEFT starts them at zero."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), **settings)
    generator = torch.Generator().manual_seed(0)
    model = get_peft_model(tiny_qwen2(tied=tied), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=3.0, generator=generator)
            if "lora_magnitude" in name:
                parameter.mul_(1 + torch.rand(parameter.shape, generator=generator))
    return model


def all_sent(source):
    return received(source, 40_000)


def train(model, steps=2):
    """Change everything that is trained, as optimizer steps do."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(steps):
        ids = torch.randint(2, 300, (2, 32), generator=torch.Generator().manual_seed(step))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"use_rslora": True}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
    ],
)  # fmt: skip
def test_what_is_sent_is_what_peft_would_merge(settings):
    model = adapted(**settings)
    source = PeftSource(model.get_base_model(), torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    sent = all_sent(source)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    expected = dict(model.merge_and_unload().named_parameters())
    assert sent.keys() == expected.keys()
    assert all(torch.allclose(sent[name], expected[name], atol=1e-6) for name in sent)


@pytest.mark.feature("Training", "adapters besides LoRA, rsLoRA, DoRA", engine="none", refused=True)
def test_other_adapters_are_refused_with_the_way_out(record_property):
    with refused("peft_config", "colocate", got=["ALoraLinearVariant"]) as caught:
        PeftSource(adapted(alora_invocation_tokens=[5, 6]).get_base_model(), torch.float32)
    record_property("message", str(caught.value))
    model = get_peft_model(
        tiny_qwen2(), IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    )
    with refused("peft_config", "colocate", got=["peft.tuners.ia3.layer.Linear"]):
        PeftSource(model.get_base_model(), torch.float32)
    with refused(
        "peft_config", "colocate", got=["peft.tuners.trainable_tokens.layer.TrainableTokensLayer"]
    ):
        PeftSource(adapted(trainable_token_indices=[1, 2]).get_base_model(), torch.float32)
    bare = torch.nn.Module()  # as experts of transformers: a parameter that is no layer's
    bare.gate_up = torch.nn.Parameter(torch.randn(3, 8, 6))
    experts = get_peft_model(
        torch.nn.Sequential(bare),
        LoraConfig(r=2, target_modules=[], target_parameters=["0.gate_up"]),
    )
    with refused("peft_config", "`target_modules`", got="0.weight"):
        PeftSource(experts.get_base_model(), torch.float32)


def test_two_adapters_at_once_are_merged_but_not_if_one_is_dora():
    two = adapted()
    two.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    two.base_model.set_adapter(["default", "second"])
    PeftSource(two.get_base_model(), torch.float32)
    with_dora = adapted(use_dora=True)
    with_dora.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    with_dora.base_model.set_adapter(["default", "second"])
    with refused("peft_config", got=["DoraLinearVariant"]):
        PeftSource(with_dora.get_base_model(), torch.float32)


# ---- embedding and head

EMBEDDING_AND_HEAD = (["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"])


def as_target(names, **settings):
    return adapted(targets=("q_proj", *names), **settings)


def as_copy(names, **settings):
    return adapted(modules_to_save=list(names), **settings)  # a copy of the list: PEFT changes it


@torch.no_grad()
def engine_of(model, tied):
    """A model that has what is sent and ties, or not, as vLLM does."""
    engine = tiny_qwen2(tied=tied, seed=3)
    left = engine.load_state_dict(
        all_sent(PeftSource(model.get_base_model(), torch.float32)), strict=False
    )
    assert left.missing_keys == (["lm_head.weight"] if tied else []) and not left.unexpected_keys
    return engine


def log_probs(model):
    with torch.no_grad():
        return model(torch.tensor([[5, 6, 7, 290, 299]])).logits.log_softmax(-1)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize("names", EMBEDDING_AND_HEAD, ids=" and ".join)
@pytest.mark.parametrize(
    ("make", "ensured"),
    [(as_target, False), (as_target, True), (as_copy, False)],
    ids=["target", "tied target", "copy"],
)
def test_a_tied_embedding_and_head_that_are_trained_apart_are_refused_with_the_way_out(
    make, ensured, names
):
    base = make(names, tied=True, ensure_weight_tying=ensured).get_base_model()
    way_out = r"lm_head .*model\.embed_tokens.*modules_to_save=\['embed_tokens'\]`.*`ensure_weight_tying=True`"
    for lora_sync in ("auto", "adapter", "merged"):  # before an engine starts
        with pytest.raises(ConfigurationError, match=way_out):
            plan_sync(base, True, lora_sync, torch.float32, on_gpu=False)
    with pytest.raises(ConfigurationError, match=way_out):
        PeftSource(base, torch.float32)


@pytest.mark.parametrize("names", EMBEDDING_AND_HEAD, ids=" and ".join)
@pytest.mark.parametrize(
    ("make", "tied"),
    [(as_target, False), (as_copy, False), (as_copy, True)],
    ids=["target", "copy", "tied copy"],
)
def test_an_engine_with_what_is_sent_of_embedding_and_head_agrees_with_the_trainer_after_steps(
    make, tied, names
):
    model = make(names, tied=tied, ensure_weight_tying=tied)
    first = log_probs(model)
    train(model)
    model.add_adapter("ref", model.peft_config["default"])  # as TRL does with beta > 0
    assert not torch.allclose(log_probs(model), first, atol=0.1)
    assert torch.allclose(log_probs(engine_of(model, tied)), log_probs(model), atol=1e-4)


def test_tied_weights_that_a_wrapper_separates_are_an_error_of_the_next_sync():
    model = tiny_qwen2(tied=True)
    source = ModuleSource(model, torch.float32)
    source.check(source.metadata(), 1, frozen=True)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(WeightSyncError, match=r"model\.embed_tokens\.weight and lm_head\.weight"):
        source.check(source.metadata(), 2, frozen=False)


# ---- other layers


@pytest.mark.nightly  # what is sent is compared above; a launch merges too
@pytest.mark.parametrize(
    ("module", "settings"),
    [
        pytest.param(FAKE, {}, id="fake"),
        pytest.param(
            FORKED,
            {"tied": True, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
            marks=pytest.mark.engine,
            id="vllm-tied-copy",
        ),
    ],
)
def test_the_engine_agrees_with_the_adapted_model_and_not_with_the_base(module, settings, tmp_path):
    model = adapted(**settings)
    train(model)
    with running_engines(model.get_base_model(), tmp_path, module) as engines:
        trainer = SyncDriver(
            model, engines, source=PeftSource(model.get_base_model(), torch.float32)
        )
        trainer.send()
        scored = torch.from_numpy(engines[0].score([5, 6, 7, 290, 299]).logprobs.copy())
        assert torch.allclose(scored, trainer.logprobs([5], [6, 7, 290, 299]), atol=1e-3)
        with model.disable_adapter():
            assert not torch.allclose(scored, trainer.logprobs([5], [6, 7, 290, 299]), atol=0.1)


@pytest.mark.nightly  # test_weight_source.py has the names without one
def test_layers_with_an_adapter_have_the_checkpoints_names_too(tmp_path):
    base, names = renamed_llava(tmp_path)
    targets = r".*language_model\.layers\.\d+\.self_attn\.q_proj"
    model = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    )
    merged = PeftSource(model.get_base_model(), torch.float32)
    assert {meta.name for meta in merged.metadata()} == names
    adapter = {
        meta.name for meta in AdapterSource(model.get_base_model(), torch.float32).metadata()
    } - names
    layers = [f"language_model.model.layers.{index}.self_attn.q_proj" for index in range(2)]
    assert adapter == {
        layer + end for layer in layers for end in (".lora_A.weight", ".lora_B.weight")
    }
    name = f"{layers[0]}.weight"
    bucket = tuple(meta for meta in merged.metadata() if meta.name == name)
    with merged.gathering(bucket) as finish:
        got = finish()[0].copy()
    layer = model.get_base_model().model.language_model.layers[0].self_attn.q_proj
    expected = layer.base_layer.weight + layer.get_delta_weight("default")
    assert torch.allclose(got, expected) and not torch.allclose(got, layer.base_layer.weight)
