"""Which model the tests take: the hub's if it is there and an engine can run it, else the same architecture."""

import pytest
import torch

from trl_multinode.testing.architectures import ARCHITECTURES, LEAST_HEAD_DIM, built_here, model_for

pytestmark = pytest.mark.nightly


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
