"""The pieces of `make demo MODE=real`, which itself takes a quarter of an hour; docs/demo-real.md holds a run of it.

reasoning-gym and the model are in requirements/real.txt, which `make setup` does not install: without them the tests
that need them are skipped, by name.
"""

import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import deepspeed  # noqa: F401  sets a variable when `save_pretrained` imports it: let that be before the tests
import pytest
import torch

from trl_multinode import GRPOTrainer  # noqa: F401  sets some more: `train.py` imports it
from trl_multinode.testing.models import tiny_qwen2

with suppress(ImportError):
    import cv2  # noqa: F401  sets one too, when it is imported on the way

pytestmark = [pytest.mark.real, pytest.mark.nightly]
ROOT = Path(__file__).parent.parent


# In a process of its own, as `run.py` does it
SAY = """
import json, sys
from pathlib import Path
sys.path.insert(0, "examples/demo")
from real_model import save_model
from transformers import AutoModelForCausalLM, AutoTokenizer

save_model(Path(sys.argv[1]))
model, tokenizer = (kind.from_pretrained(sys.argv[1]) for kind in (AutoModelForCausalLM, AutoTokenizer))
said = model.generate(**tokenizer("1 + 1 =", return_tensors="pt"), max_new_tokens=4, do_sample=False)
print(json.dumps([tokenizer.decode(said[0, -4:]), tokenizer.padding_side, tokenizer.pad_token, tokenizer.eos_token]))
"""


@pytest.fixture(autouse=True)
def demo_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "demo"))
    yield
    for name in ("modes", "real_model", "real_task", "report", "run", "task", "train", "train_real"):
        sys.modules.pop(name, None)  # short names, which others may use


# ---- the task


@pytest.fixture
def task():
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed: requirements/real.txt")
    import real_task

    return real_task


def test_held_out_sums_are_not_trained_on_and_every_answer_is_right(task):
    train_set, held_out = task.make_datasets(num_held_out=16)
    prompts = [*train_set["prompt"], *held_out["prompt"]]
    assert len(held_out) == 16 and len(train_set) > 100
    assert len(set(prompts)) == len(prompts)
    for row in [*train_set, *held_out]:
        left, sign, right = re.search(r"(\d) ([+-]) (\d) =$", row["prompt"]).groups()
        assert int(row["answer"]) == int(left) + (int(right) if sign == "+" else -int(right))


def test_the_number_alone_scores_one_a_text_with_it_less_and_a_wrong_one_nothing(task):
    scores = task.sum_reward([" 7\n", "The sum is 7", "8", ""], answer=["7"] * 4)
    assert scores == [1.0, 1 / len("The sum is 7"), 0.0, 0.0]


# ---- the model


def test_a_model_out_of_a_gguf_file_can_be_saved_only_after_it_was_rebuilt(tmp_path):
    from real_model import rebuilt
    from transformers import AutoModelForCausalLM
    from transformers.quantizers.quantizer_gguf import GgufHfQuantizer
    from transformers.utils.quantization_config import GgufConfig

    model = tiny_qwen2(64, tied=True)
    model.hf_quantizer = GgufHfQuantizer(GgufConfig())  # as `from_pretrained(gguf_file=)` leaves it
    model.config.quantization_config = GgufConfig()
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "model")
    plain = rebuilt(model)
    plain.save_pretrained(tmp_path / "model")
    assert "quantization_config" not in json.loads((tmp_path / "model" / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for (name, ours), theirs in zip(model.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_smollm2_comes_out_of_its_package_and_adds_one_and_one(tmp_path):
    from real_model import gguf_file

    pytest.importorskip("gguf", reason="gguf is not installed: requirements/real.txt")
    try:
        gguf_file()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    said = subprocess.run([sys.executable, "-c", SAY, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert said.returncode == 0, said.stderr
    answer, side, pad, end = json.loads(said.stdout.splitlines()[-1])
    assert "2" in answer, "a model whose weights were lost says anything"
    assert (side, pad, end) == ("left", "<|endoftext|>", "<|im_end|>")


# ---- the modes


@pytest.mark.parametrize("mode", ["sync", "overlap-only", "balance-only", "overlap", "fake"])
def test_every_mode_of_the_small_demo_has_a_config(mode, monkeypatch, tmp_path):
    import train

    monkeypatch.setattr(sys, "argv", ["train.py", "--mode", mode, "--output_dir", str(tmp_path)])
    config = train.make_config(train.parse_arguments())
    assert config.max_staleness == int("overlap" in mode and "balance" not in mode)
    assert config.per_device_train_batch_size == (32 if mode == "fake" else 64)
