"""What only vLLM can do, on two nodes: it obeys the sampler and sees pictures, and the training is TRL's."""

import json
import re
from pathlib import Path

import pytest

from multinode_kit.faults import FORKED
from multinode_kit.launch_files import ZERO3
from multinode_kit.nodes import Nodes

SCRIPT = Path(__file__).parent / "scripts" / "features.py"
NAMES = ["structured_outputs", "stop_strings", "pictures"]
STOPS = "aeiou"
# `engine/` shows that vLLM obeys the sampler and sees pictures, `test_features.py` that the training is TRL's
pytestmark = [pytest.mark.engine, pytest.mark.two_node, pytest.mark.zero3, pytest.mark.nightly]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("sampling")
    env = {"TRL_MULTINODE_ENGINE_MODULE": FORKED}
    with Nodes(2, 1, folder=folder, deepspeed=ZERO3, env=env, forked=True) as nodes:
        nodes.launch(SCRIPT, str(folder), ",".join(NAMES))
        # whose results are there; six trainers in a process once ended it with SIGABRT
        nodes.wait(timeout_s=800)
        print(nodes.rank_log(0)[-3000:])
    return {name: json.loads((folder / f"{name}_rank0.json").read_text()) for name in NAMES}


PICTURES = pytest.mark.feature("Data", "images")


@pytest.mark.parametrize("name", [*NAMES[:2], pytest.param(NAMES[2], marks=PICTURES)])
def test_the_training_is_trls(found, name):
    assert found[name]["engine"] not in ("fake", "none") and found[name]["rows"] > 0
    assert max(found[name]["weights"]) <= 1e-6 and found[name]["moved"][-1] > 1e-4
    assert found[name]["missing"] == [] and max(found[name]["metrics"].values()) < 1e-5
    assert found[name]["observed"][0] == found[name]["observed"][1]


@pytest.mark.feature("Generation", "`vllm_structured_outputs_regex`")
def test_every_completion_matches_the_regex(found):
    completions = found["structured_outputs"]["observed"][0]["completions"]
    assert completions and all(re.fullmatch("[0-9]{3,60}", text) for text in completions)


@pytest.mark.feature("Generation", "`vllm_structured_outputs_regex`")
@pytest.mark.feature("Generation", "`top_p`")
def test_truncated_rows_keep_their_weight_and_the_gradient_is_autograds(found):
    observed = found["structured_outputs"]["observed"][0]
    assert observed["lengths"][-1] >= 30, (
        "short rows would say little: the weights of tokens multiply"
    )
    assert observed["rows_have_their_weight"] and observed["gradient_is_the_reference"]


@pytest.mark.feature("Generation", "stop strings")
@pytest.mark.feature("Generation", "`generation_kwargs`")
def test_completions_end_with_the_first_stop_string(found):
    completions = found["stop_strings"]["observed"][0]["completions"]
    stopped = [text for text in completions if re.search(f"[{STOPS}]", text)]
    assert len(stopped) > len(completions) / 4
    assert all(not re.search(f"[{STOPS}]", text[:-1]) for text in stopped)


@pytest.mark.feature("Data", "images: several, one or none per prompt of a batch")
def test_prompts_with_and_without_pictures_were_in_every_batch(found):
    asked = found["pictures"]["observed"][0]["pictures"]
    assert len(asked) == 3 and all(rows == [0, 0, 2, 2] for rows in asked)
