"""The runner of `make trl-tests`, on a made-up checkout of TRL: what it builds, compares, tolerates and returns."""

from pathlib import Path

import pytest
import trl  # noqa: F401 - sets VLLM_LOGGING_LEVEL, which the suite would report as a change of the environment

# A program that `make trl-tests` runs, in two processes of pytest
pytestmark = [pytest.mark.real, pytest.mark.nightly]

SUITE = Path(__file__).parents[1] / "evidence" / "trl_suite"
TESTS = """
import pytest
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import __version__
from trl.import_utils import is_a_library_of_another_version_available


class TestGRPOTrainer:
    def test_version(self):
        assert __version__ != "0.1.0"

    def test_known(self):
        assert __version__ != "0.1.0"

    def test_both(self):
        raise OSError("under any classes")

    def test_stand_ins(self):
        tokenizer = AutoTokenizer.from_pretrained("trl-internal-testing/tiny-Qwen3ForSequenceClassification")
        assert tokenizer.decode([151657, 198, 330, 64648, 22785]) == '<tool_call>\\n "multiply_tool'
        assert len(tokenizer("<|im_start|>system\\n# Tools\\n\\nYou may call one or more functions").input_ids) < 20
        assert tokenizer.decode([80_000]) == " w80000" and tokenizer.decode([80_001]) == ""
        rows = load_dataset("trl-internal-testing/zen", "standard_prompt_only", split="train", streaming=True)
        assert [row["prompt"] for row in rows][:2] == ["Beautiful is better than", "Explicit is"]

    def test_library(self):
        assert not is_a_library_of_another_version_available()

        from trl.trainer import utils

        assert getattr(utils, "_use_triton", lambda device: True)("cpu")  # then only trained tokens are scored

    def test_default(self):
        from trl import RLOOConfig

        assert RLOOConfig(output_dir="x", use_cpu=True).use_vllm is False

    @pytest.mark.parametrize("name", ["trl-internal-testing/tiny-LlavaForConditionalGeneration"])
    def test_pictures(self, name):
        raise AssertionError("skipped, because images have no stand-in")
"""
KNOWN = """
[[failure]]
mode = "plain"
test = "test_known$"
reason = "the version is ours"
"""
ONLY_HERE = "fails only under trl_multinode (plain): tests/test_grpo_trainer.py::TestGRPOTrainer::test_version"


@pytest.fixture
def checkout(tmp_path):
    tests = tmp_path / "trl" / "tests"
    tests.mkdir(parents=True)
    (tests / "__init__.py").touch()
    (tests / "test_grpo_trainer.py").write_text(TESTS)
    (tests.parent / "VERSION").write_text("1.10.0.dev0")
    (tmp_path / "suite.toml").write_text((SUITE / "suite.toml").read_text() + KNOWN)
    return tests.parent


def test_only_a_failure_that_is_ours_and_has_no_reason_fails_the_run(checkout, monkeypatch, capfd):
    monkeypatch.syspath_prepend(str(SUITE))
    import run_suite

    options = ["--mode", "plain", "--jobs", "1", "--suite", str(checkout.parent / "suite.toml")]
    assert run_suite.main([str(checkout), *options]) == 1
    shown = capfd.readouterr().out
    assert "| `use_vllm=False` | 6 | 3 | 1 | 2 | 1 |" in shown
    assert "| `TestGRPOTrainer::test_known` | plain | passed | the version is ours |" in shown
    assert "| `TestGRPOTrainer::test_both` | plain | failed | `OSError: under any classes` |" in shown
    assert "| plain | 1 | no stand-in for trl-internal-testing/tiny-LlavaForConditionalGeneration" in shown
    assert [line.partition(": Ass")[0] for line in shown.splitlines() if line.startswith("fails only")] == [ONLY_HERE]
