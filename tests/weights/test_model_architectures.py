"""Log-probs of engine and trainer agree after a sync, and do not before, for every architecture that we say works.

test_sent_weights.py compares the weights themselves, bit by bit. In bfloat16 the trainer's own rounding is the
control: the log-probs of a float32 copy of its model.
"""

import copy
import json

import cv2  # noqa: F401  (transformers imports it with the first picture, and it changes LD_LIBRARY_PATH)
import numpy as np
import pytest
import torch
from forks import forked
from peft import LoraConfig, get_peft_model
from PIL import Image
from swapping import LIMIT, generate_while_sending

import multinode_kit
from multinode_kit.architectures import ARCHITECTURES, model_for
from multinode_kit.engines import FORKED, SyncDriver, running_engines
from trl_multinode.engine.settings import lora_arguments
from trl_multinode.engine.stream import Request
from trl_multinode.errors import EngineError
from trl_multinode.rollouts.requests import merged, requests_of
from trl_multinode.rollouts.rows import raw_image
from trl_multinode.weights.peft_source import AdapterSource, PeftSource
from trl_multinode.weights.source import ModuleSource
from trl_multinode.weights.sync import WeightSync

# test_conformance.py has Qwen2 on vLLM, with a layer that does not get all its weights
pytestmark = [pytest.mark.engine, pytest.mark.nightly]
PROMPTS = [[5, 6, 7] * 9, [9, 8, 7, 6]]  # the first is longer than a window of 16
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
# a sampled image token would want a picture
WITHOUT_PICTURES = {"allowed_token_ids": list(range(258))}
LAST_K = "layers.1.self_attn.k_proj.weight"
# a layer lacks a part of its weights, or all of them
LACKING = ("qwen2", "qwen3_moe", "idefics3")
STEPS = 5
SLOW = [f"{multinode_kit.__name__}.logits_processor:SlowTokens"]
RANK = 4


def case(name: str):
    return pytest.param(name, marks=pytest.mark.feature("Architectures", ARCHITECTURES[name].title))


TEXT = [case(name) for name in ARCHITECTURES if name != "idefics3"]


@pytest.fixture(scope="module", params=map(case, ARCHITECTURES))
def running(request, tmp_path_factory):
    """An engine that has the weights of its trainer, and the trainer."""
    name = request.param
    found = model_for(name, engine=True)
    keywords = {"trust_remote_code": True} if name == "idefics3" else {}
    folder = tmp_path_factory.mktemp("log")
    with running_engines(
        found.model,
        folder,
        FORKED,
        processing_class=found.processing_class,
        dtype=str(found.model.dtype).removeprefix("torch."),
        max_model_len=1024,
        logits_processors=SLOW,
        **ARCHITECTURES[name].engine_args,
        **keywords,
    ) as engines:
        driver = (Illustrated if name == "idefics3" else Written)(name, found, engines)
        driver.send()
        yield driver


class Written(SyncDriver):
    """Two prompts of text."""

    incomplete = {
        LAST_K: r"self_attn\.qkv_proj \(\d+ of \d+ ",
        "model.norm.weight": "model.norm .nothing",
    }

    def __init__(self, name, found, engines, **keywords):
        super().__init__(found.model, engines, **keywords)
        self.name = name
        self.is_exact = found.model.dtype == torch.float32
        # of a step, which is about the learning rate in each weight
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)
        if ARCHITECTURES[name].has_experts:
            self.incomplete = self.incomplete | {"experts.down_proj": r"experts.* \(\d+ of \d+ "}

    def step(self) -> None:
        """Make one optimizer step on a random text: the same text twice would make each log-prob 0."""
        ids = torch.randint(2, 250, (1, 48), generator=self._noise)
        self.optimizer.zero_grad()
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()

    def differences(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return |engine - trainer| of each token of some rows, and |float32 copy - trainer| of the same tokens."""
        requests = [Request(prompt, 3, 11 + 100 * i) for i, prompt in enumerate(PROMPTS)]
        groups = self.engines.generate(requests, 12, SAMPLING, self.version.update)
        trainer = self.model
        exact = copy.deepcopy(trainer).float()
        found, control = [], []
        for prompt, rows in zip(PROMPTS, groups, strict=True):
            for row in rows:
                expected = self.logprobs(prompt, row.tokens.tolist())
                self.model = exact
                control.append((self.logprobs(prompt, row.tokens.tolist()) - expected).abs())
                self.model = trainer
                found.append((torch.from_numpy(row.logprobs.copy()) - expected).abs())
        return torch.cat(found), torch.cat(control)

    def logprobs(self, prompt, completion, temperature: float = 1.0) -> torch.Tensor:
        return super().logprobs(prompt, completion, temperature).float()

    def check_fresh(self) -> float:
        """Check that log-probs of engine and trainer agree; return the largest difference, of 95 % in bfloat16."""
        found, control = self.differences()
        if self.is_exact:
            assert found.max() < 1e-4
            return found.max().item()
        assert found.median() < 3 * control.median() + 1e-3
        assert found.quantile(0.95) < 3 * control.quantile(0.95) + 1e-3
        return found.quantile(0.95).item()

    def check_stale(self) -> float:
        """Check that log-probs of the engine are those of other weights; return the mean difference."""
        found, control = self.differences()
        assert found.mean() > max(1e-3, 5 * control.mean())
        return found.mean().item()


class Illustrated(Written):
    """Four prompts, with a picture, without, with another one, with both, as a rank's rows: two of each."""

    incomplete = {
        "vision_model.encoder.layers.1.self_attn.k_proj.weight": r"vision_model.*qkv_proj \(\d+ of \d+ ",
        "connector.modality_projection.proj.weight": r"connector.* \(nothing came",
    }

    def __init__(self, name, found, engines):
        super().__init__(name, found, engines)
        self.processor = found.processing_class
        random = np.random.default_rng(0)
        first, second = (
            Image.fromarray(random.integers(0, 256, (h, 50, 3), dtype=np.uint8)) for h in (40, 90)
        )
        self.pictures = [[first], None, [second], [first, second]]
        texts = ["what is <image> ?", "no picture", "what is <image> ?", "<image> or <image>"]
        # With all the tokens of a picture, as TRL sends them
        self.inputs = [
            self.processor(
                text=[text], images=[pictures] if pictures else None, return_tensors="pt"
            )
            for text, pictures in zip(texts, self.pictures, strict=True)
        ]

    @torch.no_grad()
    def logprobs_with(self, inputs, completion) -> torch.Tensor:
        prompt = inputs["input_ids"]
        ids = torch.cat([prompt, torch.tensor([completion])], dim=1)
        images = {name: value for name, value in inputs.items() if name.startswith("pixel")}
        logits = self.model(input_ids=ids, **images).logits[0, prompt.shape[1] - 1 : -1]
        return logits.log_softmax(-1).gather(1, ids[0, prompt.shape[1] :, None])[:, 0]

    def rows(self):
        prompts = [inputs["input_ids"][0].tolist() for inputs in self.inputs for _ in range(2)]
        pictures = [p for p in self.pictures for _ in range(2)]
        seeds = [*range(11, 11 + len(prompts))]
        requests = merged(requests_of(prompts, pictures, seeds))
        assert [len(request.images) for request in requests] == [1, 0, 1, 2]
        return self.engines.generate(requests, 12, SAMPLING | WITHOUT_PICTURES, self.version.update)

    def scored_differences(self) -> list[float]:
        """Compare each row with the engine's score of it, which the check of stale rows requests with its pictures."""
        (engine,), found = self.engines, []
        for inputs, pictures, (row, _) in zip(self.inputs, self.pictures, self.rows(), strict=True):
            tokens = [*inputs["input_ids"][0].tolist(), *row.tokens.tolist()]
            request_id = engine.post_score(tokens, 1.0, tuple(map(raw_image, pictures or ())))
            scored = engine.scored(request_id).logprobs[-len(row.tokens) :]
            found.append(float(np.abs(scored - row.logprobs).max()))
        return found

    def differences(self, to_other_prompts: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        first, text, second, both = self.inputs
        assert first["input_ids"].equal(second["input_ids"])  # they differ in their pictures alone
        inputs = [second, text, first, both] if to_other_prompts else self.inputs
        found = [
            (
                self.logprobs_with(given, row.tokens.tolist())
                - torch.from_numpy(row.logprobs.copy())
            ).abs()
            for given, rows in zip(inputs, self.rows(), strict=True)
            for row in rows
        ]
        return torch.cat(found), torch.zeros(1)


def test_log_probs_agree_after_each_step_and_sync_and_disagree_before(running, record_property):
    stale, fresh = [], [running.check_fresh()]
    for _ in range(STEPS):
        running.step()
        stale.append(running.check_stale())
        running.send()
        fresh.append(running.check_fresh())
    figures = {"name": running.name, "after": max(fresh), "before": min(stale)}
    record_property("model", json.dumps(figures))


# test_vision_models has updates in flight with images
@pytest.mark.parametrize("running", TEXT, indirect=True)
def test_rows_under_way_continue_with_new_weights(running):
    found = generate_while_sending(running, recompute_kv=False, updates=1)
    assert found.mixed_share > 0.3
    limit = LIMIT if running.is_exact else 3 * running.differences()[1].mean().item() + 0.01
    assert found.difference(recomputed=False) < limit
    running.check_fresh()


@pytest.mark.parametrize("running", ["idefics3"], indirect=True)
def test_log_probs_disagree_with_those_of_other_pictures(running):
    assert running.differences(to_other_prompts=True)[0].max() > 0.01


# test_conformance has rows of text
@pytest.mark.parametrize("running", ["idefics3"], indirect=True)
def test_a_row_with_pictures_has_the_score_that_it_was_sampled_with(running):
    running.send()
    assert max(running.scored_differences()) < 1e-3


class Without(ModuleSource):
    """Leaves one tensor out, as a name that vLLM does not know would."""

    def __init__(self, model, name_end: str):
        super().__init__(model, torch.float32)
        before = len(self._metadata)
        self._metadata = [meta for meta in self._metadata if not meta.name.endswith(name_end)]
        assert len(self._metadata) < before


@pytest.mark.parametrize("running", LACKING, indirect=True)
def test_a_layer_that_does_not_get_all_its_weights_is_named(running):
    for name_end, message in running.incomplete.items():
        running.sync = WeightSync(Without(running.model, name_end), running.engines, 40_000)
        with pytest.raises(EngineError, match=message):
            running.send()
    running.sync = WeightSync(ModuleSource(running.model, torch.float32), running.engines, 40_000)
    running.send()
    running.check_fresh()


# ---- adapters


@pytest.mark.parametrize("name", map(case, ARCHITECTURES))
def test_log_probs_agree_with_an_adapter(name, tmp_path, record_property):
    """Served beside the weights where vLLM can, merged into them where it cannot, as beside experts."""
    known, found = ARCHITECTURES[name], model_for(name, engine=True)
    config = LoraConfig(r=RANK, lora_alpha=8, target_modules=rf".*{known.adapted}")
    base = get_peft_model(found.model, config).get_base_model()
    with running_engines(
        base,
        tmp_path,
        FORKED,
        processing_class=found.processing_class,
        dtype=known.dtype_name,
        trust_remote_code=name == "idefics3",
        **known.engine_args,
        **({} if known.has_experts else lora_arguments(RANK)),
    ) as engines:
        serves = engines[0].ready.serves_lora
        record_property("model", json.dumps({"name": name, "adapter": serves}))
        source = (AdapterSource if serves else PeftSource)(base, base.dtype)
        driver = Written(name, found, engines, source=source)
        trained = [parameter for parameter in base.parameters() if parameter.requires_grad]
        driver.optimizer = torch.optim.Adam(trained, lr=0.1)
        driver.send()
        for _ in range(2):
            driver.step()
            driver.check_stale()
            driver.send()
            driver.check_fresh()


# ---- tensors that vLLM derives from a weight


class Packs:
    """Method of a layer that replaces its weight by a packed copy."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.weight = torch.nn.Parameter(layer.weight.data.flip(0).contiguous())


def test_a_view_that_a_reload_does_not_renew_is_named(tmp_path):
    def body(_: int) -> list:  # vLLM changes the environment of the process that imports it
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        from trl_multinode.vllm_worker import reloading

        layer, mixer = torch.nn.Linear(4, 3, bias=False), torch.nn.Module()
        mixer.conv, mixer.other = layer, torch.nn.Linear(5, 5)
        mixer.register_buffer("alias", layer.weight.view(-1), persistent=False)
        mixer.register_buffer("constant", torch.arange(12.0), persistent=False)
        record_metadata_for_reloading(mixer)
        found = [reloading.derived_buffers(mixer)]
        packs = Packs()
        packs.process_weights_after_loading(layer)
        reloading.renew_derived(mixer)
        found.append(reloading.stale_derived(mixer))  # the layer has no method that could copy it
        layer.quant_method = packs
        reloading.renew_derived(mixer)
        layer.weight = torch.nn.Parameter(torch.arange(12.0).view(3, 4))
        packs.process_weights_after_loading(layer)
        return [
            *found,
            reloading.stale_derived(mixer),
            mixer.alias.tolist(),
            layer.weight[0].tolist(),
        ]

    with forked(body, 1, tmp_path) as (rank,):
        assert rank.result == [[], ["alias"], [], list(range(12)), [8, 9, 10, 11]], rank.text
