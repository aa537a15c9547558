"""What cannot be trained in node mode is refused by config alone, with the way out."""

from types import SimpleNamespace

import pytest
from peft import LoraConfig, get_peft_model
from transformers import BitsAndBytesConfig

from trl_multinode import call_checks
from trl_multinode.call_checks import check_model
from trl_multinode.errors import ConfigurationError
from trl_multinode.testing.models import save_tiny, tiny_qwen2

FOUR_BIT = BitsAndBytesConfig(load_in_4bit=True)


def args(stage: int | None = None, **fields) -> SimpleNamespace:
    plugin = None if stage is None else SimpleNamespace(zero_stage=stage)
    return SimpleNamespace(deepspeed_plugin=plugin, **fields)


def quantized_in_its_config():
    model = tiny_qwen2()
    model.config.quantization_config = FOUR_BIT
    return model


@pytest.mark.feature("Training", "quantized base models (QLoRA)", engine="none", refused=True)
@pytest.mark.parametrize(
    ("model", "fields", "call"),
    [
        (tiny_qwen2, {}, {"quantization_config": FOUR_BIT}),
        (tiny_qwen2, {"model_init_kwargs": {"quantization_config": FOUR_BIT}}, {}),
        (quantized_in_its_config, {}, {}),
    ],
    ids=["argument", "model_init_kwargs", "checkpoint"],
)
def test_quantized_weights_are_refused_wherever_they_are_asked_for(model, fields, call, record_property):
    with pytest.raises(ConfigurationError, match="Leave `quantization_config` out") as refused:
        check_model(model(), args(**fields), call)
    record_property("message", str(refused.value))


@pytest.mark.feature("Training", "DoRA under ZeRO-3", engine="none", refused=True)
@pytest.mark.parametrize("wrapped", [False, True])
def test_dora_is_refused_under_zero_3_and_no_other_stage(wrapped, record_property):
    config = LoraConfig(use_dora=True, target_modules=["q_proj"])
    model, call = (get_peft_model(tiny_qwen2(), config), {}) if wrapped else (tiny_qwen2(), {"peft_config": config})
    with pytest.raises(ConfigurationError, match="ZeRO-2") as refused:
        check_model(model, args(3), call)
    record_property("message", str(refused.value))
    check_model(model, args(2), call)
    check_model(model, args(), call)


def test_a_models_code_and_revision_are_those_that_trl_would_load(monkeypatch):
    asked = {}
    monkeypatch.setattr(call_checks.AutoConfig, "from_pretrained", lambda name, **how: asked.update(how, name=name))
    init = {"revision": "v2", "token": "hf_x", "dtype": "float32"}
    call_checks.config_of("me/model", args(model_init_kwargs=init, trust_remote_code=True))
    assert asked == {"name": "me/model", "revision": "v2", "token": "hf_x", "trust_remote_code": True}


def test_fsdp_1_is_refused_before_an_engine_starts():
    fsdp = {"ACCELERATE_USE_FSDP": "true"}
    for environ in (fsdp, fsdp | {"FSDP_VERSION": "1"}):
        with pytest.raises(ConfigurationError, match="fsdp_version: 2"):
            call_checks.check_fsdp_version(environ)
    call_checks.check_fsdp_version(fsdp | {"FSDP_VERSION": "2"})
    call_checks.check_fsdp_version({})


def test_everything_else_passes_by_name_too(tmp_path):
    name = str(save_tiny(tmp_path / "model"))
    check_model(name, args(3, model_init_kwargs={"dtype": "float32"}), {"peft_config": LoraConfig(use_rslora=True)})
