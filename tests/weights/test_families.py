"""After two syncs vLLM's model has bit by bit the tensors that it loads from the trainer's checkpoint.

vLLM's own model classes and loaders in one process, without an engine; test_model_architectures.py has engines. The
tensors are parameters, buffers, and whatever layers keep of them, so a name, a fusion or a derived tensor that a sync
leaves out shows here, without a tolerance.
"""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from forks import forked
from safetensors.torch import load_file

from multinode_kit.architectures import ARCHITECTURES, built_here
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


def as_saved(weight) -> dict[str, torch.Tensor]:
    """Cut a fused tensor into the parts that its names promise."""
    if weight.parts is None:
        return {weight.name: weight.tensor}
    found, names = {}, weight.parts.names
    for name, part in zip(names, weight.tensor.chunk(len(names), weight.parts.dim), strict=True):
        found |= {name.replace("*", str(index)): one for index, one in enumerate(part)}
    return found
