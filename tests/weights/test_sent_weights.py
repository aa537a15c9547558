"""After two syncs vLLM's model has bit by bit the tensors that it loads from the trainer's checkpoint.

vLLM's own model classes and loaders in one process, without an engine; test_model_architectures.py has engines. The
tensors are parameters, buffers, and whatever layers keep of them, so a name, a fusion or a derived tensor that a sync
leaves out shows here, without a tolerance.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from forks import forked
from safetensors.torch import load_file

from multinode_kit.architectures import ARCHITECTURES, built_here
from trl_multinode.libraries import installed
from trl_multinode.weights.names import named_weights

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")

    def body(_: int) -> dict[str, dict]:
        from multinode_kit.loaded_models import prepare, sent_and_loaded

        prepare(folder)
        results = {}
        for name, known in ARCHITECTURES.items():
            try:
                results[name] = sent_and_loaded(built_here(known))
            except Exception as error:
                results[name] = {"error": repr(error)}
        return results

    with forked(body, 1, folder) as (rank,):
        yield rank.result


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_sent_equals_what_is_loaded_from_a_checkpoint(found, name, record_property):
    result = found[name]
    record_property("model", json.dumps({"name": name, "tensors": result.get("compared")}))
    assert result.get("error") is None
    assert result["lacking"] == [None, None] and result["differing"] == []
    assert result["compared"] > 25 and result["stale"] > 12


@pytest.mark.parametrize("loaded", [True, False])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_names_and_tensors_are_those_that_are_saved(name, loaded):
    """With the parts of fused tensors, for a model that was loaded and for one that never was."""
    known = ARCHITECTURES[name]
    model = built_here(known)
    if not loaded:
        del model._weight_conversions
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = load_file(Path(folder) / "model.safetensors")
    sent = {}
    for weight in named_weights(model):
        sent |= as_saved(weight)
    assert sent.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[each]) for each, tensor in sent.items())


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    """What a reload of GLM-4 MoE says of tensors that do not come, that it does not know, and that it never sees."""
    folder = tmp_path_factory.mktemp("faults")

    def body(_: int) -> dict[str, str | None]:
        from multinode_kit.loaded_models import LoadedModel, prepare
        from trl_multinode.weights.source import ModuleSource

        prepare(folder)
        model = built_here(ARCHITECTURES["glm4_moe"])
        model.save_pretrained(folder / "model")
        engine = LoadedModel(folder / "model", torch.float32, loads=False)

        def reloaded(change=lambda metadata: metadata) -> str | None:
            source = ModuleSource(model, torch.float32)
            owners = dict(source._owners)
            source._metadata = change(source._metadata)
            source._owners = {
                meta.name: owners.get(meta.name, owners[FIRST]) for meta in source._metadata
            }
            try:
                return engine.reload(source)
            except RuntimeError as error:
                return str(error)

        def without_bias(metadata):
            return [meta for meta in metadata if not meta.name.endswith(BIAS)]

        def unknown(metadata):
            return [replace(metadata[0], name=UNKNOWN), *metadata[1:]]

        found = {
            "lacking": reloaded(without_bias),
            "healed": reloaded(),
            "unknown": reloaded(unknown),
        }
        load = engine.model.load_weights
        for name, write in WRITES.items():
            engine.forget()
            engine.model.load_weights = lambda weights, write=write: write(engine.model)
            found[name] = reloaded()
        engine.model.load_weights = load
        engine.forget()
        return found | {"healed again": reloaded()}

    with forked(body, 1, folder) as (rank,):
        yield rank.result


FIRST, UNKNOWN = "model.embed_tokens.weight", "model.layers.0.of_no_layer.weight"
BIAS = "e_score_correction_bias"
WRITES = {
    "no parameter": lambda model: torch.empty(3, device="meta").copy_(torch.ones(3)),
    "parameter weight": lambda model: model.model.norm.weight.data.fill_(1.0),
}


def test_a_routing_bias_that_does_not_come_is_named(faults):
    assert f"layers.1.mlp.gate.{BIAS} (nothing came)" in faults["lacking"]
    assert faults["healed"] is None and faults["healed again"] is None


def test_a_tensor_that_the_loader_does_not_know_is_named_with_the_model_and_the_versions(faults):
    for wanted in (UNKNOWN, "Glm4Moe", transformers.__version__, installed("vllm")):
        assert wanted in faults["unknown"]


@pytest.mark.parametrize("name", WRITES)
def test_a_write_that_a_reload_would_not_notice_is_an_error(faults, name):
    assert f"of {name}," in faults[name]


def as_saved(weight) -> dict[str, torch.Tensor]:
    """Cut a fused tensor into the parts that its names promise."""
    if weight.parts is None:
        return {weight.name: weight.tensor}
    found, names = {}, weight.parts.names
    for name, part in zip(names, weight.tensor.chunk(len(names), weight.parts.dim), strict=True):
        found |= {name.replace("*", str(index)): one for index, one in enumerate(part)}
    return found
