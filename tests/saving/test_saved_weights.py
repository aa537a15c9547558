"""Saved safetensors against the model they should be: what `save_pretrained` writes passes, each defect does not."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from multinode_kit.models import tiny_qwen2
from trl_multinode.errors import MultiNodeError, SavedWeightsError
from trl_multinode.saving.saved_weights import check_saved

KEY = "model.layers.1.mlp.up_proj.weight"


def tiny_moe():
    """Its experts lie in one tensor in the model, and each in its own in the file."""
    config = Qwen3MoeConfig(
        vocab_size=300, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def lora(**settings):
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **settings)
    return get_peft_model(tiny_qwen2(tied=False), config)


def with_reference(model):
    """With `beta > 0` TRL keeps the adapter as it was at first beside the trained one."""
    model.add_adapter("ref", model.peft_config["default"])
    return model


@pytest.mark.parametrize(
    "build",
    [
        lambda: tiny_qwen2(tied=True),
        lambda: tiny_qwen2(tied=False),
        lambda: tiny_qwen2().to(torch.bfloat16),
        tiny_moe,
        lora,
        lambda: lora(modules_to_save=["lm_head"]),
        lambda: with_reference(lora()),
    ],
    ids=[
        "tied",
        "untied",
        "bfloat16",
        "experts",
        "adapter",
        "adapter and a module",
        "adapter and TRL's reference",
    ],
)
def test_what_save_pretrained_writes_is_the_model(build, tmp_path):
    model = build()
    model.save_pretrained(tmp_path)
    check_saved(tmp_path, model)


@pytest.fixture
def saved(tmp_path):
    """A model, and the folder it was saved into."""
    model = tiny_qwen2()
    model.save_pretrained(tmp_path)
    return model, tmp_path


def change(folder: Path, edit, name: str = "model.safetensors") -> None:
    tensors = load_file(folder / name)
    edit(tensors)
    save_file(tensors, folder / name, metadata={"format": "pt"})


def message(folder: Path, model) -> str:
    with pytest.raises(SavedWeightsError) as caught:
        check_saved(folder, model)
    assert isinstance(caught.value, MultiNodeError) and str(folder) in str(caught.value)
    return str(caught.value)


def drop_data(tensors: dict) -> None:
    tensors.update({name: torch.empty(0) for name in tensors})


DEFECTS = {  # defect of the file -> words of the error
    "missing": (lambda tensors: tensors.pop(KEY), ["1 of 26", "missing", KEY]),
    "unknown": (lambda tensors: tensors.update(stranger=torch.zeros(2)), ["1 of 26", "unknown", "stranger"]),
    "without data": (drop_data, [
        "26 of 26", "without data", "(0,)", " 23 ", "zero3_save_16bit_model: true",
        "stage3_gather_16bit_weights_on_model_save",
    ]),
    "another shape": (
        lambda tensors: tensors.update({KEY: tensors[KEY][:5].clone()}),
        ["1 of 26", KEY, "('F32', (5, 64))", "('F32', (128, 64))"],
    ),
    "another dtype": (
        lambda tensors: tensors.update({KEY: tensors[KEY].half()}),
        ["1 of 26", KEY, "('F16', (128, 64))", "('F32', (128, 64))"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_named_with_tensors_and_cure(saved, defect):
    model, folder = saved
    edit, words = DEFECTS[defect]
    change(folder, edit)
    text = message(folder, model)
    assert all(word in text for word in words), text


@pytest.mark.parametrize("size", [None, 0, 1, 7, 100, -1])
def test_a_file_that_is_missing_or_was_cut_off_cannot_be_read(saved, size):
    model, folder = saved
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    if size is not None:
        (folder / "model.safetensors").write_bytes(content[:size])
    assert "model.safetensors" in message(folder, model)


# ---- shards ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path):
    model = tiny_qwen2()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    return model, tmp_path, index


SHARD_DEFECTS = {  # edit of the shard with `KEY`, or its loss -> words of the error
    "lost": (None, ["missing"]),
    "another tensor set": (lambda tensors: tensors.pop(KEY), ["index", KEY]),
    "without data": (lambda tensors: tensors.update({KEY: torch.empty(0)}), ["1 of 26", KEY]),
}


@pytest.mark.parametrize("defect", SHARD_DEFECTS)
def test_a_defect_of_a_shard_is_named(sharded, defect):
    model, folder, index = sharded
    check_saved(folder, model)
    shard = index["weight_map"][KEY]
    edit, words = SHARD_DEFECTS[defect]
    if edit is None:
        (folder / shard).unlink()
    else:
        change(folder, edit, shard)
    text = message(folder, model)
    assert defect == "without data" or shard in text
    assert all(word in text for word in words), text


@pytest.mark.parametrize("content", ['{"weight_map": {', "{}", "[]", None])
def test_an_index_that_was_cut_off_or_is_not_alone_is_refused(sharded, content):
    """transformers would load a file of an earlier save beside the shards."""
    model, folder, _ = sharded
    index = "model.safetensors.index.json"
    if content is None:
        save_file({"old": torch.zeros(1)}, folder / "model.safetensors")
    else:
        (folder / index).write_text(content)
    assert ("model.safetensors and " * (content is None) + index) in message(folder, model)


# ---- adapters -------------------------------------------------------------------------------------------------------


def test_an_adapter_with_an_empty_a_is_found(tmp_path):
    model = lora()
    model.save_pretrained(tmp_path)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    edit = lambda tensors: tensors.update({name: torch.empty(0)})  # noqa: E731
    change(tmp_path, edit, "adapter_model.safetensors")
    text = message(tmp_path, model)
    assert all(word in text for word in ["1 of 8", name, "(0,)", "(4, 64)"])


def test_the_whole_model_in_the_place_of_an_adapter_is_refused(tmp_path):
    model = lora()
    model.get_base_model().save_pretrained(tmp_path)
    assert "adapter_model.safetensors" in message(tmp_path, model)


# ---- ZeRO-3 ---------------------------------------------------------------------------------------------------------


def shard(model) -> None:
    """What ZeRO-3 leaves on a rank: no data, and the shape in `ds_shape`."""
    for parameter in model.parameters():
        parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()
        parameter.data = torch.empty(0, dtype=parameter.dtype)


def test_a_sharded_model_still_knows_what_its_file_must_hold(saved):
    model, folder = saved
    shard(model)
    check_saved(folder, model)
    # the accident: a shard saved as it is
    change(folder, lambda tensors: tensors.update({KEY: torch.empty(0)}))
    assert "1 of 26" in message(folder, model)


def test_a_sharded_adapter_still_knows_what_its_file_must_hold(tmp_path):
    model = lora(modules_to_save=["lm_head"])
    model.save_pretrained(tmp_path)
    shard(model)
    check_saved(tmp_path, model)
