"""Models of today train on two nodes under ZeRO-3, from a checkpoint, with a real vLLM on each node.

A hybrid, a mixture of experts and a vision model decide; the others run every few nights. What only this shows: the
names of a checkpoint that transformers loaded under ZeRO-3, and gathered shards, are those that vLLM's loaders expect.
"""

import json
from functools import cache
from pathlib import Path

import cv2  # noqa: F401  (transformers imports it with the first image, and it changes LD_LIBRARY_PATH)
import pytest
from waiting import HANG_S

from multinode_kit.architectures import ARCHITECTURES, model_for
from multinode_kit.faults import FORKED, HOOK
from multinode_kit.nodes import Nodes
from multinode_kit.vision_models import VISION_MODELS

SCRIPT = Path(__file__).parent / "scripts" / "families.py"
DECIDING = ("qwen3_5", "mixtral", "qwen3_vl")
OTHERS = tuple(name for name in ARCHITECTURES if name not in (*DECIDING, "idefics3"))
pytestmark = [pytest.mark.engine, pytest.mark.zero3, pytest.mark.two_node]


def launched(folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        if name in ARCHITECTURES:
            found = model_for(name)
            model, processor = found.model, found.processing_class
        else:
            model, processor = VISION_MODELS[name]()
        model.float().save_pretrained(folder / name / "model")
        processor.save_pretrained(folder / name / "model")
    env = {HOOK: FORKED}
    with Nodes(2, 1, folder=folder, forked=True, env=env) as nodes:
        nodes.launch(SCRIPT, str(folder), ",".join(names))
        nodes.wait(timeout_s=4 * HANG_S)
        print(nodes.rank_log(0)[-4000:])
    return folder


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Function that returns the folder of a model's launch: that of the deciding ones, or that of the others."""

    @cache
    def launch(decide: bool) -> Path:
        return launched(tmp_path_factory.mktemp("families"), DECIDING if decide else OTHERS)

    return lambda name: launch(name in DECIDING)


NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS]


@pytest.mark.parametrize("name", [*DECIDING, *NIGHTLY])
def test_a_family_trains_and_its_engines_have_the_weights_of_each_step(
    folder_of, name, record_property
):
    for rank in range(2):
        result = folder_of(name) / name / f"result_rank{rank}.json"
        assert result.exists(), f"{name} did not end; see the launch's log above"
        found = json.loads(result.read_text())
        assert found["world"] == 2 and found["version"] == 3 and len(found["differences"]) == 3
        assert min(found["norms"]) > 0
        # stale weights would differ by more than a tenth after a step of 0.01
        exact = name not in ARCHITECTURES or ARCHITECTURES[name].dtype_name == "float32"
        assert max(found["differences"]) < (1e-3 if exact else 0.08)
    record_property("model", json.dumps({"name": name, "two_nodes": True}))
