"""The reward of `make demo MODE=continuous`, which itself takes some minutes."""

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True)
def demo_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples" / "demo"))
    yield
    sys.modules.pop("task", None)  # a short name, which others may use


def test_a_completion_that_does_not_end_scores_nothing():
    from task import EOS_ID, answer, ended_reward, make_tokenizer

    prompts = ["c a j e"] * 3
    right = " ".join(answer(prompts[0]))
    completions = [right, f"{right} a a", f"{right} a"]
    a = make_tokenizer()("a")["input_ids"]
    ids = [[EOS_ID], [*a, EOS_ID], a]
    assert ended_reward(prompts, completions, completion_ids=ids) == [1.0, 1.0, 0.0]
