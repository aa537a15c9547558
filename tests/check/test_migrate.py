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


LATER = """\
import trl

args, model_args = parser.parse_args_and_config()
args.vllm_mode = "server"
args.warmup_ratio = args.warmup_ratio / 2
if small:
    args.max_prompt_length = 512
model_args.torch_dtype = None
other.max_prompt_length = 512
config = trl.GRPOConfig(model_init_kwargs={"torch_dtype": "auto"}, **words)
more = dict(torch_dtype="auto", use_vllm=True)
t = trl.GRPOTrainer("m", args=args)
t.train()
model.train()
"""
LATER_CHANGED = """\
import trl

args, model_args = parser.parse_args_and_config()
args.warmup_steps = args.warmup_steps / 2
if small:
    pass
model_args.dtype = None
other.max_prompt_length = 512
config = trl.GRPOConfig(model_init_kwargs={"dtype": "auto"}, **words)
more = dict(dtype="auto", use_vllm=True)
t = trl.GRPOTrainer("m", args=args)
t.train(resume_from_checkpoint=t.last_checkpoint())
model.train()
"""


def test_attributes_dicts_and_names_of_the_users_own_are_changed_and_an_unread_dict_is_named():
    new, notes = migrated(LATER)
    assert new == LATER_CHANGED
    assert [note for note in notes if "`**words`" in note and "line 10" in note]
    assert len(migrated(new)[1]) == 2  # `import trl` and `**words`


@pytest.mark.parametrize("name", ["r.yaml", "r.yml", "r.json"])
def test_a_file_of_arguments_is_no_script(name, tmp_path, capsys):
    path = tmp_path / name
    path.write_text("max_steps: 3\n")
    with pytest.raises(SystemExit) as stop:
        main(["migrate", str(path)])
    assert stop.value.code == 2 and f"--config {path}" in capsys.readouterr().err


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
