"""`trl-multinode migrate`: what a script for TRL must change, and what the check says of a former argument."""

from dataclasses import fields
from inspect import signature

import pytest
from trl import GRPOConfig, GRPOTrainer, ModelConfig

from trl_multinode.former_arguments import REMOVED, RENAMED, did_you_mean
from trl_multinode.tools import main
from trl_multinode.tools.migrate import migrated

SCRIPT = """\
import os
from trl import GRPOConfig, GRPOTrainer
from trl import maybe_apply_chat_template
from peft import LoraConfig

args = GRPOConfig(
    output_dir="out", bf16=True,
    use_vllm=True, vllm_mode="server",
    vllm_server_host="ö",  # the server
    max_prompt_length=512,
    warmup_ratio=0.1, overwrite_output_dir=True,
)
other = GRPOConfig("out", vllm_mode="colocate")
only = GRPOConfig(use_vllm=True)
trainer = GRPOTrainer("m", args=args, tokenizer=tokenizer, peft_config=LoraConfig(r=8))
trainer.train()
"""
CHANGED = """\
import os
from trl_multinode import GRPOConfig, GRPOTrainer
from trl import maybe_apply_chat_template
from peft import LoraConfig

args = GRPOConfig(
    output_dir="out", bf16=True,
    warmup_steps=0.1,
)
other = GRPOConfig("out")
only = GRPOConfig()
trainer = GRPOTrainer("m", args=args, processing_class=tokenizer, peft_config=LoraConfig(r=8))
trainer.train(resume_from_checkpoint=trainer.last_checkpoint())
"""


def test_a_script_for_trl_is_changed_where_it_must_be():
    new, notes = migrated(SCRIPT)
    assert new == CHANGED
    assert len(notes) == 10 and any("line 11" in note and "warmup_steps" in note for note in notes)
    assert migrated(CHANGED) == (CHANGED, [])


@pytest.mark.parametrize(
    "statement",
    ["import trl\n", "from trl.trainer.grpo_trainer import GRPOTrainer\n"],
)
def test_other_imports_of_a_trainer_are_named_or_changed(statement):
    new, notes = migrated(statement)
    assert notes or new == "from trl_multinode import GRPOTrainer\n"


def test_the_command_prints_a_diff_and_writes_nothing(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    assert main(["migrate", str(path)]) == 0
    out, error = capsys.readouterr()
    assert "+from trl_multinode import GRPOConfig, GRPOTrainer\n" in out and "check" in error
    assert path.read_text() == SCRIPT
    path.write_text("def broken(:\n")
    assert main(["migrate", str(path)]) == 2 and "broken" not in capsys.readouterr().out


def test_the_tables_fit_the_installed_trl():
    known = {one.name for kind in (GRPOConfig, ModelConfig) for one in fields(kind)}
    known |= set(signature(GRPOTrainer.__init__).parameters)
    own = {"vllm_devices"}
    assert not known & set(RENAMED) and set(RENAMED.values()) <= known | own
    # of the removed ones those of a server, of colocation and of vLLM's place still exist in TRL
    assert all(name.startswith(("vllm_", "use_vllm")) for name in known & set(REMOVED))


@pytest.mark.parametrize(
    ("argument", "today"),
    [("--torch_dtype", "dtype"), ("--vllm-max-model-len", "vllm_max_model_length")],
)
def test_a_former_argument_gets_its_name_of_today(argument, today):
    assert f"`{today}`" in did_you_mean(argument, ["--torch_compile", "--max_completion_length"])


@pytest.mark.parametrize("argument", [f"--{name}" for name in REMOVED])
def test_a_removed_argument_gets_the_reason_and_no_other_name(argument):
    assert REMOVED[argument.removeprefix("--")] in did_you_mean(
        argument, ["--vllm_mode", "--output_dir"]
    )


def test_the_example_script_says_it_too(capsys):
    with pytest.raises(SystemExit):
        main(["grpo", "--torch_dtype", "float32"])
    assert "`dtype`" in capsys.readouterr().err
