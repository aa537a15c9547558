"""Which model the tests take: the hub's if it is there and an engine can run it, else the same architecture."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from trl_multinode.testing.architectures import ARCHITECTURES, HUB, LEAST_HEAD_DIM, built_here, model_for
from trl_multinode.testing.hub import LoopbackHub
from trl_multinode.testing.models import tiny_qwen2, tiny_tokenizer

pytestmark = pytest.mark.nightly
SCRIPT = """
import json, sys
from safetensors.torch import save_file
from trl_multinode.testing.architectures import model_for
found = {}
for name, engine in json.loads(sys.argv[2]):
    got = model_for(name, engine)
    save_file({k: v.clone() for k, v in got.model.state_dict().items()}, f"{sys.argv[1]}/{name}.safetensors")
    found[name] = got.source
json.dump(found, open(f"{sys.argv[1]}/found.json", "w"))
"""


def files(model, folder) -> dict[str, bytes]:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.real
def test_the_hubs_model_is_taken_if_it_is_there_and_an_engine_can_run_it(tmp_path):
    usable, flat = tiny_qwen2(seed=5), tiny_qwen2(layers=1, seed=6)
    flat.config.num_attention_heads = 8  # of 8: too small for an engine, fine for the fake
    asked = [("qwen2", True), ("qwen3", True), ("llama", True)]
    with LoopbackHub() as hub:
        hub.repos[f"{HUB}/small-Qwen2ForCausalLM-2.5"] = files(usable, tmp_path / "usable")
        hub.repos[f"{HUB}/small-Qwen3ForCausalLM"] = files(flat, tmp_path / "flat")
        environment = os.environ | hub.environment | {"HF_HOME": str(tmp_path / "cache")}
        command = [sys.executable, "-c", SCRIPT, str(tmp_path), json.dumps(asked)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == {"qwen2": f"{HUB}/small-Qwen2ForCausalLM-2.5", "qwen3": "built here", "llama": "built here"}
    said = [line for line in run.stdout.splitlines() if line.startswith("[architectures]")]
    assert f"qwen2: {HUB}/small-Qwen2ForCausalLM-2.5" in said[0]
    assert "qwen3" in said[1] and "head_dim of 8" in said[1]
    assert "llama" in said[2] and len(said) == 3
    weights = load_file(tmp_path / "qwen2.safetensors")
    assert all(weights[name].equal(tensor) for name, tensor in usable.state_dict().items())


def test_without_a_hub_the_architecture_is_built_here_and_the_reason_is_said():
    lines: list[str] = []
    found = model_for("llama", say=lines.append)
    assert found.source == "built here" and type(found.model).__name__ == "LlamaForCausalLM"
    assert len(lines) == 1 and "llama" in lines[0] and "hub" in lines[0]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_built_here_fits_an_engine_and_is_the_same_every_time(name):
    model, again = built_here(ARCHITECTURES[name]), built_here(ARCHITECTURES[name])
    config = model.config.get_text_config()
    assert type(model).__name__ == ARCHITECTURES[name].model_cls and config.head_dim >= LEAST_HEAD_DIM
    assert config.vocab_size % 64 and sum(p.numel() for p in model.parameters()) < 500_000
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
