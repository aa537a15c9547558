"""Without node mode TRL's other trainers are TRL's: the same losses and gradients, and no host.

In a process of its own (`python test_trainers_elsewhere.py FOLDER`): forked from a suite that had pushed and served,
its trainers hung in their first step.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import pytest
from datasets import Dataset
from teacher_server import teacher_server
from transformers import AutoTokenizer

import trl_multinode
from multinode_kit.launch_files import fresh_environment
from multinode_kit.models import tiny_qwen2, tiny_tokenizer

# 100 CPU s; that a config leaves node mode off is decided by test_config.py
pytestmark = [pytest.mark.real, pytest.mark.nightly]
PROMPTS = Dataset.from_dict(
    {"prompt": [f"{i} =" for i in range(16)], "privileged_context": ["1"] * 16}
)
CHATS = Dataset.from_list(
    [
        {
            "messages": [
                {"role": "user", "content": f"{i} ="},
                {"role": "assistant", "content": " 2"},
            ]
        }
        for i in range(16)
    ]
)
GROUPS = {"num_generations": 4}

CLASSES = {
    name: [getattr(trl_multinode, f"{name}{kind}") for kind in ("Trainer", "Config")]
    for name in (
        "RLOO",
        "Distillation",
        "SDFT",
        "SDPO",
        "GOLD",
        "IWOPD",
        "GMPO",
        "ServerDistillation",
    )
}


def reward(completions, **_):
    return [float(len(set(text))) for text in completions]


CALLS = {
    "RLOO": (
        {"reward_funcs": reward, "train_dataset": PROMPTS.remove_columns("privileged_context")},
        GROUPS,
    ),
    "Distillation": (
        {"teacher_model": "teacher", "train_dataset": PROMPTS.remove_columns("privileged_context")},
        {},
    ),
    "SDFT": ({"train_dataset": PROMPTS}, GROUPS),
    "SDPO": ({"reward_funcs": reward, "train_dataset": PROMPTS}, GROUPS),
    "GOLD": (
        {"teacher_model": "teacher", "train_dataset": CHATS},
        {"lmbda": 1.0, "max_length": 32},
    ),
    "IWOPD": ({"teacher_model": "teacher", "train_dataset": CHATS}, {"max_length": 32}),
    "GMPO": (
        {"reward_funcs": reward, "train_dataset": PROMPTS.remove_columns("privileged_context")},
        GROUPS,
    ),
    "ServerDistillation": ({"train_dataset": PROMPTS.remove_columns("privileged_context")}, {}),
}


def one_step(config: type, trainer: type, name: str, folder) -> tuple[bool, float, float]:
    call, settings = CALLS[name]
    args = config(
        output_dir=str(folder / "out"), use_cpu=True, bf16=False, use_vllm=False, report_to=[], max_steps=1,
        max_completion_length=6, logging_steps=1, save_strategy="no", gradient_checkpointing=False,
        disable_tqdm=True, per_device_train_batch_size=4, **settings,
    )  # fmt: skip
    call = call | ({"teacher_model": str(folder / "teacher")} if "teacher_model" in call else {})
    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    made = trainer(str(folder / "student"), args=args, processing_class=tokenizer, **call)
    made.train()
    entry = made.state.log_history[0]
    return getattr(made, "host", None) is None, entry["loss"], entry["grad_norm"]


def both(name: str, folder: Path) -> list:
    trainer, config = CLASSES[name]
    theirs = next(kind for kind in config.__mro__ if kind.__module__.startswith("trl."))
    return [one_step(config, trainer, name, folder), one_step(theirs, trainer._trl, name, folder)]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list]:
    folder = tmp_path_factory.mktemp("elsewhere")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    for seed, name in enumerate(("student", "teacher")):
        tiny_qwen2(seed=seed).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env=fresh_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("name", CALLS)
def test_without_node_mode_a_trainer_is_trls(name, found):
    ours, trls = found[name]
    assert ours == trls and ours[0] is True and ours[2] > 0


if __name__ == "__main__":
    here = Path(sys.argv[1])
    with teacher_server(here / "teacher") as url:
        CALLS["ServerDistillation"][1]["teacher_model_server_url"] = url
        (here / "found.json").write_text(json.dumps({name: both(name, here) for name in CALLS}))
